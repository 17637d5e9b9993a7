from __future__ import annotations

import threading

import pytest

from mcontroller.channel.worker import Cancellation

CALL = (b"driver", 3)


def test_a_call_without_a_cancellation_starts() -> None:
    cancellation = Cancellation()
    assert cancellation.start(*CALL)
    assert not cancellation.prepare(*CALL)


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_prepared_call_waits_for_the_decision(cancelled: bool) -> None:
    cancellation = Cancellation()
    started: list[bool] = []
    assert cancellation.prepare(*CALL)
    call = threading.Thread(target=lambda: started.append(cancellation.start(*CALL)))
    call.start()
    call.join(0.1)
    assert call.is_alive()
    cancellation.commit(*CALL, cancelled)
    call.join()
    assert started == [not cancelled]


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_prepare_that_arrives_after_its_decision_delays_nothing(cancelled: bool) -> None:
    cancellation = Cancellation()
    cancellation.commit(*CALL, cancelled)
    assert not cancellation.prepare(*CALL)
    assert cancellation.start(*CALL) is not cancelled


def test_a_decision_that_comes_after_the_start_changes_nothing() -> None:
    cancellation = Cancellation()
    assert cancellation.start(*CALL)
    cancellation.commit(*CALL, True)
    assert cancellation.start(b"driver", 4)
    assert cancellation.prepare(b"another driver", 0)


def test_without_a_decision_of_a_controller_that_has_ended_a_call_runs() -> None:
    cancellation = Cancellation(decision_seconds=0.05)
    assert cancellation.prepare(b"ended", 1) and cancellation.prepare(b"ended", 0)
    assert cancellation.start(b"ended", 0)
    cancellation.commit(b"ended", 1, True)  # too late: a rank may have started it
    assert cancellation.start(b"ended", 1)
    assert cancellation.start(b"another", 0)
