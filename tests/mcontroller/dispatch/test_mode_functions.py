"""Modes as pairs of functions that a user defines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mcontroller import (
    ClassWithInitArgs,
    Dispatch,
    DispatchError,
    Execute,
    LocalWorkerGroup,
    Worker,
    register,
    register_dispatch_mode,
)
from parallel_state.layout import ParallelLayout

LAYOUT = ParallelLayout(8, tp=2, pp=2)


def backwards(worker_group: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Every argument with the rank it goes to, counted down."""
    ranks = range(worker_group.world_size - 1, -1, -1)
    return tuple([(value, rank) for rank in ranks] for value in args), {
        key: [(value, rank) for rank in ranks] for key, value in kwargs.items()
    }


def last_two(worker_group: Any, outputs: list[Any]) -> list[Any]:
    return [worker_group.name, *outputs[-2:]]


def group_of(mode: Any, execute_mode: Any = Execute.ALL) -> Any:
    class Model(Worker):
        @register(mode, execute_mode)
        def method(self, *args: Any, **kwargs: Any) -> Any:
            return self.rank, args, kwargs

    return LocalWorkerGroup(ClassWithInitArgs(Model), LAYOUT, name_prefix="actor")


@pytest.fixture
def named() -> Iterator[Any]:
    yield register_dispatch_mode("BACKWARDS", backwards, last_two)
    Dispatch.remove("BACKWARDS")


def test_a_dict_of_two_functions_is_a_mode() -> None:
    result = group_of({"dispatch_fn": backwards, "collect_fn": last_two}).method("x", name="y")
    assert result == ["actor", (6, (("x", 1),), {"name": ("y", 1)}), (7, (("x", 0),), {"name": ("y", 0)})]


def test_a_named_mode_of_functions_is_a_member_of_dispatch(named: Any) -> None:
    assert Dispatch.BACKWARDS is named and named in Dispatch
    assert group_of(Dispatch.BACKWARDS).method("x")[2] == (7, (("x", 0),), {})
    with pytest.raises(DispatchError) as raised:
        register_dispatch_mode("BACKWARDS", backwards, last_two)
    assert raised.value.name == "BACKWARDS"


def test_functions_that_do_not_return_a_list_entry_per_rank_are_rejected() -> None:
    short = {"dispatch_fn": lambda group, value: (([value],), {}), "collect_fn": last_two}
    with pytest.raises(DispatchError) as raised:
        group_of(short).method("x")
    assert (raised.value.given, raised.value.expected) == (1, 8)
    bare = {"dispatch_fn": lambda group, value: [value], "collect_fn": last_two}
    with pytest.raises(DispatchError) as raised:
        group_of(bare).method("x")
    assert (raised.value.role, raised.value.method) == ("actor", "method")


def test_execute_rank_zero_does_not_use_the_functions() -> None:
    mode = {"dispatch_fn": backwards, "collect_fn": last_two}
    assert group_of(mode, Execute.RANK_ZERO).method("x") == (0, ("x",), {})
