"""Programs of the examples run on the Ray of the tests."""

from __future__ import annotations

import pytest
import ray


@pytest.fixture
def ray_for_programs(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that start Ray and shut it down run in this process, on the Ray of the tests."""
    for name in ("init", "shutdown"):
        monkeypatch.setattr(ray, name, lambda *_, **__: None)
