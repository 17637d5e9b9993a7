"""MegatronWorker of teams that have their own process groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcontroller import DataProto, Dispatch, register
from mcontroller.errors import ConfigError
from mcontroller.testing import mock_worker_group, mocked_rank
from parallel_state import DistGlobalInfo, DistRankInfo, ParallelLayout
from workers import MegatronWorker


class OwnGroups(MegatronWorker):
    """Reports the sizes that the team's own initialization has made."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_megatron_rank_info(self) -> DistRankInfo:
        from megatron.core import parallel_state as mpu

        return DistRankInfo(
            tp_rank=mpu.get_tensor_model_parallel_rank(),
            dp_rank=mpu.get_data_parallel_rank(),
            pp_rank=mpu.get_pipeline_model_parallel_rank(),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_megatron_global_info(self) -> DistGlobalInfo:
        from megatron.core import parallel_state as mpu

        return DistGlobalInfo(
            tp_size=mpu.get_tensor_model_parallel_world_size(),
            dp_size=mpu.get_data_parallel_world_size(),
            pp_size=mpu.get_pipeline_model_parallel_world_size(),
        )

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def double(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"ids": 2 * batch.batch["ids"]})


class Silent(MegatronWorker):
    pass


def test_a_worker_that_reports_its_layout_needs_no_parallel() -> None:
    group = mock_worker_group(OwnGroups, ParallelLayout(8, tp=2, pp=2))
    batch = DataProto.from_dict({"ids": torch.arange(4).view(4, 1)})
    assert group.double(batch).batch["ids"].flatten().tolist() == [0, 2, 4, 6]
    assert not hasattr(group.workers[0], "context")


def test_a_worker_that_does_not_report_its_layout_needs_parallel() -> None:
    worker: Any = Silent
    with mocked_rank(2, 0), pytest.raises(ConfigError) as caught:
        worker()
    assert caught.value.key == "parallel"


class Forgetful(MegatronWorker):
    def __init__(self) -> None:
        self.state = 1


def test_a_constructor_that_does_not_call_that_of_the_base_class_is_an_error() -> None:
    with mocked_rank(2, 0), pytest.raises(ConfigError) as caught:
        Forgetful()
    assert caught.value.key == "parallel"
