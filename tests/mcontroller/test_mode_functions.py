"""Modes as pairs of functions: user-defined ones, and those of the table in that form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mcontroller import (
    DISPATCH_MODE_FN_REGISTRY,
    ClassWithInitArgs,
    Dispatch,
    DispatchError,
    Execute,
    LocalWorkerGroup,
    Worker,
    collect_all_to_all,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from parallel_state.layout import ParallelLayout
from tests.mcontroller.batches import numbered, numbers

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

        @register(mode)
        def identity(self, batch: Any) -> Any:
            return batch

    return LocalWorkerGroup(ClassWithInitArgs(Model), LAYOUT, name_prefix="actor")


@pytest.fixture
def named() -> Iterator[Any]:
    yield register_dispatch_mode("BACKWARDS", backwards, last_two)
    Dispatch.remove("BACKWARDS")


def test_a_dict_of_two_functions_is_a_mode() -> None:
    result = group_of({"dispatch_fn": backwards, "collect_fn": last_two}).method("x", key="y")
    assert result == ["actor", (6, (("x", 1),), {"key": ("y", 1)}), (7, (("x", 0),), {"key": ("y", 0)})]


def test_a_named_mode_of_functions_is_a_member_of_dispatch(named: Any) -> None:
    assert Dispatch.BACKWARDS is named and named in DISPATCH_MODE_FN_REGISTRY
    assert group_of(Dispatch.BACKWARDS).method("x")[2] == (7, (("x", 0),), {})
    with pytest.raises(DispatchError, match="cannot use the name 'BACKWARDS'"):
        register_dispatch_mode("BACKWARDS", backwards, last_two)


def test_a_mode_without_functions_is_rejected_by_the_call() -> None:
    group = group_of(Dispatch.register("NAME_ONLY"))
    with pytest.raises(DispatchError, match="mode NAME_ONLY has a name but no functions"):
        group.method("x")
    update_dispatch_mode("NAME_ONLY", backwards, collect_all_to_all)
    assert len(group.method("x")) == 8
    Dispatch.remove("NAME_ONLY")


def test_updating_a_mode_reaches_methods_registered_before(named: Any) -> None:
    group = group_of(named)
    update_dispatch_mode(named, backwards, collect_all_to_all)
    assert len(group.method("x")) == 8


def test_the_registry_sets_adds_and_removes_modes(named: Any) -> None:
    group = group_of(named)
    DISPATCH_MODE_FN_REGISTRY[named] = {"dispatch_fn": backwards, "collect_fn": collect_all_to_all}
    assert len(group.method("x")) == 8
    DISPATCH_MODE_FN_REGISTRY["ADDED"] = DISPATCH_MODE_FN_REGISTRY[named]
    assert "ADDED" in DISPATCH_MODE_FN_REGISTRY and len(DISPATCH_MODE_FN_REGISTRY) == 15
    del DISPATCH_MODE_FN_REGISTRY["ADDED"]
    assert list(DISPATCH_MODE_FN_REGISTRY)[-1].name == "BACKWARDS"  # type: ignore[union-attr]
    with pytest.raises(DispatchError, match="expected dispatch_fn and collect_fn"):
        DISPATCH_MODE_FN_REGISTRY[named] = {"dispatch_fn": backwards}


def test_a_copy_of_the_registry_restores_every_mode_after_it_was_cleared() -> None:
    before = list(Dispatch)
    saved = DISPATCH_MODE_FN_REGISTRY.copy()
    group = group_of(Dispatch.MEGATRON_COMPUTE_PROTO)
    DISPATCH_MODE_FN_REGISTRY.clear()
    try:
        assert len(DISPATCH_MODE_FN_REGISTRY) == 0 and Dispatch.from_name("ALL_TO_ALL") is None
        assert DISPATCH_MODE_FN_REGISTRY.get(before[0]) is None
        with pytest.raises(KeyError, match="there is no dispatch mode 'RANK_ZERO'"):
            DISPATCH_MODE_FN_REGISTRY["RANK_ZERO"]
    finally:
        DISPATCH_MODE_FN_REGISTRY.update(saved)
    assert list(Dispatch) == before and saved == DISPATCH_MODE_FN_REGISTRY
    assert numbers(group.identity(numbered(3))) == [0, 1, 2]
    assert Dispatch.MEGATRON_COMPUTE_PROTO.functions is None


def test_modes_behave_as_members_of_an_enum() -> None:
    assert isinstance(Dispatch.ALL_TO_ALL, Dispatch) and not isinstance(Execute.ALL, Dispatch)
    assert isinstance(Execute.ALL, Execute) and not isinstance({"dispatch_fn": backwards}, Dispatch)
    assert Dispatch.from_name("all_to_all") is Dispatch.ALL_TO_ALL and Dispatch.from_name("none") is None
    assert Dispatch.values()[Dispatch.DP_COMPUTE.value] is Dispatch.DP_COMPUTE
    assert Dispatch.names()[Dispatch.RANK_ZERO.value] == "RANK_ZERO" and Execute.RANK_ZERO.value == 1
    assert Dispatch.over("dp").value == -1


def test_functions_that_do_not_return_a_list_entry_per_rank_are_rejected() -> None:
    short = {"dispatch_fn": lambda group, value: (([value],), {}), "collect_fn": collect_all_to_all}
    with pytest.raises(DispatchError, match="has 1 entries; expected 8"):
        group_of(short).method("x")
    bare = {"dispatch_fn": lambda group, value: [value], "collect_fn": collect_all_to_all}
    with pytest.raises(DispatchError, match=r"its dispatch_fn returned list; expected \(args, kwargs\)"):
        group_of(bare).method("x")


def test_execute_rank_zero_does_not_use_the_functions() -> None:
    mode = {"dispatch_fn": backwards, "collect_fn": last_two}
    assert group_of(mode, Execute.RANK_ZERO).method("x") == (0, ("x",), {})


@pytest.mark.parametrize("name", ["MEGATRON_COMPUTE_PROTO", "MEGATRON_PP_AS_DP_PROTO", "DP_COMPUTE_PROTO"])
@pytest.mark.parametrize("rows", [0, 3, 8, 13])
def test_the_tables_modes_as_functions_return_the_batch(name: str, rows: int) -> None:
    group = group_of(get_predefined_dispatch_fn(name))
    assert numbers(group.identity(numbered(rows))) == list(range(rows))


def test_the_tables_functions_split_and_collect_as_the_table_says() -> None:
    functions = get_predefined_dispatch_fn(Dispatch.MEGATRON_COMPUTE)
    group = group_of(Dispatch.ONE_TO_ALL)
    assert functions["dispatch_fn"](group, ["a", "b"], key=[1, 2]) == (
        (["a", "a", "b", "b", "a", "a", "b", "b"],),
        {"key": [1, 1, 2, 2, 1, 1, 2, 2]},
    )
    assert functions["collect_fn"](group, list(range(8))) == [4, 6]
    assert get_predefined_execute_fn(Execute.ALL) == {"execute_fn_name": "execute_all"}
    assert get_predefined_execute_fn(Execute.RANK_ZERO) == {"execute_fn_name": "execute_rank_zero"}
