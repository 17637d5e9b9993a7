"""Topology: collected from ranks in any order, checked, and queried for ranks and shards."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_state.errors import TopologyError
from parallel_state.infos import DistGlobalInfo, DistRankInfo
from parallel_state.layout import ParallelLayout
from parallel_state.topology import Topology
from tests.parallel_state.layouts import layouts, reports, unhurried

TP2_PP2_DP2 = ParallelLayout(8, tp=2, pp=2)
MOE = ParallelLayout(16, tp=2, pp=2, cp=2, ep=4, etp=1)


@st.composite
def shuffled_topologies(draw: st.DrawFn) -> Topology:
    """A topology collected from ranks in no particular order."""
    layout = draw(layouts(max_world_size=64))
    rank_infos, global_infos = reports(layout)
    return Topology.from_infos(draw(st.permutations(rank_infos)), global_infos)


def test_ranks_and_shards_of_a_small_grid() -> None:
    topology = Topology.from_layout(TP2_PP2_DP2)
    assert topology.select(tp=0, pp=-1) == (4, 6)
    assert topology.select() == (0, 1, 2, 3, 4, 5, 6, 7)
    assert topology.shard_indices(("dp",)) == (0, 0, 1, 1, 0, 0, 1, 1)
    assert topology.shard_indices(("dp", "pp")) == (0, 0, 2, 2, 1, 1, 3, 3)
    assert topology.shard_indices(()) == (0,) * 8
    assert (topology.shard_count(("dp", "pp")), topology.shard_count(()), topology.shard_count("dp")) == (4, 1, 2)


def test_expert_axes_select_and_split_as_dense_axes_do() -> None:
    topology = Topology.from_layout(MOE)
    assert topology.select(ep=0, pp=0) == (0, 4)
    assert topology.shard_indices(("edp", "ep"))[:8] == (0, 1, 2, 3, 4, 5, 6, 7)
    assert topology.shard_indices(("ep", "edp"))[:8] == (0, 2, 4, 6, 1, 3, 5, 7)
    assert topology.shard_count(("edp", "ep")) == 8


def test_dense_and_expert_axes_mix_if_every_combination_has_a_rank() -> None:
    topology = Topology.from_layout(MOE)
    assert topology.shard_indices(("dp", "ep"))[:8] == (0, 1, 2, 3, 4, 5, 6, 7)
    assert topology.select(dp=1, ep=3, pp=0) == (7,)
    with pytest.raises(TopologyError) as raised:
        topology.shard_indices(("tp", "ep"))
    assert raised.value.axes == ("tp", "ep")
    with pytest.raises(TopologyError) as raised:
        topology.select(tp=0, ep=1)
    assert raised.value.coordinates == {"tp": 0, "ep": 1}


def test_rank_is_an_axis_of_every_topology() -> None:
    for topology in (Topology.from_layout(TP2_PP2_DP2), Topology.flat(8)):
        assert topology.shard_indices(("rank",)) == tuple(range(8))
        assert (topology.shard_count(("rank",)), topology.select(rank=-1)) == (8, (7,))
    assert Topology.flat(8).coordinates(5) == {"rank": 5}


@unhurried
@given(layouts())
def test_collected_and_declared_topologies_are_equal(layout: ParallelLayout) -> None:
    collected = Topology.from_infos(*reports(layout), declared=layout)
    assert collected == Topology.from_layout(layout)
    assert all(collected.coordinates(rank) == layout.coordinates(rank) for rank in range(layout.world_size))


@unhurried
@given(layouts(max_world_size=64), st.randoms(use_true_random=False))
def test_coordinates_are_those_of_each_rank_in_any_order_of_ranks(layout: ParallelLayout, random: Any) -> None:
    order = random.sample(range(layout.world_size), layout.world_size)
    rank_infos, global_infos = reports(layout)
    topology = Topology.from_infos([rank_infos[position] for position in order], global_infos)
    for rank, position in enumerate(order):
        assert topology.coordinates(rank) == layout.coordinates(position)
        dense = {axis: topology.coordinates(rank)[axis] for axis in topology.dense_axes}
        assert topology.select(**dense) == (rank,)


@unhurried
@given(shuffled_topologies(), st.data())
def test_select_finds_each_rank_once_over_all_indices(topology: Topology, data: st.DataObject) -> None:
    grid = data.draw(st.sampled_from([topology.dense_axes, topology.expert_axes]))
    axes = data.draw(st.lists(st.sampled_from(grid), unique=True))
    actual: list[int] = []
    for indices in itertools.product(*(range(topology.size(axis)) for axis in axes)):
        selected = topology.select(**dict(zip(axes, indices, strict=True)))
        from_end = {axis: index - topology.size(axis) for axis, index in zip(axes, indices, strict=True)}
        assert topology.select(**from_end) == selected
        assert len(selected) == topology.world_size // topology.shard_count(axes)
        actual += selected
    assert sorted(actual) == list(range(topology.world_size))


@unhurried
@given(shuffled_topologies(), st.data())
def test_shards_count_up_over_the_axes_with_the_first_slowest(topology: Topology, data: st.DataObject) -> None:
    grid = data.draw(st.sampled_from([topology.dense_axes, topology.expert_axes]))
    axes = data.draw(st.lists(st.sampled_from(grid), unique=True))
    shards = list(itertools.product(*(range(topology.size(axis)) for axis in axes)))
    indices = topology.shard_indices(axes)
    for rank, index in enumerate(indices):
        assert shards[index] == tuple(topology.coordinates(rank)[axis] for axis in axes)
    assert set(indices) == set(range(topology.shard_count(axes))) == set(range(len(shards)))


@unhurried
@given(shuffled_topologies())
def test_a_topology_is_an_immutable_value_and_a_cache_key(topology: Topology) -> None:
    twin = pickle.loads(pickle.dumps(topology))
    assert twin == topology and {topology: "plan"}[twin] == "plan"
    assert copy.deepcopy(topology) == topology
    with pytest.raises(dataclasses.FrozenInstanceError):
        topology.world_size = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        topology.sizes["tp"] = 3  # type: ignore[index]
    with pytest.raises(TypeError):
        topology.sizes.pop("tp")  # type: ignore[attr-defined]


def test_topologies_of_one_layout_on_other_nodes_or_in_other_orders_differ() -> None:
    rank_infos, global_infos = reports(TP2_PP2_DP2)
    topology = Topology.from_infos(rank_infos, global_infos, nodes=["a"] * 8)
    assert topology != Topology.from_infos(rank_infos, global_infos, nodes=["b"] * 8)
    assert topology != Topology.from_infos(rank_infos[::-1], global_infos, nodes=["a"] * 8)


def test_ranks_that_report_no_experts_have_no_expert_axes() -> None:
    infos = [DistRankInfo(tp_rank=0, dp_rank=rank, pp_rank=0, cp_rank=0) for rank in range(4)]
    sizes = [DistGlobalInfo(tp_size=1, dp_size=4, pp_size=1, cp_size=1)] * 4
    topology = Topology.from_infos(infos, sizes, declared=ParallelLayout(4))
    assert (topology.sizes, topology.expert_axes) == ({"tp": 1, "cp": 1, "dp": 4, "pp": 1}, ())
    with pytest.raises(TopologyError) as raised:
        topology.select(ep=0)
    assert (raised.value.axis, raised.value.axes) == ("ep", ("tp", "cp", "dp", "pp"))


LARGE = ParallelLayout(16_384, tp=8, pp=16, cp=2, ep=8, etp=2, vpp=2)


def test_16384_collected_ranks_form_a_topology() -> None:
    topology = Topology.from_infos(*reports(LARGE), declared=LARGE)
    assert topology == Topology.from_layout(LARGE)
    assert len(topology.select(tp=0, cp=0, pp=-1)) == topology.shard_count(("dp",)) == 64
    assert math.prod(topology.size(axis) for axis in topology.expert_axes) == 16_384


@pytest.mark.processes
def test_importing_the_topology_loads_neither_torch_nor_ray_nor_numpy() -> None:
    code = (
        "import sys, parallel_state.topology; print(sorted({'torch', 'ray', 'numpy', 'megatron'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
