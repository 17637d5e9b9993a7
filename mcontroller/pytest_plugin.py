"""Fixtures for tests of topology-aware workers; loaded by pytest where mcontroller is installed.

``mock_group(Worker, layout, ...)`` makes mocked worker groups as ``mcontroller.testing.mock_worker_group`` does and
shuts them down after the test; ``mock_rank(layout, rank)`` stands the rest of the test on one rank of a layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mcontroller.testing import MockWorkerGroup


@pytest.fixture
def mock_group() -> Iterator[Callable[..., MockWorkerGroup]]:
    """Makes mocked worker groups that end with the test."""
    from mcontroller.testing import mock_worker_group  # when a test asks for it: it loads torch and Megatron

    with contextlib.ExitStack() as stack:

        def make(*args: Any, **kwargs: Any) -> MockWorkerGroup:
            return stack.enter_context(mock_worker_group(*args, **kwargs))

        yield make


@pytest.fixture
def mock_rank() -> Iterator[Callable[..., dict[str, int]]]:
    """Stands the rest of the test on a rank of a layout, and gives its coordinates."""
    from mcontroller.testing import mocked_rank

    with contextlib.ExitStack() as stack:

        def stand(*args: Any, **kwargs: Any) -> dict[str, int]:
            return stack.enter_context(mocked_rank(*args, **kwargs))

        yield stand
