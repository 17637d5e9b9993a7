"""Unit tests of topology-aware workers in one process: mocked and simulated worker groups, pytest fixtures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from mcontroller.testing.mocked_groups import InjectedFailure as InjectedFailure
    from mcontroller.testing.mocked_groups import MockWorkerGroup as MockWorkerGroup
    from mcontroller.testing.mocked_groups import RecordedCall as RecordedCall
    from mcontroller.testing.mocked_groups import dies as dies
    from mcontroller.testing.mocked_groups import is_late as is_late
    from mcontroller.testing.mocked_groups import mock_worker_group as mock_worker_group
    from mcontroller.testing.mocked_groups import mocked_rank as mocked_rank
    from mcontroller.testing.mocked_groups import raises as raises
    from mcontroller.testing.pytest_plugin import LayoutFixture as LayoutFixture
    from mcontroller.testing.pytest_plugin import MockGroup as MockGroup
    from mcontroller.testing.pytest_plugin import MockRank as MockRank
    from mcontroller.testing.pytest_plugin import SimulatedGroupMaker as SimulatedGroupMaker
    from mcontroller.testing.simulated_groups import SimulatedWorkerGroup as SimulatedWorkerGroup
    from mcontroller.testing.simulated_groups import simulated_worker_group as simulated_worker_group
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
