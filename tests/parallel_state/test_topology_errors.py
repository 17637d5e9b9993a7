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


WRONG_REPORTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(tp_rank=2), {"ranks": (5,), "axis": "tp"}),
    (dict(pp_rank=-1), {"ranks": (5,), "axis": "pp"}),
    (dict(dp_rank=None), {"ranks": (5,), "axis": "dp"}),
    (dict(edp_rank=7), {"ranks": (5,), "axis": "edp"}),
    (
        dict(dp_rank=1),
        {"ranks": (5, 7), "missing": 1},
    ),
    (dict(etp_rank=0), {"ranks": (4, 5), "missing": 1}),
    (dict(tp_size=4), {"ranks": (5,), "field": "tp_size"}),
    (dict(vpp_size=2), {"ranks": (5,), "field": "vpp_size"}),
    (
        dict(extra={"lane": 0}),
        {"ranks": (5,)},
    ),
]


@pytest.mark.parametrize(("changed", "fields"), WRONG_REPORTS)
def test_an_error_of_a_wrong_report_names_the_ranks(changed: dict[str, Any], fields: dict[str, Any]) -> None:
    with pytest.raises(TopologyError) as raised:
        wrong(**changed)
    assert raised.value.fields == fields


def test_the_node_of_a_rank_is_in_the_message() -> None:
    rank_infos, global_infos = reports(TP2_PP2_DP2)
    rank_infos[3] = dataclasses.replace(rank_infos[3], tp_rank=9)
    with pytest.raises(TopologyError) as raised:
        Topology.from_infos(rank_infos, global_infos, nodes=[f"10.0.0.{rank // 4}" for rank in range(8)])
    assert (raised.value.ranks, raised.value.axis) == ((3,), "tp")
    assert "10.0.0.0" in str(raised.value)


def test_coordinates_that_several_ranks_report_are_counted() -> None:
    rank_infos, global_infos = reports(TP2_PP2_DP2)
    stuck = [dataclasses.replace(info, pp_rank=0) for info in rank_infos]
    with pytest.raises(TopologyError) as raised:
        Topology.from_infos(stuck, global_infos)
    assert (raised.value.ranks, raised.value.missing) == ((0, 4, 1, 5, 2, 6, 3, 7), 4)


def test_no_rank_is_called_wrong_if_the_order_of_ranks_is_irregular() -> None:
    rank_infos, global_infos = reports(TP2_PP2_DP2)
    shuffled = [rank_infos[position] for position in (6, 1, 3, 0, 7, 2, 5, 4)]
    shuffled[0] = dataclasses.replace(shuffled[0], dp_rank=0)
    with pytest.raises(TopologyError) as raised:
        Topology.from_infos(shuffled, global_infos)
    assert (raised.value.ranks, raised.value.missing) == ((0, 7), 1)


def collected(rank_infos: list[Any], global_infos: list[Any], **known: Any) -> Topology:
    return Topology.from_infos(rank_infos, global_infos, **known)


R, G = reports(TP2_PP2_DP2)
WRONG_WHOLES: list[tuple[Any, dict[str, Any]]] = [
    (lambda: collected([], []), {"world_size": 0}),
    (lambda: collected(R, G[:7]), {"world_size": 8}),
    (lambda: collected(R[:6], G[:6]), {"world_size": 6, "sizes": {"tp": 2, "cp": 1, "dp": 2, "pp": 2}}),
    (lambda: collected(R, G, nodes=["a"]), {"world_size": 8}),
    (
        lambda: collected(R, G, declared=ParallelLayout(8, tp=4, pp=2, vpp=2)),
        {
            "axes": ("tp", "dp", "etp", "edp", "vpp"),
            "reported": {"tp": 2, "cp": 1, "dp": 2, "pp": 2, "etp": 2, "ep": 1, "edp": 2, "vpp": None},
            "declared": {"tp": 4, "cp": 1, "dp": 1, "pp": 2, "etp": 4, "ep": 1, "edp": 1, "vpp": 2},
        },
    ),
    (
        lambda: collected(R, [dataclasses.replace(G[0], edp_size=None)] * 8),
        {"sizes": {"etp": 2, "ep": 1, "edp": None}},
    ),
    (
        lambda: collected(R, [dataclasses.replace(G[0], dp_size=0)] * 8),
        {"world_size": 8, "sizes": {"tp": 2, "cp": 1, "dp": 0, "pp": 2}},
    ),
    (
        lambda: collected(R, [dataclasses.replace(G[0], edp_size=4)] * 8),
        {"world_size": 8, "sizes": {"etp": 2, "ep": 1, "edp": 4, "pp": 2}},
    ),
    (lambda: Topology.flat(0), {"world_size": 0}),
]


@pytest.mark.parametrize(("build", "fields"), WRONG_WHOLES)
def test_reports_that_contradict_each_other_are_rejected(build: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(TopologyError) as raised:
        build()
    assert raised.value.fields == fields


INVALID_QUERIES: list[tuple[Any, dict[str, Any]]] = [
    (lambda topology: topology.select(tp=2), {"axis": "tp", "index": 2}),
    (lambda topology: topology.select(tp=-3), {"axis": "tp", "index": -3}),
    (
        lambda topology: topology.select(stage=0),
        {"axis": "stage", "axes": ("tp", "cp", "dp", "pp", "etp", "ep", "edp")},
    ),
    (lambda topology: topology.shard_indices(("dp", "dp")), {"axes": ("dp", "dp")}),
    (
        lambda topology: topology.shard_count(("rank", "dp")),
        {"axes": ("rank", "dp")},
    ),
    (lambda topology: topology.coordinates(8), {"rank": 8}),
]


@pytest.mark.parametrize(("query", "fields"), INVALID_QUERIES)
def test_an_invalid_query_is_an_error_with_its_value(query: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(TopologyError) as raised:
        query(Topology.from_layout(TP2_PP2_DP2))
    assert raised.value.fields == fields


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
