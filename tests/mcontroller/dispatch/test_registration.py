"""``register``: the attribute that it sets, inheritance, and errors at the decorator."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mcontroller import MAGIC_ATTR, Dispatch, Execute, LocalWorkerGroup, Worker, register
from mcontroller.dispatch.modes import RowRule
from mcontroller.dispatch.registration import Registration, registration_of, registrations
from mcontroller.errors import DispatchError
from mcontroller.worker import delegate


class Base(Worker):
    @register(Dispatch.ONE_TO_ALL, padding="repeat", balance="attention_mask", group_by="uid", timeout=3.0)
    def compute(self, number: int) -> int:
        """Doubles."""
        return 2 * number

    @register(execute_mode=Execute.RANK_ZERO, blocking=False)
    async def later(self, number: int) -> int:
        return number + 1

    def unregistered(self) -> None: ...


class Overriding(Base):
    def compute(self, number: int) -> int:
        return 3 * number

    @register(Dispatch.RANK_ZERO)
    async def later(self, number: int) -> int:
        return number


class Hiding(Base):
    compute = None  # type: ignore[assignment]


class Counter:
    def __init__(self, start: int) -> None:
        self.number = start

    @register(Dispatch.ONE_TO_ALL)
    def add(self, number: int) -> int:
        self.number += number
        return self.number


class Composed(Base):
    add = delegate("counter", Counter.add)

    def __init__(self) -> None:
        self.counter = Counter(self.rank)


def test_a_registered_method_stays_callable_as_it_is() -> None:
    worker = Base()
    assert worker.compute(4) == 8
    assert asyncio.run(worker.later(4)) == 5
    assert Base.compute.__name__ == "compute" and Base.compute.__doc__ == "Doubles."


def test_a_registered_function_has_its_registration_as_an_attribute() -> None:
    assert getattr(Base.compute, MAGIC_ATTR) == Registration(
        Dispatch.ONE_TO_ALL, Execute.ALL, rows=RowRule("repeat", "attention_mask", "uid"), timeout=3.0
    )


def test_an_overriding_method_is_registered_as_what_it_overrides() -> None:
    assert registration_of(Overriding, "compute") == registration_of(Base, "compute")
    assert registration_of(Overriding, "later") == Registration(Dispatch.RANK_ZERO, Execute.ALL)


def test_registrations_lists_inherited_methods_and_no_others() -> None:
    inherited = {"execute_func_rank_zero"}
    assert set(registrations(Overriding)) == {"compute", "later"} | inherited
    assert set(registrations(Hiding)) == {"later"} | inherited
    assert registration_of(Base, "unregistered") is None


def test_a_delegated_method_is_registered_and_checked_as_that_of_the_part() -> None:
    group: Any = LocalWorkerGroup(Composed, 2)
    assert group.add(3) == [3, 4]
    assert group.workers[1].add(number=1) == group.workers[1].counter.number == 5
    with pytest.raises(DispatchError) as raised:
        group.add(nubmer=1)
    assert raised.value.parameters == ("number",)


def test_an_override_of_a_delegated_method_may_call_it() -> None:
    class Doubling(Composed):
        def add(self, number: int) -> int:
            return super().add(2 * number)

    group: Any = LocalWorkerGroup(Doubling, 2)
    assert group.add(3) == [6, 7]


@pytest.mark.parametrize(
    "arguments",
    [
        {"dispatch_mode": "DP_COMPUTE"},
        {"dispatch_mode": {"dispatch_fn": print}},
        {"dispatch_mode": {"dispatch_fn": print, "collect_fn": 3}},
        {"execute_mode": Dispatch.RANK_ZERO},
        {"padding": "left"},
        {"timeout": -1},
        {"timeout": float("inf")},  # what a process waits with would overflow
    ],
)
def test_wrong_arguments_are_rejected_at_the_decorator(arguments: dict[str, Any]) -> None:
    with pytest.raises(DispatchError) as raised:
        register(**arguments)
    assert raised.value.fields == arguments


def test_register_without_parentheses_is_rejected() -> None:
    with pytest.raises(DispatchError):

        @register
        def method(self: Any) -> None: ...


def test_register_on_something_other_than_a_function_is_rejected() -> None:
    with pytest.raises(DispatchError):
        register()(property(lambda self: 1))  # type: ignore[type-var]


def test_inherited_and_async_methods_are_called_as_they_are_on_the_worker() -> None:
    class AsyncOverride(Overriding):
        async def compute(self, number: int) -> int:  # type: ignore[override]
            return 5 * number

    base, overriding, mixed = (LocalWorkerGroup(cls, 2) for cls in (Base, Overriding, AsyncOverride))
    assert base.compute(4) == [8, 8] and base.later(4).get() == 5
    assert overriding.compute(4) == [12, 12] and overriding.later(4) == 4
    assert mixed.compute(4) == [20, 20]
    assert asyncio.run(mixed.workers[0].compute(4)) == 20
