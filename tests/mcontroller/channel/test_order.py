from __future__ import annotations

import pytest

from mcontroller.channel import worker
from mcontroller.channel.controller import CallOrder
from mcontroller.channel.worker import CallQueue, KeptResults

A, B = b"one controller", b"another"


def drained(queue: CallQueue[str]) -> list[str]:
    calls = []
    while (call := queue.next()) is not None:
        calls.append(call)
    return calls


def test_places_chain_the_calls_of_each_rank() -> None:
    places = CallOrder()
    assert places.assign(A, 0, (0, 1)) == [None, None]
    assert places.assign(B, 0, (1,)) == [(A, 0)]
    assert places.assign(A, 1, (0, 1)) == [(A, 0), (B, 0)]


def test_a_call_whose_place_is_asked_for_again_keeps_it() -> None:
    places = CallOrder()
    places.assign(B, 0, (0, 1))
    assert places.assign(A, 0, (0, 1)) == places.assign(A, 0, (0, 1)) == [(B, 0), (B, 0)]
    assert places.assign(B, 1, (0,)) == [(A, 0)]


def test_two_ranks_that_receive_calls_in_different_orders_run_them_in_one() -> None:
    places = CallOrder()
    sent = [(A, 0, "a0"), (B, 0, "b0"), (A, 1, "a1"), (B, 1, "b1"), (B, 2, "b2")]
    calls = [(caller, number, places.assign(caller, number, (0,))[0], call) for caller, number, call in sent]
    arrivals = [[0, 1, 2, 3, 4], [1, 3, 4, 0, 2], [0, 2, 1, 3, 4], [1, 0, 3, 4, 2]]
    for arrival in arrivals:
        queue: CallQueue[str] = CallQueue()
        for index in arrival:
            assert queue.add(*calls[index])
        assert drained(queue) == ["a0", "b0", "a1", "b1", "b2"]


def test_a_call_that_arrives_again_is_not_added() -> None:
    queue: CallQueue[str] = CallQueue()
    assert queue.add(A, 0, None, "a0")
    assert not queue.add(A, 0, None, "a0")
    assert queue.add(B, 0, (A, 1), "b0")
    assert not queue.add(B, 0, (A, 1), "b0")
    assert drained(queue) == ["a0"]


def test_a_call_behind_one_that_never_arrives_runs_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    queue: CallQueue[str] = CallQueue()
    with monkeypatch.context() as patched:
        patched.setattr(worker, "MISSING_SECONDS", -1.0)
        queue.add(A, 1, (B, 7), "a1")
    queue.add(A, 2, (A, 1), "a2")
    assert queue.waiting
    assert drained(queue) == ["a1", "a2"]


def test_a_result_waits_for_its_readers_and_readers_wait_for_it() -> None:
    kept, results = KeptResults(), []
    kept.read((A, 0), results.append)
    assert results == []
    kept.finish((A, 0), "result")
    kept.read((A, 0), results.append)
    assert results == ["result", "result"]


def test_a_released_result_is_gone_and_one_released_early_is_not_kept() -> None:
    kept, results = KeptResults(), []
    kept.finish((A, 0), "result")
    kept.release((A, 0))
    kept.read((A, 0), results.append)
    kept.release((A, 1))
    kept.finish((A, 1), "late")
    assert results == [None]
    assert len(kept) == 0
