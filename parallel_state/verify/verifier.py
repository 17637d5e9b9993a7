"""``Verifier``: the training of one process, with which layouts are compared."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError

import torch
import typing_extensions

import parallel_state
from parallel_state import cpu
from parallel_state.errors import MControllerError
from parallel_state.hangs.lines import path_text
from parallel_state.simulated import run_ranks
from parallel_state.verify.comparing import (
    OneProcess,
    RankReport,
    ReferenceStep,
    check_deterministic,
    check_trained,
    compare_rank,
    replicas_that_differ,
    tolerance,
    train_reference,
)
from parallel_state.verify.layouts import (
    ONE_PROCESS,
    Variant,
    all_layouts,
    check_divisible,
    default_layouts,
    parse_layout,
)
from parallel_state.verify.locating import locate, record_reference
from parallel_state.verify.outcome import LayoutDiffers, Outcome
from parallel_state.verify.precision import in_float64
from parallel_state.verify.program import Program, VerifyError
from parallel_state.verify.recording import StepRecords, module_name, source_of
from parallel_state.verify.seeds import wrong_seeds
from parallel_state.verify.training import config_for

_DECORATORS = typing_extensions.__file__  # of functions of torch
_NOT_OF_A_PROGRAM = (
    *(f"{Path(package.__file__ or '').parent}{os.sep}" for package in (torch, parallel_state)),
    _DECORATORS,
)


class Verifier:
    """Verifies layouts of one program.

    Args:
        program: the program.
        steps: training steps in each layout.
        exact: whether to compute in float64, to tell faults from rounding.

    Attributes:
        config: the program's config in one process.
        reference: the training of one process.
        fingerprint: a sum over the bits of it.
        locates: whether ``verify`` trains again to find where a difference begins.

    Raises:
        VerifyError: the program is not deterministic, fails or trains nothing in one process, or cannot be compared.
    """

    def __init__(self, program: Program, *, steps: int = 2, exact: bool = False) -> None:
        cpu.install()
        self.program, self.steps, self._exact = program, steps, exact
        self.locates = True
        self._records: dict[int, StepRecords] = {}
        self._dtype = torch.float64 if exact else torch.float32
        check_divisible(program, ONE_PROCESS)
        with self._precision():
            try:
                self.config = config_for(program, ONE_PROCESS, self._dtype)
                self.reference, again = self._one_process(), self._one_process()
            except MControllerError:
                raise
            except Exception as error:  # whatever the program raises
                raise VerifyError(f"the program fails in one process: {_failure_text(error)}") from error
        check_deterministic(self.reference, again)
        check_trained(self.reference)
        self.fingerprint = self.reference.fingerprint

    def _precision(self) -> contextlib.AbstractContextManager[None]:
        return in_float64() if self._exact else contextlib.nullcontext()

    def _one_process(self) -> OneProcess:
        return run_ranks(ONE_PROCESS.layout, lambda: train_reference(self.program, self._dtype, self.steps))[0]

    @property
    def tolerance(self) -> float:
        """The largest relative difference that counts as equal."""
        return tolerance(self.program, self.reference)

    def records(self, step: int) -> StepRecords:
        """Return what the modules of one process compute in a step, counted from 1; it is computed once."""
        if step not in self._records:
            with self._precision():
                self._records[step] = record_reference(self.program, self.reference, step)
        return self._records[step]

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
            config_for(self.program, variant, self._dtype)
        except VerifyError:
            return False
        return True

    def verify(self, layout: str | Variant) -> Outcome:
        """Train in a layout, and compare every rank with one process.

        Args:
            layout: a layout or its text, such as ``"tp=2,pp=2,sp"``.

        Raises:
            VerifyError: the layout does not fit the program, or the program ignores it.
        """
        began = time.perf_counter()
        variant = parse_layout(layout) if isinstance(layout, str) else layout
        check_divisible(self.program, variant)
        outcome = Outcome(variant.text, variant.layout.world_size)
        try:
            with self._precision():
                config_for(self.program, variant, self._dtype)
                self._compare(variant, outcome)
        except VerifyError:
            raise
        except Exception as error:  # whatever the program raises: the report names it, and other layouts go on
            outcome.failure = _failure_text(error)
            if self.locates:
                with self._precision():
                    locate(self.program, variant, self.reference, self.records(1), outcome)
        outcome.seconds = time.perf_counter() - began
        return outcome

    def _compare(self, variant: Variant, outcome: Outcome) -> None:
        reports = self._ranks(variant, self.reference)
        differences = list(wrong_seeds([(report.initial, report.coordinates) for report in reports]))
        differences += [difference for report in reports for difference in report.differences]
        outcome.bits = hashlib.sha256(repr([report.digests for report in reports]).encode()).hexdigest()[:16]
        outcome.largest = max(report.largest for report in reports)
        first = min((difference.step for difference in differences), default=0)
        outcome.differences = [difference for difference in differences if difference.step == first]
        if not differences:
            outcome.differences = replicas_that_differ(reports, self.steps)
        elif self.locates:
            locate(self.program, variant, self.reference, self.records(first), outcome)

    def _ranks(self, variant: Variant, reference: OneProcess) -> list[RankReport]:
        allowed = self.tolerance
        return run_ranks(variant.layout, lambda: compare_rank(self.program, variant, reference, self._dtype, allowed))

    def save(self, path: Path) -> None:
        """Write the training of one process to a file, for ``against`` with another version of the code."""
        torch.save(asdict(self.reference), path)

    def against(self, path: Path) -> Outcome:
        """Compare the training of one process with a saved one, from the saved weights.

        Layouts that are verified later are compared with the saved one.

        Args:
            path: what ``save`` wrote with this program, in another environment or at another commit.

        Raises:
            VerifyError: the file has other weights, another number of steps, or is no such file.
        """
        began = time.perf_counter()
        saved = _load(path)
        if len(saved.steps) != self.steps or saved.dtype != self._dtype:
            raise VerifyError(
                f"{path} has {len(saved.steps)} steps in {saved.dtype}; this run makes {self.steps} in {self._dtype}"
            )
        for weight, there in saved.start.items():
            here = self.reference.start.get(weight)
            if here is None or here.shape != there.shape:
                now = "missing" if here is None else list(here.shape)
                raise VerifyError(
                    f"{path} is of another program: {weight} is {list(there.shape)} there and {now} here", weight=weight
                )
        with self._precision():
            (report,) = self._ranks(ONE_PROCESS, saved)
        self.reference = saved
        self._records.clear()
        differences = [one for one in report.differences if one.kind != "seed"]  # other initial weights are no fault
        seconds = time.perf_counter() - began
        return Outcome(f"against {path.name}", 1, differences, largest=report.largest, seconds=seconds)


def _load(path: Path) -> OneProcess:
    try:
        content = torch.load(path, weights_only=True)
        steps = [ReferenceStep(**step) for step in content.pop("steps")]
        return OneProcess(**content, steps=steps)
    except (OSError, RuntimeError, TypeError, KeyError, UnpicklingError) as error:
        first = str(error).partition("\n")[0].partition(". ")[0]  # torch adds advice
        raise VerifyError(f"{path} is no file that --save wrote: {type(error).__name__}: {first}") from error


def verify_layout(program: Program, layout: str, *, steps: int = 2) -> Outcome:
    """Assert that a layout trains the model that one process trains; for tests.

    Args:
        program: the program.
        layout: the text of the layout, such as ``"tp=2,cp=2"``.
        steps: training steps.

    Returns:
        The outcome: its largest difference and its seconds.

    Raises:
        LayoutDiffers: it does not; the message has the differences and where they begin.
        VerifyError: the program cannot be verified in this layout.
    """
    verifier = Verifier(program, steps=steps)
    outcome = verifier.verify(layout)
    if not outcome.equal:
        raise LayoutDiffers(outcome.report(), outcome=outcome)
    return outcome


def _failure_text(error: Exception) -> str:
    """Return an error with its line, the module that ran, and its notes."""
    notes = "\n".join(getattr(error, "__notes__", ()))
    frames = list(traceback.walk_tb(error.__traceback__))
    of_program = [
        candidate for candidate in frames if not candidate[0].f_code.co_filename.startswith(_NOT_OF_A_PROGRAM)
    ]
    where = "".join(
        f"\nat {path_text(f.f_code.co_filename)}:{line} in {f.f_code.co_name}" for f, line in of_program[-1:]
    )
    owners = [frame.f_locals.get("self") for frame, _ in frames]
    modules = [owner for owner in owners if isinstance(owner, torch.nn.Module)]
    if modules:
        where += f"\nin {_path_of(modules)} ({source_of(modules[-1])})"
    return f"{type(error).__name__}: {error}{where}" + (f"\n{notes}" if notes else "")


def _path_of(modules: list[torch.nn.Module]) -> str:
    """Return the name of the last module in the outermost that has it."""
    for model in modules:
        for path, module in model.named_modules():
            if module is modules[-1] and path.removeprefix("module"):
                return module_name(model, path).removeprefix("module.")
    return type(modules[-1]).__name__
