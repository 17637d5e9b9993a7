"""Axes that cross nodes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcontroller import ConfigError, DataProto, Dispatch, Worker, register
from mcontroller.locality import LOCAL_AXES, crossing_groups, locality_lines, nodes_of
from mcontroller.testing import mock_worker_group
from parallel_state.layout import ParallelLayout
from parallel_state.topology import Topology
from tests.mcontroller.batches import numbered
from tests.parallel_state.layouts import layouts, unhurried


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any layout with its ranks on any of up to four nodes."""
    layout = draw(layouts(max_world_size=32))
    nodes = draw(st.lists(st.sampled_from("abcd"), min_size=layout.world_size, max_size=layout.world_size))
    return Topology.from_layout(layout, nodes=nodes)


@unhurried
@given(topologies())
def test_an_axis_crosses_nodes_if_two_ranks_that_differ_on_it_alone_do(topology: Topology) -> None:
    reported = crossing_groups(topology)
    for axis in set(LOCAL_AXES) - {"etp"}:
        grid = topology.dense_axes if axis in topology.dense_axes else topology.expert_axes
        others = [other for other in grid if other != axis]
        pairs = {
            (one, other)
            for one, other in itertools.combinations(range(topology.world_size), 2)
            if topology.nodes[one] != topology.nodes[other]  # type: ignore[index]
            and all(topology.column(name)[one] == topology.column(name)[other] for name in others)
        }
        groups = reported.get(axis, ())
        assert bool(pairs) == bool(groups)
        assert {rank for pair in pairs for rank in pair} == {rank for group in groups for rank in group}


@unhurried
@given(layouts(max_world_size=64), st.integers(1, 8))
def test_an_axis_whose_groups_are_blocks_that_divide_a_node_is_not_reported(layout: ParallelLayout, count: int) -> None:
    fastest = layout.dense_axes[0]
    nodes = nodes_of(layout.world_size, layout.sizes[fastest] * count)
    report = crossing_groups(Topology.from_layout(layout, nodes=nodes))
    assert fastest not in report


def test_nothing_is_found_without_nodes_or_on_one_node() -> None:
    layout = ParallelLayout(16, tp=4, cp=2, ep=4)
    assert not crossing_groups(Topology.from_layout(layout))
    assert not crossing_groups(Topology.from_layout(layout, nodes=["a"] * 16))


def test_a_finding_names_the_axis_the_ranks_the_nodes_and_the_fix() -> None:
    strided = Topology.from_layout(ParallelLayout(8, tp=2, order="dp-tp-cp-ep-pp"), nodes=nodes_of(8, 4))
    assert locality_lines(strided) == [
        "axis tp crosses nodes in 4 of 4 groups, such as ranks 0, 4 on node0, node1; put tp before the other axes in "
        "the layout's order, or choose sizes that divide the ranks of a node"
    ]
    large = Topology.from_layout(ParallelLayout(16, tp=16), nodes=nodes_of(16, 8))
    assert locality_lines(large) == [
        "axis tp crosses nodes in 1 of 1 groups, such as ranks 0-15 on node0, node1; a node has fewer ranks than the "
        "size of the axis, 16: choose a smaller one"
    ]


def test_experts_across_nodes_are_reported_apart_from_tensor_parallelism() -> None:
    topology = Topology.from_layout(ParallelLayout(16, tp=2, ep=16, etp=1), nodes=nodes_of(16, 8))
    assert list(crossing_groups(topology)) == ["ep"]


def test_a_node_needs_ranks() -> None:
    with pytest.raises(ConfigError) as raised:
        nodes_of(8, 0)
    assert (raised.value.key, raised.value.value) == ("ranks_per_node", 0)


class Model(Worker):
    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute(self, batch: DataProto) -> DataProto:
        return batch


def test_explain_reports_what_crosses_nodes() -> None:
    layout = ParallelLayout(4, tp=2, order="dp-tp-cp-ep-pp")
    group = mock_worker_group(Model, Topology.from_layout(layout, nodes=["a", "a", "b", "b"]))
    lines = str(group.compute.explain(numbered(4))).splitlines()
    assert lines[-1].startswith("axis tp crosses nodes in 2 of 2 groups, such as ranks 0, 2 on a, b")
