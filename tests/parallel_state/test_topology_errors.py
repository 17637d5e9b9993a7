"""Reports that do not form a topology, and invalid queries, are rejected with an error that names the ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_state.errors import TopologyError
from parallel_state.infos import DistRankInfo
from parallel_state.layout import ParallelLayout
from parallel_state.topology import Topology
from tests.parallel_state.layouts import layouts, reports, unhurried

TP2_PP2_DP2 = ParallelLayout(8, tp=2, pp=2)
LARGE = ParallelLayout(16_384, tp=8, pp=16, cp=2, ep=8, etp=2, vpp=2)


def wrong(rank: int = 5, layout: ParallelLayout = TP2_PP2_DP2, **changed: Any) -> Topology:
    """The topology of a layout in which one rank reports `changed`, a coordinate or a size."""
    rank_infos, global_infos = reports(layout)
    infos: Any = rank_infos if set(changed) <= {f.name for f in dataclasses.fields(DistRankInfo)} else global_infos
    infos[rank] = dataclasses.replace(infos[rank], **changed)
    return Topology.from_infos(rank_infos, global_infos, declared=layout)


WRONG_REPORTS: list[tuple[dict[str, Any], str, tuple[int, ...]]] = [
    (dict(tp_rank=2), "rank 5 reports tp_rank 2, outside axis tp of size 2 (0 to 1)", (5,)),
    (dict(pp_rank=-1), "rank 5 reports pp_rank -1, outside axis pp of size 2 (0 to 1)", (5,)),
    (dict(dp_rank=None), "rank 5 reports dp_rank None, outside axis dp of size 2", (5,)),
    (dict(edp_rank=7), "rank 5 reports edp_rank 7, outside axis edp of size 2", (5,)),
    (
        dict(dp_rank=1),
        "ranks 5 and 7 both report tp=1, cp=0, dp=1, pp=1, and no rank reports tp=1, cp=0, dp=0, pp=1; "
        "judging by the order of all other ranks, rank 5 is wrong",
        (5, 7),
    ),
    (dict(etp_rank=0), "ranks 4 and 5 both report etp=0, ep=0, edp=0, pp=1, and no rank reports etp=1,", (4, 5)),
    (dict(tp_size=4), "disagree on tp_size: rank 5 reports 4, 7 other ranks report 2", (5,)),
    (dict(vpp_size=2), "disagree on vpp_size: rank 5 reports 2, 7 other ranks report None", (5,)),
    (dict(vpp_rank=0), "rank 5 reports vpp_rank 0, and no virtual stages (vpp_size None)", (5,)),
    (dict(vpp_rank=2, layout=ParallelLayout(8, pp=2, vpp=2)), "vpp_rank 2, and vpp_size 2 (0 to 1)", (5,)),
    (
        dict(extra={"lane": 0}),
        "rank 5 reports indices on the extra axes lane, and sizes of the extra axes (none)",
        (5,),
    ),
]


@pytest.mark.parametrize(("changed", "message", "ranks"), WRONG_REPORTS, ids=[row[1][:40] for row in WRONG_REPORTS])
def test_an_error_of_a_wrong_report_names_the_ranks(
    changed: dict[str, Any], message: str, ranks: tuple[int, ...]
) -> None:
    with pytest.raises(TopologyError) as raised:
        wrong(**changed)
    assert message in str(raised.value)
    assert raised.value.fields["ranks"] == ranks


def test_names_and_nodes_of_the_ranks_are_in_the_message() -> None:
    rank_infos, global_infos = reports(TP2_PP2_DP2)
    rank_infos[3] = dataclasses.replace(rank_infos[3], tp_rank=9)
    nodes, names = [f"10.0.0.{rank // 4}" for rank in range(8)], [f"actor_{rank}" for rank in range(8)]
    with pytest.raises(TopologyError) as raised:
        Topology.from_infos(rank_infos, global_infos, nodes=nodes, names=names)
    assert (raised.value.ranks, raised.value.axis) == ((3,), "tp")
    assert "actor_3" in str(raised.value) and "10.0.0.0" in str(raised.value)


def test_coordinates_that_several_ranks_report_are_counted() -> None:
    rank_infos, global_infos = reports(TP2_PP2_DP2)
    stuck = [dataclasses.replace(info, pp_rank=0) for info in rank_infos]
    with pytest.raises(TopologyError) as raised:
        Topology.from_infos(stuck, global_infos)
    assert str(raised.value) == (
        "ranks 0 and 4 both report tp=0, cp=0, dp=0, pp=0, and no rank reports tp=0, cp=0, dp=0, pp=1; "
        "in all 4 coordinates are reported more than once and 4 by no rank"
    )
    assert raised.value.fields["ranks"] == (0, 4, 1, 5, 2, 6, 3, 7)


def test_no_rank_is_called_wrong_if_the_order_of_ranks_is_irregular() -> None:
    rank_infos, global_infos = reports(TP2_PP2_DP2)
    shuffled = [rank_infos[position] for position in (6, 1, 3, 0, 7, 2, 5, 4)]
    shuffled[0] = dataclasses.replace(shuffled[0], dp_rank=0)
    with pytest.raises(TopologyError) as raised:
        Topology.from_infos(shuffled, global_infos)
    assert str(raised.value) == (
        "ranks 0 and 7 both report tp=0, cp=0, dp=0, pp=1, and no rank reports tp=0, cp=0, dp=1, pp=1"
    )


def collected(rank_infos: list[Any], global_infos: list[Any], **known: Any) -> Topology:
    return Topology.from_infos(rank_infos, global_infos, **known)


R, G = reports(TP2_PP2_DP2)
WRONG_WHOLES: list[tuple[Any, str]] = [
    (lambda: collected([], []), "0 rank infos and 0 global infos; expected one of each per rank"),
    (lambda: collected(R, G[:7]), "8 rank infos and 7 global infos"),
    (lambda: collected(R[:6], G[:6]), "tp 2 x cp 1 x dp 2 x pp 2 = 8 ranks expected, but 6 report"),
    (lambda: collected(R, G, nodes=["a"]), "1 nodes for 8 ranks; expected one per rank"),
    (lambda: collected([*R[:7], {"tp_rank": 1}], G), "rank 7 reports {'tp_rank': 1} of type dict; expected a DistRank"),
    (
        lambda: collected(R, G, declared=ParallelLayout(8, tp=4, pp=2, vpp=2)),
        "other sizes than the layout declares: tp 2 (declared 4), dp 2 (declared 1), etp 2 (declared 4), edp 2 "
        "(declared 1), vpp None (declared 2)",
    ),
    (
        lambda: collected(R, [dataclasses.replace(G[0], edp_size=None)] * 8),
        "only part of the expert grid (etp_size 2",
    ),
    (
        lambda: collected(R, [dataclasses.replace(G[0], dp_size=0)] * 8),
        "axis dp has size 0; expected an int of at least 1",
    ),
    (
        lambda: collected(R, [dataclasses.replace(G[0], edp_size=4)] * 8),
        "etp 2 x ep 1 x edp 4 x pp 2 = 16 ranks expected",
    ),
    (
        lambda: collected(R, [dataclasses.replace(G[0], extra={"tp": 1})] * 8),
        "an extra axis 'tp'; expected an identifier other than cp, dp",
    ),
    (lambda: collected(R, [dataclasses.replace(G[0], vpp_size=0)] * 8), "the ranks report vpp_size 0 with pp_size 2"),
    (lambda: Topology.flat(0), "world_size is 0; expected an int of at least 1"),
    (lambda: Topology(4, {}, {}), "axes (none) form no grid"),
    (lambda: Topology(4, {"dp": 4, "ep": 2}, {"dp": range(4), "ep": [0, 1] * 2}), "axes dp, ep form no grid; expected"),
    (lambda: Topology(4, {"dp": 4}, {"dp": [0, 1, 2]}), "axis dp has 3 indices for 4 ranks; expected one per rank"),
]


@pytest.mark.parametrize(("build", "message"), WRONG_WHOLES, ids=[message[:40] for _, message in WRONG_WHOLES])
def test_reports_that_contradict_each_other_are_rejected(build: Any, message: str) -> None:
    with pytest.raises(TopologyError) as raised:
        build()
    assert message in str(raised.value)


INVALID_QUERIES: list[tuple[Any, str]] = [
    (lambda topology: topology.select(tp=2), "tp=2 lies outside axis tp of size 2 (0 to 1)"),
    (lambda topology: topology.select(tp=-3), "tp=-3 lies outside axis tp of size 2 (0 to 1)"),
    (lambda topology: topology.select(stage=0), "no axis 'stage'; it has tp, cp, dp, pp, etp, ep, edp, and the pseudo"),
    (lambda topology: topology.shard_indices(("dp", "dp")), "cannot split over dp, dp: name each axis once"),
    (
        lambda topology: topology.shard_count(("rank", "dp")),
        "cannot split over rank, dp: name each axis once, and 'rank' only alone",
    ),
    (lambda topology: topology.coordinates(8), "rank 8 is out of range for 8 ranks (0 to 7)"),
    (lambda topology: topology.describe(by="node"), "the nodes of these ranks are not known"),
    (lambda topology: topology.describe(by="dp"), "describe(by='dp'): expected 'stage', 'node' or 'rank'"),
]


@pytest.mark.parametrize(("query", "message"), INVALID_QUERIES, ids=[row[1][:40] for row in INVALID_QUERIES])
def test_an_error_of_an_invalid_query_lists_the_valid_values(query: Any, message: str) -> None:
    with pytest.raises(TopologyError) as raised:
        query(Topology.from_layout(TP2_PP2_DP2))
    assert message in str(raised.value)


def test_one_wrong_rank_of_16384_is_named_in_a_short_message() -> None:
    with pytest.raises(TopologyError) as raised:
        wrong(12_345, LARGE, tp_rank=0)
    assert raised.value.fields["ranks"] == (12_344, 12_345)
    with pytest.raises(TopologyError) as raised:
        wrong(12_345, LARGE, cp_size=4)
    assert raised.value.fields == {"ranks": (12_345,), "field": "cp_size"}


def test_a_thousand_wrong_ranks_do_not_flood_the_message() -> None:
    rank_infos, global_infos = reports(LARGE)
    infos = [dataclasses.replace(info, tp_rank=8) if info.tp_rank == 7 else info for info in rank_infos]
    with pytest.raises(TopologyError) as raised:
        Topology.from_infos(infos, global_infos)
    assert "likewise ranks 15, 23, 31, 39, 47, 55, 63 and 2,040 more" in str(raised.value)
    assert len(raised.value.fields["ranks"]) == 2_048 and len(str(raised.value)) < 200


@unhurried
@given(layouts(max_world_size=32, extra=False), st.data())
def test_any_wrong_coordinate_of_any_rank_is_found(layout: ParallelLayout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    axis = data.draw(st.sampled_from(list(layout.sizes)))
    index = data.draw(st.integers(0, 5).filter(lambda index: index != layout.coordinates(rank)[axis]))
    with pytest.raises(TopologyError) as raised:
        wrong(rank, layout, **{f"{axis}_rank": index})
    assert rank in raised.value.ranks
