"""Fixtures for tests of topology-aware workers; pytest loads them when mcontroller is installed.

``mock_group(Worker, layout, ...)`` makes mocked worker groups as ``mcontroller.testing.mock_worker_group`` does, and
shuts them down after the test; ``simulated_group`` makes groups of simulated ranks, which communicate.
``mock_rank(layout, rank)`` runs the rest of the test as one rank of a layout. ``verify_layout(program, layout)`` fails
the test with a report if a layout does not train the model that one process trains. ``dry_run(program, layout)``
returns what a training step needs, without data: see ``parallel_state.dry_run``.

On a machine without a GPU, test modules may import Megatron-Core at their top: the plugin prepares it for the CPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import pytest

from parallel_state.patches.import_hook import call_before_import

if TYPE_CHECKING:
    from mcontroller.testing.mocked_groups import MockWorkerGroup
    from mcontroller.testing.simulated_groups import SimulatedWorkerGroup
    from parallel_state.dry_run.outcome import Outcome as DryOutcome
    from parallel_state.layout import ParallelLayout
    from parallel_state.topology import Topology
    from parallel_state.verify.outcome import Outcome
    from parallel_state.verify.program import Program
    from parallel_state.verify.verifier import Verifier

T = TypeVar("T")

MockGroup: TypeAlias = "Callable[..., MockWorkerGroup[Any]]"
"""The type of the fixture ``mock_group``: called as ``mcontroller.testing.mock_worker_group``."""
SimulatedGroupMaker: TypeAlias = "Callable[..., SimulatedWorkerGroup[Any]]"
"""The type of the fixture ``simulated_group``: called as ``mcontroller.testing.simulated_worker_group``."""
MockRank: TypeAlias = "Callable[[int | ParallelLayout | Topology, int], dict[str, int]]"
"""The type of the fixture ``mock_rank``: called with a layout and a rank, returns the coordinates of the rank."""
LayoutFixture: TypeAlias = "Callable[..., Outcome]"
"""The type of the fixture ``verify_layout``: called as ``verify_layout(program, layout, *, steps=2, exact=False)``.

``program`` is a Program, or FILE.py:NAME or MODULE:NAME of one. One process trains it once for all tests."""
DryRunFixture: TypeAlias = "Callable[..., DryOutcome]"
"""The type of the fixture ``dry_run``: called as ``parallel_state.dry_run.dry_run``, or with the name of a program."""


@pytest.fixture(scope="session", name="dry_run")
def dry_run_fixture() -> DryRunFixture:
    """Make steps of programs without data; see ``DryRunFixture``."""

    def run(program: Program | str, layout: str, **options: Any) -> DryOutcome:
        from parallel_state.dry_run.run import dry_run  # imported by the tests that need it: it loads torch
        from parallel_state.verify.program import load_program

        return dry_run(load_program(program) if isinstance(program, str) else program, layout, **options)

    return run


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Install the CPU layer when Megatron-Core is imported first, before conftest files and tests are."""
    if "megatron.core" not in sys.modules:
        call_before_import("megatron.core", _install_cpu_layer)


def _install_cpu_layer() -> None:
    from parallel_state import cpu  # loads torch, which a test session without Megatron may not need

    cpu.install()


@contextlib.contextmanager
def _entering(make: Callable[..., AbstractContextManager[T]]) -> Iterator[Callable[..., T]]:
    """Give a function that enters what ``make`` returns, until the block ends."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(make(*args, **kwargs))


@pytest.fixture
def mock_group() -> Iterator[MockGroup]:
    """Make mocked worker groups that end with the test; see ``MockGroup``."""
    from mcontroller.testing.mocked_groups import mock_worker_group  # loads torch and Megatron, only if a test needs it

    with _entering(mock_worker_group) as make:
        yield make


@pytest.fixture
def simulated_group() -> Iterator[SimulatedGroupMaker]:
    """Make simulated worker groups that end with the test; see ``SimulatedGroupMaker``."""
    from mcontroller.testing.simulated_groups import simulated_worker_group  # as above

    with _entering(simulated_worker_group) as make:
        yield make


@pytest.fixture
def mock_rank() -> Iterator[MockRank]:
    """Run the rest of the test as one rank of a layout; see ``MockRank``."""
    from mcontroller.testing.mocked_groups import mocked_rank  # as above

    with _entering(mocked_rank) as enter:
        yield enter


@pytest.fixture(scope="session", name="verify_layout")
def layout_fixture() -> LayoutFixture:
    """Verify layouts of programs; see ``LayoutFixture``."""
    verifiers: dict[tuple[Program, int, bool], Verifier] = {}

    def verify(program: Program | str, layout: str, *, steps: int = 2, exact: bool = False) -> Outcome:
        from parallel_state.verify.program import load_program  # as above
        from parallel_state.verify.verifier import Verifier

        loaded = load_program(program) if isinstance(program, str) else program
        key = loaded, steps, exact
        if key not in verifiers:
            verifiers[key] = Verifier(loaded, steps=steps, exact=exact)
        outcome = verifiers[key].verify(layout)
        if not outcome.equal:
            pytest.fail(outcome.report(), pytrace=False)
        return outcome

    return verify
