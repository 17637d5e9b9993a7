"""Fixtures for tests of topology-aware workers; pytest loads them when mcontroller is installed.

``mock_group(Worker, layout, ...)`` makes mocked worker groups as ``mcontroller.testing.mock_worker_group`` does, and
shuts them down after the test. ``mock_rank(layout, rank)`` runs the rest of the test as one rank of a layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mcontroller.testing import MockWorkerGroup


@pytest.fixture
def mock_group() -> Iterator[Callable[..., MockWorkerGroup[Any]]]:
    """Make mocked worker groups that end with the test; takes the arguments of ``mock_worker_group``."""
    from mcontroller.testing import mock_worker_group  # imported by the tests that need it: it loads torch and Megatron

    with contextlib.ExitStack() as stack:

        def make(*args: Any, **kwargs: Any) -> MockWorkerGroup[Any]:
            return stack.enter_context(mock_worker_group(*args, **kwargs))

        yield make


@pytest.fixture
def mock_rank() -> Iterator[Callable[..., dict[str, int]]]:
    """Run the rest of the test as one rank of a layout; takes the arguments of ``mocked_rank``."""
    from mcontroller.testing import mocked_rank

    with contextlib.ExitStack() as stack:

        def enter(*args: Any, **kwargs: Any) -> dict[str, int]:
            return stack.enter_context(mocked_rank(*args, **kwargs))

        yield enter
