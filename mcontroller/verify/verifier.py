"""``Verifier``: the training of one process, with which layouts are compared."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from functools import partial

import torch

from mcontroller.verify.comparing import (
    OneProcess,
    check_deterministic,
    compare_rank,
    replicas_that_differ,
    tolerance,
    train_reference,
)
from mcontroller.verify.layouts import (
    ONE_PROCESS,
    Variant,
    all_layouts,
    check_divisible,
    default_layouts,
    parse_layout,
)
from mcontroller.verify.locating import locate
from mcontroller.verify.outcome import LayoutDiffers, Outcome
from mcontroller.verify.program import Program, VerifyError
from mcontroller.verify.training import config_for
from parallel_state import cpu
from parallel_state.simulated import run_ranks

__all__ = ["Verifier", "verify_layout"]


class Verifier:
    """Verifies layouts of one program.

    Args:
        program: The program.
        steps: Training steps in each layout.
        dtype: The type of the weights.

    Attributes:
        config: The program's config in one process.

    Raises:
        VerifyError: The program is not deterministic, or cannot be compared.
    """

    def __init__(self, program: Program, *, steps: int = 2, dtype: torch.dtype = torch.float32) -> None:
        cpu.install()
        self.program, self.steps, self.dtype = program, steps, dtype
        check_divisible(program, ONE_PROCESS)
        self.config = config_for(program, ONE_PROCESS, dtype)
        train: Callable[[], OneProcess] = partial(train_reference, program, dtype, steps)
        self.reference, again = run_ranks(ONE_PROCESS.layout, train)[0], run_ranks(ONE_PROCESS.layout, train)[0]
        check_deterministic(self.reference, again)

    @property
    def tolerance(self) -> float:
        """The largest relative difference that counts as equal."""
        return tolerance(self.program, self.reference)

    def default_layouts(self) -> list[str]:
        """Return the smallest layouts that have every axis of the model, alone and in pairs, and fit the program."""
        return list(filter(self._fits, default_layouts(self.config)))

    def all_layouts(self, most_ranks: int) -> list[str]:
        """Return all layouts of powers of two up to a number of ranks that fit the program."""
        return list(filter(self._fits, all_layouts(self.config, most_ranks)))

    def _fits(self, text: str) -> bool:
        variant = parse_layout(text)
        try:
            check_divisible(self.program, variant)
            config_for(self.program, variant, self.dtype)
        except VerifyError:
            return False
        return True

    def verify(self, layout: str | Variant) -> Outcome:
        """Train in a layout, and compare every rank with one process.

        Args:
            layout: A layout or its text, such as ``"tp=2,pp=2,sp"``.

        Raises:
            VerifyError: The layout does not fit the program, or the program ignores it.
        """
        began = time.perf_counter()
        variant = parse_layout(layout) if isinstance(layout, str) else layout
        check_divisible(self.program, variant)
        config_for(self.program, variant, self.dtype)
        outcome = Outcome(variant.text, variant.layout.world_size)
        try:
            self._compare(variant, outcome)
        except VerifyError:
            raise
        except Exception as error:  # whatever the program raises: the report names it, and other layouts go on
            outcome.failure = _failure_text(error)
        outcome.seconds = time.perf_counter() - began
        return outcome

    def _compare(self, variant: Variant, outcome: Outcome) -> None:
        reports = run_ranks(variant.layout, lambda: compare_rank(self.program, variant, self.reference))
        found = [each for report in reports for each in report.differences]
        outcome.largest = max(report.largest for report in reports)
        first = min((each.step for each in found), default=0)
        outcome.differences = [each for each in found if each.step == first] or replicas_that_differ(
            reports, self.steps
        )
        if found:
            located = locate(self.program, variant, self.reference, outcome.differences)
            outcome.place = located.place
            outcome.differences = [located.noted(each) for each in outcome.differences]


def verify_layout(program: Program, layout: str, *, steps: int = 2) -> Outcome:
    """Assert that a layout trains the model that one process trains; for tests.

    Args:
        program: The program.
        layout: The text of the layout, such as ``"tp=2,cp=2"``.
        steps: Training steps.

    Returns:
        The outcome: its largest difference and its seconds.

    Raises:
        LayoutDiffers: It does not; the message has the differences and where they begin.
        VerifyError: The program cannot be verified in this layout.
    """
    verifier = Verifier(program, steps=steps)
    outcome = verifier.verify(layout)
    if not outcome.equal:
        lines = "\n  ".join(outcome.lines())
        raise LayoutDiffers(f"{layout} does not train the model that one process trains:\n  {lines}", outcome=outcome)
    return outcome


def _failure_text(error: Exception) -> str:
    notes = "\n".join(getattr(error, "__notes__", ()))
    frames = traceback.extract_tb(error.__traceback__)
    where = f"\nat {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"{type(error).__name__}: {error}{where}" + (f"\n{notes}" if notes else "")
