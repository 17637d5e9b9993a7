"""Mocked ranks against the groups that initialize_model_parallel creates on torch's fake process groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel_state.axes import FrozenMap
from parallel_state.errors import LayoutError, ParallelStateError
from parallel_state.layout import ParallelLayout
from parallel_state.mocked import MockedRanks
from parallel_state.topology import Topology
from tests.parallel_state.megatron_oracle import AXIS_GETTERS, GROUP_GETTERS, Oracle

LAYOUTS = [
    ParallelLayout(8, tp=2, pp=2),
    ParallelLayout(16, tp=2, cp=2, pp=2, ep=2),
    ParallelLayout(16, tp=2, cp=2, pp=2, ep=4, etp=1, order="pp-tp-cp-ep-dp"),
    ParallelLayout(24, tp=2, pp=3, ep=4, etp=1, order="tp-ep-cp-dp-pp"),
    ParallelLayout(8, pp=2, vpp=2, tp=2),
]
WHICH = ["first", "prev", "next", "last"]
TP2_PP2_DP2 = Topology.from_layout(LAYOUTS[0])


def mpu() -> Any:
    from megatron.core import parallel_state  # after MockedRanks has patched it for the CPU

    return parallel_state


def reported() -> dict[str, dict[Any, Any]]:
    """Megatron's indices, sizes and groups of the active rank, in the oracle's form."""
    groups = {axes: getattr(mpu(), name)() for axes, name in GROUP_GETTERS.items()}
    groups["dp", "cp"] = mpu().get_data_parallel_group(with_context_parallel=True)
    groups["tp", "dp", "cp"] = mpu().get_tensor_and_data_parallel_group(with_context_parallel=True)
    return {
        "indices": {axis: getattr(mpu(), f"get_{name}_rank")() for axis, name in AXIS_GETTERS.items()},
        "sizes": {axis: getattr(mpu(), f"get_{name}_world_size")() for axis, name in AXIS_GETTERS.items()},
        "groups": {axes: dist.get_process_group_ranks(group) for axes, group in groups.items()},
    }


def arguments_of(layout: ParallelLayout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "order": layout.order,
    }


@pytest.mark.processes
def test_every_getter_returns_megatrons_value_on_every_rank() -> None:
    oracle = Oracle()
    questions = [(layout, rank) for layout in LAYOUTS for rank in range(layout.world_size)]
    answers = oracle.coordinates([(layout.world_size, rank, arguments_of(layout)) for layout, rank in questions])
    oracle.close()
    ranks = {layout: MockedRanks(Topology.from_layout(layout)) for layout in LAYOUTS}
    for (layout, rank), answer in zip(questions, answers, strict=True):
        with ranks[layout].activate(rank):
            assert reported() == answer, (layout, rank)


def test_the_neighbours_in_the_pipeline_are_those_of_the_rank() -> None:
    with MockedRanks(Topology.from_layout(ParallelLayout(8, tp=2, pp=4))).activate(5):
        stages = mpu()
        actual = [getattr(stages, f"get_pipeline_model_parallel_{which}_rank")() for which in WHICH]
        assert actual == [1, 3, 7, 7]
        assert not stages.is_pipeline_first_stage() and not stages.is_pipeline_last_stage()
        assert stages.get_tensor_model_parallel_src_rank() == 4
        assert not stages.is_rank_in_embedding_group()


def test_torch_distributed_is_mocked_inside_the_block_and_restored_after_it() -> None:
    ranks = MockedRanks(TP2_PP2_DP2)
    with ranks.activate(3):
        assert dist.is_initialized() and (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (3, 8, "gloo")
        group = mpu().get_data_parallel_group()
        assert (dist.get_rank(group), dist.get_world_size(group), dist.get_global_rank(group, 0)) == (1, 2, 1)
    assert not dist.is_initialized() and not mpu().is_initialized()


def test_blocks_nest_and_each_rank_keeps_its_changes() -> None:
    ranks = MockedRanks(Topology.from_layout(LAYOUTS[4]))
    with ranks.activate(1):
        with ranks.activate(6):
            mpu()._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = 1
            assert dist.get_rank() == 6
        assert dist.get_rank() == 1 and mpu().get_virtual_pipeline_model_parallel_rank() == 0
    with ranks.activate(6):
        assert mpu().get_virtual_pipeline_model_parallel_rank() == 1
        assert mpu().get_virtual_pipeline_model_parallel_world_size() == 2


def test_ranks_in_another_order_have_their_own_coordinates() -> None:
    columns = {axis: tuple(reversed(column)) for axis, column in TP2_PP2_DP2.columns.items()}
    with MockedRanks(replace(TP2_PP2_DP2, columns=FrozenMap(columns))).activate(7):
        assert reported()["indices"] == {"tp": 0, "cp": 0, "dp": 0, "pp": 0, "etp": 0, "ep": 0, "edp": 0}
        assert dist.get_process_group_ranks(mpu().get_model_parallel_group()) == [2, 3, 6, 7]


def test_a_collective_between_mocked_ranks_raises() -> None:
    with MockedRanks(TP2_PP2_DP2).activate(0):
        with pytest.raises(ParallelStateError):
            dist.all_reduce(torch.ones(1), group=mpu().get_tensor_model_parallel_group())
        with pytest.raises(ParallelStateError):
            dist.barrier()


def test_collectives_of_groups_of_one_rank_are_computed() -> None:
    with MockedRanks(Topology.from_layout(ParallelLayout(2, tp=2))).activate(1):
        group = mpu().get_pipeline_model_parallel_group()
        assert (group.rank(), group.size(), dist.get_process_group_ranks(group)) == (0, 1, [1])
        ones, gathered, objects = torch.ones(3), torch.empty(3), [None]
        dist.all_reduce(ones, group=group)
        dist.all_gather_into_tensor(gathered, 2 * ones, group=group)
        dist.all_gather_object(objects, {"loss": 1.0}, group=group)
        dist.broadcast(ones, src=1, group=group)
        dist.barrier(group=group)
        assert (ones.tolist(), gathered.tolist(), objects) == ([1.0] * 3, [2.0] * 3, [{"loss": 1.0}])


def test_initializing_megatron_on_a_mocked_rank_is_checked_against_its_layout() -> None:
    with MockedRanks(TP2_PP2_DP2).activate(0):
        mpu().initialize_model_parallel(2, 2)
        assert mpu().get_data_parallel_world_size() == 2
        with pytest.raises(LayoutError) as raised:
            mpu().initialize_model_parallel(tensor_model_parallel_size=4)
        assert raised.value.mocked == {"tp": 2, "pp": 2, "cp": 1, "ep": 1}


def test_a_megatron_context_can_be_created_on_a_mocked_rank() -> None:
    with MockedRanks(TP2_PP2_DP2).activate(6):
        from parallel_state.megatron import MegatronContext

        info = MegatronContext(LAYOUTS[0]).rank_info()
        assert (info.tp_rank, info.dp_rank, info.pp_rank) == (0, 1, 1)
