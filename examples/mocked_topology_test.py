"""A unit test of topology-aware code without Ray, without a GPU, without processes.

    python -m pytest examples/mocked_topology_test.py

Inside a worker's method, Megatron's getters return the values of that rank; dispatch and collect are the real ones.
"""

from __future__ import annotations

import pytest
import torch

from mcontroller import DataProto, Dispatch, Worker, WorkerError, register
from mcontroller.testing import mock_worker_group, raises
from parallel_state import ParallelLayout

LAYOUT = ParallelLayout(world_size=16, tp=2, pp=4)  # dp is 2


class StageTagger(Worker):
    """Mark each row with the stage and the replica that return it."""

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def tag(self, batch: DataProto) -> DataProto:
        from megatron.core import parallel_state as mpu

        rows = len(batch)
        return DataProto.from_dict(
            {
                "stage": torch.full((rows,), mpu.get_pipeline_model_parallel_rank()),
                "replica": torch.full((rows,), mpu.get_data_parallel_rank()),
            }
        )


def test_every_row_is_returned_by_the_last_stage_of_its_replica() -> None:
    group = mock_worker_group(StageTagger, LAYOUT)
    tagged = group.tag(DataProto.from_dict({"row": torch.arange(6)}))
    assert tagged.batch["stage"].tolist() == [3] * 6
    assert tagged.batch["replica"].tolist() == [0, 0, 0, 1, 1, 1]


def test_the_error_names_the_rank_that_raised() -> None:
    group = mock_worker_group(StageTagger, LAYOUT, failures={5: raises("out of memory")})
    with pytest.raises(WorkerError, match="out of memory") as caught:
        group.tag(DataProto.from_dict({"row": torch.arange(6)}))
    assert caught.value.rank == 5
    assert caught.value.coordinates["pp"] == 1
