"""Which calls begin, in whatever order a call and the questions about it arrive."""

import threading

import pytest

from mcontroller.ray.gate import Gate, Ticket

CALL = Ticket("driver", 3)


def test_a_call_that_nobody_holds_begins() -> None:
    gate = Gate()
    assert gate.begin(CALL)
    assert not gate.hold(*CALL)


@pytest.mark.parametrize("withdraw", [True, False])
def test_a_call_that_is_held_waits_for_the_decision(withdraw: bool) -> None:
    gate = Gate()
    begun: list[bool] = []
    assert gate.hold(*CALL)
    call = threading.Thread(target=lambda: begun.append(gate.begin(CALL)))
    call.start()
    call.join(0.1)
    assert call.is_alive()
    gate.decide(*CALL, withdraw)
    call.join()
    assert begun == [not withdraw]


@pytest.mark.parametrize("withdraw", [True, False])
def test_a_hold_that_its_decision_overtook_holds_nothing(withdraw: bool) -> None:
    gate = Gate()
    gate.decide(*CALL, withdraw)
    assert not gate.hold(*CALL)
    assert gate.begin(CALL) is not withdraw


def test_a_decision_that_comes_after_the_call_changes_nothing() -> None:
    gate = Gate()
    assert gate.begin(CALL)
    gate.decide(*CALL, True)
    assert gate.begin(Ticket("driver", 4))
    assert gate.hold("another driver", 0)
