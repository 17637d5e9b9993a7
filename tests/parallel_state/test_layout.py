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
    assert layout.rank(lane=2, island=-1) == 5


def test_order_is_read_in_any_case_and_may_leave_out_axes_of_size_one() -> None:
    assert ParallelLayout(8, tp=2, order="TP-DP").groups("dp") == ParallelLayout(8, tp=2).groups("dp")


@unhurried
@given(layouts())
def test_coordinates_lead_back_to_the_rank_by_either_grid(layout: ParallelLayout) -> None:
    for rank in range(layout.world_size):
        coordinates = layout.coordinates(rank)
        assert layout.rank(**coordinates) == rank
        assert layout.rank(**{axis: coordinates[axis] for axis in layout.dense_axes}) == rank
        assert layout.rank(**{axis: coordinates[axis] for axis in layout.expert_axes}) == rank


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
        "tp 4 x pp 2 x cp 1 = 8 does not divide world_size 12; use a world_size of 8 or",
    ),
    (dict(world_size=3, tp=4), "tp 4 x pp 1 x cp 1 = 4 does not divide world_size 3; use a world_size of 4, or"),
    (dict(world_size=8, ep=3), "etp 1 x ep 3 x pp 1 = 3 does not divide world_size 8; use a world_size of 6 or 9, or"),
    (
        dict(world_size=8, tp=4, extra={"replica": 4}, order="tp-dp-replica"),
        "tp 4 x pp 1 x cp 1 x replica 4 = 16 does not divide world_size 8; use a world_size of 16",
    ),
    (dict(world_size=8, tp=0), "tp is 0; expected an int of at least 1"),
    (dict(world_size=8, tp="2"), "tp is '2'; expected an int of at least 1"),
    (dict(world_size=8, pp=True), "pp is True; expected an int of at least 1"),
    (dict(world_size=10**9), "world_size is 1000000000; expected at most 1048576 ranks"),
    (dict(world_size=0), "world_size is 0; expected an int of at least 1"),
    (dict(world_size=8, vpp=2), "vpp 2 with pp 1: virtual stages interleave a pipeline"),
    (dict(world_size=8, order=None), "order is None; expected axes joined by '-'"),
    (dict(world_size=8, order="tp-xp-dp"), "order 'tp-xp-dp' names an unknown axis: 'xp'"),
    (dict(world_size=8, order="tp-dp-tp"), "order 'tp-dp-tp' names an axis twice: 'tp'"),
    (
        dict(world_size=8, tp=2, order="tp-pp"),
        "order 'tp-pp' leaves out dp, but dp has size 4; list all axes",
    ),
    (dict(world_size=8, tp=8, etp=2, order="tp-ep"), "order 'tp-ep' leaves out dp, but edp has size 4"),
    (dict(world_size=8, ep=2, order="tp-dp"), "order 'tp-dp' leaves out ep, but ep has size 2"),
    (dict(world_size=8, extra={"replica": 2}), "as in 'tp-cp-ep-dp-pp-replica'"),
    (dict(world_size=8, extra={"rank": 2}), "extra axis 'rank': expected a lower-case identifier other than cp, dp,"),
    (dict(world_size=8, extra={"my-axis": 2}), "extra axis 'my-axis': expected a lower-case identifier"),
    (
        dict(world_size=16, pp=2, cp=2, order="tp-cp-pp-ep-dp"),
        "order 'tp-cp-pp-ep-dp' does not end with pp, so dp and edp must be equal: dp is 16 / (tp 1 x cp 2 x pp 2) "
        "= 4, edp is 16 / (etp 1 x pp 2 x ep 1) = 8",
    ),
    (
        dict(world_size=8, tp=2, pp=2, ep=2, etp=1, order="tp-pp-ep-dp"),
        "the pp groups of the dense and the expert grid differ: with order 'tp-pp-ep-dp' neighbours on pp are this "
        "many ranks apart: tp 2 = 2 in the dense grid, etp 1 = 1 in the expert grid; put pp after tp, cp, ep and dp",
    ),
    (
        dict(world_size=8, tp=2, ep=2, etp=1, order="tp-replica-ep-dp", extra={"replica": 2}),
        "the replica groups of the dense and the expert grid differ",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), INVALID, ids=[message[:40] for _, message in INVALID])
def test_an_invalid_layout_is_rejected_with_the_arithmetic(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError) as raised:
        ParallelLayout(**arguments)
    assert message in str(raised.value)


def test_an_error_has_its_figures_as_fields() -> None:
    with pytest.raises(LayoutError) as raised:
        ParallelLayout(12, tp=4, pp=2)
    error = pickle.loads(pickle.dumps(raised.value))
    assert (error.world_size, error.product, error.sizes) == (12, 8, {"tp": 4, "pp": 2, "cp": 1})


INVALID_QUERIES = [
    (lambda layout: layout.rank(tp=2, pp=0, dp=0), "tp=2 lies outside axis tp of size 2 (0 to 1)"),
    (lambda layout: layout.rank(cp=1), "cp=1 lies outside axis cp of size 1 (only 0)"),
    (lambda layout: layout.rank(tp=0), "tp=0: add dp and pp (dense grid) or ep and edp and pp (expert grid)"),
    (lambda layout: layout.rank(xp=0), "the layout has no axis 'xp'; it has tp, cp, dp, pp, etp, ep, edp"),
    (
        lambda layout: layout.rank(tp=1, dp=0, pp=0, ep=0),
        "no rank has the coordinates tp=1, dp=0, pp=0, ep=0: tp, cp, dp, pp select rank 1, which has tp=1, dp=0, "
        "pp=0, ep=1",
    ),
    (lambda layout: layout.coordinates(8), "rank 8 is out of range for 8 ranks (0 to 7)"),
    (lambda layout: layout.coordinates(-1), "rank -1 is out of range for 8 ranks (0 to 7)"),
    (
        lambda layout: layout.groups("dp", "ep"),
        "dp, ep are not axes of one grid; expected axes of tp, cp, dp, pp (dense)",
    ),
    (lambda layout: layout.groups("xp"), "the layout has no axis 'xp'"),
]


@pytest.mark.parametrize(("query", "message"), INVALID_QUERIES, ids=[message[:40] for _, message in INVALID_QUERIES])
def test_an_error_of_an_invalid_query_lists_the_valid_values(query: Any, message: str) -> None:
    with pytest.raises(LayoutError) as raised:
        query(ParallelLayout(8, tp=2, pp=2, ep=2, etp=1))
    assert message in str(raised.value)
