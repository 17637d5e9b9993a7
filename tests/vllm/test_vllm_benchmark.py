"""The benchmark of an engine through the router, in its smallest size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.parts.engine_of_rollout import TURNS, MeasuredEngine
from tests.vllm.policies import PYTHON


@pytest.fixture(scope="module")
def engine() -> Iterator[MeasuredEngine]:
    engine = MeasuredEngine(PYTHON, requests=8, length=16)
    yield engine
    engine.close()


@pytest.mark.processes
def test_both_ways_generate_all_responses(engine: MeasuredEngine) -> None:
    for turns in (1, TURNS):
        for spent in (engine.routed(turns), engine.bare(turns)):
            assert turns * 4 * 16 < spent.tokens <= turns * 8 * 16  # a stop token is one of 4,096
            assert spent.seconds > 0


@pytest.mark.processes
def test_requests_in_flight_go_on_after_a_stop(engine: MeasuredEngine) -> None:
    seconds, later = engine.stop()
    assert 0 < later <= 8
    assert seconds["stop"] >= seconds["resume"] + seconds["first"]
