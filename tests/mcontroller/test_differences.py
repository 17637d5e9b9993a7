"""What docs/porting.md says of workers, groups, futures and batches: what differs from verl, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcontroller import (
    ClassWithInitArgs,
    DataProto,
    Dispatch,
    DispatchError,
    Execute,
    LocalWorkerGroup,
    TopologyError,
    Worker,
    register,
)
from mcontroller.testing import mock_worker_group
from parallel_state import DistGlobalInfo, DistRankInfo, ParallelLayout
from tests.mcontroller.batches import numbered
from tests.mcontroller.groups import group_on, method, topology_of


class Plain(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def rank_zero(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def later(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, blocking=False)
    def rows(self, batch: DataProto) -> DataProto:
        return batch

    @register()
    def every_rank(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def stamped(self, batch: DataProto) -> DataProto:
        batch.meta_info["rank"] = self.rank
        return batch


class ReportsCoordinates(Plain):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_megatron_rank_info(self) -> DistRankInfo:
        return DistRankInfo(tp_rank=self.rank % 2, dp_rank=self.rank // 2, pp_rank=0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_megatron_global_info(self) -> DistGlobalInfo:
        return DistGlobalInfo(tp_size=2, dp_size=2, pp_size=1)


def test_a_group_answers_for_the_coordinates_of_its_ranks() -> None:
    group = LocalWorkerGroup(ClassWithInitArgs(ReportsCoordinates), 4)
    assert group.get_megatron_rank_info(3) == group.get_megatron_rank_info(rank=3) == DistRankInfo(1, 1, 0)
    assert [info.tp_rank for info in group.get_megatron_rank_info()] == [0, 1, 0, 1]
    assert group.get_megatron_global_info().dp_size == 2
    with pytest.raises(TopologyError) as caught:
        group.get_megatron_rank_info(4)
    assert caught.value.rank == 4
    with pytest.raises(TopologyError) as caught:
        LocalWorkerGroup(ClassWithInitArgs(Plain), 2).get_megatron_global_info()
    assert caught.value.role == "local"


def test_expert_axes_are_part_of_the_coordinates() -> None:
    layout = ParallelLayout(8, tp=2, ep=4)
    group = mock_worker_group(Plain, layout)
    infos = group.get_megatron_rank_info()
    assert [info.ep_rank for info in infos] == [layout.coordinates(rank)["ep"] for rank in range(8)]
    assert group.get_megatron_global_info().ep_size == 4


def test_a_future_says_how_to_get_its_result() -> None:
    future = mock_worker_group(Plain, ParallelLayout(2)).later("x")
    for use in (len, list, lambda outputs: outputs[0]):
        with pytest.raises(DispatchError):
            use(future)
    assert future and future.get() == ["x", "x"]


def test_a_tuple_is_one_value_for_every_rank() -> None:
    group = mock_worker_group(Plain, ParallelLayout(2))
    assert group.execute_all_sync("every_rank", (5, 6)) == [(5, 6), (5, 6)]
    assert group.execute_all_sync("every_rank", [5, 6]) == [5, 6]
    assert group.every_rank([5, 6]) == [5, 6]
    for value in ((5, 6), "both"):
        with pytest.raises(DispatchError) as caught:
            group.every_rank(value)
        assert (caught.value.role, caught.value.method, caught.value.mode) == ("mock", "every_rank", "ALL_TO_ALL")


def test_rank_zero_gets_the_value_itself() -> None:
    assert mock_worker_group(Plain, ParallelLayout(2)).rank_zero([1, 2]) == [1, 2]


def test_meta_info_that_differs_between_ranks_keeps_that_of_the_first() -> None:
    group = mock_worker_group(Plain, ParallelLayout(4, pp=2))
    assert group.stamped(numbered(4)).meta_info == {"rank": 2}


def test_results_of_stages_as_shards_are_in_the_order_of_the_shards() -> None:
    group = group_on(topology_of(4, pp=2))
    assert method(group, "rank_and_arguments", Dispatch.MEGATRON_PP_AS_DP)(list("abcd")) == [
        (0, ("a",), {}),
        (2, ("b",), {}),
        (1, ("c",), {}),
        (3, ("d",), {}),
    ]


def test_one_rank_of_every_stage_returns_with_context_parallelism() -> None:
    group = group_on(topology_of(4, pp=2, cp=2))
    assert [rank for rank, *_ in method(group, "rank_and_arguments", Dispatch.MEGATRON_PP_ONLY)()] == [0, 2]


def test_a_list_of_lists_is_a_column_of_lists() -> None:
    column = DataProto.from_dict(non_tensors={"turns": [[1, 2], [3, 4]]}).non_tensor_batch["turns"]
    assert column.shape == (2,) and column[0] == [1, 2]
    assert DataProto.from_dict({"a": torch.zeros(1)}).batch is not None and DataProto().batch is None
