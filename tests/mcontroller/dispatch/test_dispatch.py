"""Plans: which rank gets which shard and which ranks return, by mode and topology; and what cannot be planned."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from mcontroller.dispatch.modes import Dispatch, DispatchSpec, RowRule, plan
from mcontroller.errors import DispatchError, TopologyError
from parallel_state.layout import ParallelLayout
from parallel_state.topology import Topology
from tests.mcontroller.groups import permuted, topology_of

TP2_PP2_DP2 = topology_of(8, tp=2, pp=2)  # rank = tp + 2 dp + 4 pp
TP2_CP2_PP2_DP2 = topology_of(16, tp=2, cp=2, pp=2)  # rank = tp + 2 cp + 4 dp + 8 pp


def test_the_table_has_these_modes() -> None:
    assert [spec.name for spec in Dispatch] == [
        "RANK_ZERO",
        "ONE_TO_ALL",
        "ALL_TO_ALL",
        "MEGATRON_COMPUTE",
        "MEGATRON_COMPUTE_PROTO",
        "MEGATRON_PP_AS_DP",
        "MEGATRON_PP_AS_DP_PROTO",
        "MEGATRON_PP_ONLY",
        "DP_COMPUTE",
        "DP_COMPUTE_PROTO",
        "DP_COMPUTE_PROTO_WITH_FUNC",
        "DP_COMPUTE_METRIC",
        "DIRECT_ROLLOUT_METHOD",
    ]


@pytest.mark.parametrize("mode", [Dispatch.MEGATRON_COMPUTE, Dispatch.MEGATRON_COMPUTE_PROTO])
def test_megatron_compute_splits_over_dp_and_collects_from_the_last_stage(mode: DispatchSpec) -> None:
    made = plan(mode, TP2_PP2_DP2)
    assert made.shards == (0, 0, 1, 1, 0, 0, 1, 1)
    assert made.collected == (4, 6)
    with_cp = plan(mode, TP2_CP2_PP2_DP2)
    assert with_cp.shards == (0, 0, 0, 0, 1, 1, 1, 1) * 2
    assert with_cp.collected == (8, 12)


@pytest.mark.parametrize("mode", [Dispatch.MEGATRON_PP_AS_DP, Dispatch.MEGATRON_PP_AS_DP_PROTO])
def test_megatron_pp_as_dp_has_a_shard_for_each_cp_dp_and_pp_with_pp_fastest(mode: DispatchSpec) -> None:
    made = plan(mode, TP2_CP2_PP2_DP2)
    assert made.shard_count == 8
    # shard = 4 cp + 2 dp + pp; rank = tp + 2 cp + 4 dp + 8 pp
    assert made.shards[:8] == (0, 0, 4, 4, 2, 2, 6, 6) and made.shards[8:] == (1, 1, 5, 5, 3, 3, 7, 7)
    assert made.collected == (0, 8, 4, 12, 2, 10, 6, 14)


def test_megatron_pp_only_sends_the_same_and_collects_one_rank_of_each_stage() -> None:
    made = plan(Dispatch.MEGATRON_PP_ONLY, TP2_CP2_PP2_DP2)
    assert set(made.shards) == {0} and len(made.ranks) == 16
    assert made.collected == (0, 8)


@pytest.mark.parametrize(
    "mode",
    [Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE, Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_METRIC],
)
def test_rank_modes_give_every_rank_a_shard_and_collect_from_all(mode: DispatchSpec) -> None:
    made = plan(mode, Topology.flat(3))
    assert made.shards == made.collected == (0, 1, 2)


def test_one_to_all_has_one_shard_and_rank_zero_one_rank() -> None:
    assert plan(Dispatch.ONE_TO_ALL, Topology.flat(3)).shards == (0, 0, 0)
    assert plan(Dispatch.ONE_TO_ALL, Topology.flat(3)).collected == (0, 1, 2)
    zero = plan(Dispatch.RANK_ZERO, Topology.flat(3))
    assert zero.ranks == zero.collected == (0,)


def test_results_are_in_shard_order_when_rank_order_is_not() -> None:
    reversed_ranks = permuted(TP2_PP2_DP2, range(7, -1, -1))
    made = plan(Dispatch.MEGATRON_COMPUTE, reversed_ranks)
    assert made.shards == (1, 1, 0, 0, 1, 1, 0, 0)
    assert made.collected == (3, 1)  # dp 0 then dp 1, each at tp 0 of the last stage


def test_over_is_the_general_form_of_the_named_rows() -> None:
    ours = Dispatch.over("dp", collect={"tp": 0, "cp": 0, "pp": -1})
    named = plan(Dispatch.MEGATRON_COMPUTE_PROTO, TP2_CP2_PP2_DP2)
    assert plan(ours, TP2_CP2_PP2_DP2).shards == named.shards
    assert plan(ours, TP2_CP2_PP2_DP2).collected == named.collected
    stages = Dispatch.over(collect={"tp": 0, "cp": 0, "dp": 0}, by="pp", result="list")
    assert plan(stages, TP2_CP2_PP2_DP2).collected == (0, 8)


def test_an_axis_that_is_not_named_is_collected_at_its_lowest_index() -> None:
    topology = Topology.from_layout(ParallelLayout(8, order="tp-cp-ep-dp-pp-island", extra={"island": 2}))
    made = plan(Dispatch.MEGATRON_COMPUTE_PROTO, topology)
    assert made.shards == (0, 1, 2, 3, 0, 1, 2, 3)
    assert made.collected == (0, 1, 2, 3)
    assert plan(Dispatch.over("island", "dp"), topology).shards == tuple(range(8))
    backwards = permuted(topology, range(7, -1, -1))
    assert plan(Dispatch.MEGATRON_COMPUTE_PROTO, backwards).collected == (7, 6, 5, 4)


def test_expert_axes_split_and_collect_like_the_others() -> None:
    made = plan(Dispatch.over("edp", "ep", collect={"pp": -1}), topology_of(8, pp=2, ep=2))
    assert made.shards == (0, 1, 2, 3) * 2
    assert made.collected == (4, 5, 6, 7)


def test_an_axis_that_the_topology_does_not_have_is_rejected_with_those_it_has() -> None:
    with pytest.raises(TopologyError) as raised:
        plan(Dispatch.over("island"), TP2_PP2_DP2)
    assert raised.value.axis == "island" and {"tp", "dp", "ep"} < {*raised.value.axes}
    with pytest.raises(TopologyError) as raised:
        plan(Dispatch.MEGATRON_COMPUTE_PROTO, Topology.flat(4))
    assert (raised.value.axis, raised.value.axes) == ("dp", ("rank",))


def test_a_shard_that_no_rank_could_return_is_rejected() -> None:
    everywhere = Dispatch.over("dp", collect={"edp": 0})  # edp spans dp and cp: only dp shard 0 is at edp 0
    with pytest.raises(DispatchError) as raised:
        plan(everywhere, topology_of(4))
    assert raised.value.collect == {"edp": 0}


def test_concatenated_rows_must_be_split_and_collected_over_the_same_axes() -> None:
    with pytest.raises(DispatchError) as raised:
        Dispatch.over("dp", by="pp")
    assert (raised.value.axes, raised.value.by) == (("dp",), ("pp",))


def test_a_mode_that_splits_must_name_an_axis() -> None:
    with pytest.raises(DispatchError) as raised:
        DispatchSpec("mine", "rows")
    assert raised.value.mode == "mine"


def test_a_plan_is_made_once_for_each_mode_and_topology() -> None:
    again = topology_of(8, tp=2, pp=2)
    assert plan(Dispatch.MEGATRON_COMPUTE, again) is plan(Dispatch.MEGATRON_COMPUTE, TP2_PP2_DP2)
    reversed_ranks = permuted(TP2_PP2_DP2, range(7, -1, -1))
    assert plan(Dispatch.MEGATRON_COMPUTE, reversed_ranks) is not plan(Dispatch.MEGATRON_COMPUTE, TP2_PP2_DP2)


def test_a_plan_describes_itself() -> None:
    assert plan(Dispatch.MEGATRON_COMPUTE, TP2_PP2_DP2).describe() == (
        "MEGATRON_COMPUTE: entries split over dp; 8 ranks run, 2 of them return (list)\n"
        "shard   ranks      returning\n"
        "0       0-1, 4-5   4\n"
        "1       2-3, 6-7   6"
    )


def test_dispatch_takes_new_names_and_rejects_taken_ones() -> None:
    mode = Dispatch.register("OVER_TP", Dispatch.over("tp", collect={"pp": 0}))
    assert Dispatch.OVER_TP is Dispatch["OVER_TP"] is mode and mode in Dispatch
    assert plan(mode, TP2_PP2_DP2).collected == (0, 1)
    with pytest.raises(DispatchError) as raised:
        Dispatch.register("OVER_TP", mode)
    assert raised.value.name == "OVER_TP"
    Dispatch.remove("OVER_TP")
    with pytest.raises(AttributeError):
        _ = Dispatch.OVER_TP
    with pytest.raises(DispatchError):
        _ = Dispatch["OVER_TP"]


def test_a_mode_that_is_built_in_cannot_be_removed() -> None:
    with pytest.raises(DispatchError) as raised:
        Dispatch.remove("ONE_TO_ALL")
    assert raised.value.name == "ONE_TO_ALL"
    assert Dispatch["ONE_TO_ALL"] is Dispatch.ONE_TO_ALL


def test_dispatch_is_pickled_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(Dispatch)) is Dispatch


def test_padding_of_an_unknown_kind_is_rejected() -> None:
    with pytest.raises(DispatchError) as raised:
        RowRule(padding="left")  # type: ignore[arg-type]
    assert raised.value.padding == "left"


@pytest.mark.processes
def test_planning_loads_neither_torch_nor_ray() -> None:
    code = "import sys, mcontroller.dispatch.registration, mcontroller.dispatch.modes; print(sorted({'torch', 'ray'} & set(sys.modules)))"  # noqa: E501
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.processes
def test_the_package_loads_neither_transformers_nor_megatron_nor_ray() -> None:
    code = (
        "import sys, mcontroller; mcontroller.DataProto; mcontroller.WorkerGroup; mcontroller.LocalWorkerGroup; "
        "print(sorted({'transformers', 'megatron', 'megatron.core', 'ray'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
