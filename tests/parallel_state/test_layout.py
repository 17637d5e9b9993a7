"""ParallelLayout: its arithmetic and its errors (test_layout_is_megatrons.py compares it with Megatron)."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_state.errors import LayoutError
from parallel_state.layout import ParallelLayout
from tests.parallel_state.layouts import layouts, unhurried


def test_the_first_axis_of_the_order_is_the_one_on_which_neighbours_differ() -> None:
    layout = ParallelLayout(8, tp=2, pp=2)
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert ParallelLayout(8, tp=2, pp=2, order="dp-tp-pp").groups("tp") == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_the_quotient_of_the_world_size_is_data_parallel_in_both_grids() -> None:
    layout = ParallelLayout(64, tp=4, pp=2, cp=2, ep=8, etp=1)
    assert (layout.dp, layout.edp) == (4, 4)
    assert layout.sizes == {"tp": 4, "cp": 2, "dp": 4, "pp": 2, "etp": 1, "ep": 8, "edp": 4}
    assert layout.dense_axes == ("tp", "cp", "dp", "pp")
    assert layout.expert_axes == ("etp", "ep", "edp", "pp")


def test_etp_defaults_to_tp() -> None:
    assert ParallelLayout(8, tp=4).sizes["etp"] == 4
    assert dataclasses.replace(ParallelLayout(8, tp=4), tp=2).sizes["etp"] == 2
    assert ParallelLayout(8, tp=4, etp=1).edp == 8


def test_a_user_defined_axis_belongs_to_both_grids() -> None:
    layout = ParallelLayout(16, tp=2, ep=2, etp=1, order="tp-cp-ep-dp-pp-replica", extra={"replica": 2})
    assert (layout.dp, layout.edp) == (4, 4)
    assert layout.groups("replica") == [[rank, rank + 8] for rank in range(8)]
    assert layout.groups("tp", "replica")[0] == [0, 1, 8, 9]
    assert layout.groups("ep", "replica")[0] == [0, 1, 8, 9]
    assert layout.coordinates(13) == {"tp": 1, "cp": 0, "dp": 2, "pp": 0, "replica": 1, "etp": 0, "ep": 1, "edp": 2}


def test_a_layout_with_only_user_defined_axes() -> None:
    layout = ParallelLayout(6, order="lane-island", extra={"lane": 3, "island": 2})
    assert layout.groups("lane") == [[0, 1, 2], [3, 4, 5]]
    assert layout.coordinates(5)["lane"] == 2


def test_order_is_read_in_any_case_and_may_leave_out_axes_of_size_one() -> None:
    assert ParallelLayout(8, tp=2, order="TP-DP").groups("dp") == ParallelLayout(8, tp=2).groups("dp")


@unhurried
@given(layouts(), st.data())
def test_groups_are_the_ranks_that_agree_on_every_other_axis(layout: ParallelLayout, data: st.DataObject) -> None:
    grid = data.draw(st.sampled_from([layout.dense_axes, layout.expert_axes]))
    axes = data.draw(st.sets(st.sampled_from(grid)))
    by_others: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        coordinates = layout.coordinates(rank)
        by_others.setdefault(tuple(coordinates[axis] for axis in grid if axis not in axes), []).append(rank)
    assert sorted(layout.groups(*axes)) == sorted(by_others.values())


@unhurried
@given(layouts())
def test_a_column_is_the_index_of_every_rank(layout: ParallelLayout) -> None:
    for axis in layout.sizes:
        assert layout.column(axis) == tuple(layout.coordinates(rank)[axis] for rank in range(layout.world_size))


@unhurried
@given(layouts())
def test_a_layout_is_an_immutable_value(layout: ParallelLayout) -> None:
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout and hash(copy) == hash(layout) and copy.sizes == layout.sizes
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.tp = 3  # type: ignore[misc]


INVALID: list[tuple[dict[str, Any], str]] = [
    (
        dict(world_size=12, tp=4, pp=2),
        {"world_size": 12, "product": 8, "sizes": {"tp": 4, "pp": 2, "cp": 1}},
    ),
    (dict(world_size=3, tp=4), {"world_size": 3, "product": 4, "sizes": {"tp": 4, "pp": 1, "cp": 1}}),
    (dict(world_size=8, ep=3), {"world_size": 8, "product": 3, "sizes": {"etp": 1, "ep": 3, "pp": 1}}),
    (
        dict(world_size=8, tp=4, extra={"replica": 4}, order="tp-dp-replica"),
        {"world_size": 8, "product": 16, "sizes": {"tp": 4, "pp": 1, "cp": 1, "replica": 4}},
    ),
    (dict(world_size=8, tp=0), {"axis": "tp", "value": 0}),
    (dict(world_size=8, tp="2"), {"axis": "tp", "value": "2"}),
    (dict(world_size=8, pp=True), {"axis": "pp", "value": True}),
    (dict(world_size=0), {"axis": "world_size", "value": 0}),
    (dict(world_size=8, vpp=2), {"vpp": 2, "pp": 1}),
    (dict(world_size=8, order="tp-xp-dp"), {"order": "tp-xp-dp", "axis": "xp"}),
    (dict(world_size=8, order="tp-dp-tp"), {"order": "tp-dp-tp", "axis": "tp"}),
    (
        dict(world_size=8, tp=2, order="tp-pp"),
        {"order": "tp-pp", "axis": "dp", "size": 4},
    ),
    (dict(world_size=8, tp=8, etp=2, order="tp-ep"), {"order": "tp-ep", "axis": "dp", "size": 4}),
    (dict(world_size=8, ep=2, order="tp-dp"), {"order": "tp-dp", "axis": "ep", "size": 2}),
    (dict(world_size=8, extra={"replica": 2}), {"order": "tp-cp-ep-dp-pp", "axis": "replica", "size": 2}),
    (dict(world_size=8, extra={"rank": 2}), {"axis": "rank"}),
    (dict(world_size=8, extra={"my-axis": 2}), {"axis": "my-axis"}),
    (
        dict(world_size=16, pp=2, cp=2, order="tp-cp-pp-ep-dp"),
        {"order": "tp-cp-pp-ep-dp", "dp": 4, "edp": 8},
    ),
    (
        dict(world_size=8, tp=2, pp=2, ep=2, etp=1, order="tp-pp-ep-dp"),
        {"order": "tp-pp-ep-dp", "axis": "pp"},
    ),
    (
        dict(world_size=8, tp=2, ep=2, etp=1, order="tp-replica-ep-dp", extra={"replica": 2}),
        {"order": "tp-replica-ep-dp", "axis": "replica"},
    ),
]


@pytest.mark.parametrize(("arguments", "fields"), INVALID)
def test_an_invalid_layout_is_rejected_with_its_numbers(arguments: dict[str, Any], fields: dict[str, Any]) -> None:
    with pytest.raises(LayoutError) as raised:
        ParallelLayout(**arguments)
    assert raised.value.fields == fields


INVALID_QUERIES = [
    (lambda layout: layout.coordinates(8), {"rank": 8}),
    (lambda layout: layout.coordinates(-1), {"rank": -1}),
    (
        lambda layout: layout.groups("dp", "ep"),
        {"axes": ("dp", "ep")},
    ),
    (lambda layout: layout.groups("xp"), {"axis": "xp"}),
]


@pytest.mark.parametrize(("query", "fields"), INVALID_QUERIES)
def test_an_invalid_query_is_an_error_with_its_value(query: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(LayoutError) as raised:
        query(ParallelLayout(8, tp=2, pp=2, ep=2, etp=1))
    assert raised.value.fields == fields
