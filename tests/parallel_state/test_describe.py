"""What `Topology.describe` prints for people."""

from __future__ import annotations

from parallel_state.describe import runs_text
from parallel_state.layout import ParallelLayout
from parallel_state.topology import Topology


def topology(layout: ParallelLayout, per_node: int | None = None) -> Topology:
    nodes = None if per_node is None else [f"10.0.0.{rank // per_node + 1}" for rank in range(layout.world_size)]
    return Topology.from_layout(layout, nodes=nodes)


def test_replicas_by_stages_then_nodes() -> None:
    assert topology(ParallelLayout(8, tp=2, pp=2), per_node=4).describe() == (
        "8 ranks = tp 2 x cp 1 x dp 2 x pp 2\n"
        "\n"
        "       stage 0   stage 1\n"
        "dp 0   0-1       4-5\n"
        "dp 1   2-3       6-7\n"
        "(ranks in a cell: tp 0-1)\n"
        "\n"
        "node       ranks   tp    dp    pp\n"
        "10.0.0.1   0-3     0-1   0-1   0\n"
        "10.0.0.2   4-7     0-1   0-1   1"
    )


def test_experts_have_a_separate_grid() -> None:
    text = topology(ParallelLayout(16, tp=2, pp=2, cp=2, ep=2, etp=1, vpp=2)).describe()
    assert text == (
        "16 ranks = tp 2 x cp 2 x dp 2 x pp 2\n"
        " experts = etp 1 x ep 2 x edp 4 x pp 2\n"
        "vpp 2: 4 virtual stages, 2 on each pipeline stage\n"
        "\n"
        "       stage 0   stage 1\n"
        "dp 0   0-3       8-11\n"
        "dp 1   4-7       12-15\n"
        "(ranks in a cell: tp 0-1, then cp 0-1)\n"
        "\n"
        "experts\n"
        "        stage 0   stage 1\n"
        "edp 0   0-1       8-9\n"
        "edp 1   2-3       10-11\n"
        "edp 2   4-5       12-13\n"
        "edp 3   6-7       14-15\n"
        "(ranks in a cell: ep 0-1)"
    )


def test_ranks_without_axes_are_shown_by_node() -> None:
    assert Topology.flat(3).describe() == "3 ranks, no axes"
    text = Topology.flat(3, nodes=["a", "b", "a"]).describe()
    assert text == "3 ranks, no axes\n\nnode   ranks\na      0, 2\nb      1"


def test_numbers_are_shown_as_runs() -> None:
    assert runs_text([0, 1, 2, 3]) == "0-3"
    assert runs_text([0, 1, 8, 9]) == "0-1, 8-9"
    assert runs_text([0, 4, 8, 12, 16]) == "0, 4 .. 16"
    assert runs_text([1, 0]) == "1, 0"
