"""Mocked groups: coordinates of ranks, recorded calls, injected failures, the pytest plugin."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from mcontroller import (
    CallTimeout,
    ClassWithInitArgs,
    DataProto,
    Dispatch,
    DispatchError,
    GroupBroken,
    TopologyError,
    Worker,
    WorkerDied,
    WorkerError,
    register,
)
from mcontroller.testing import dies, is_late, mock_worker_group, mocked_rank, raises
from parallel_state.layout import ParallelLayout
from parallel_state.topology import Topology
from tests.mcontroller.batches import every_kind, numbered, numbers
from tests.mcontroller.groups import permuted

LAYOUT = ParallelLayout(8, tp=2, pp=2)


class StageModel(Worker):
    """Reads its coordinates from Megatron alone."""

    def __init__(self, scale: int = 1) -> None:
        from megatron.core import parallel_state

        self.scale = scale
        self.parallel_state = parallel_state
        self.stage_at_init = parallel_state.get_pipeline_model_parallel_rank()

    @register(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> dict[str, int]:
        mpu = self.parallel_state
        return {
            "tp": mpu.get_tensor_model_parallel_rank(),
            "cp": mpu.get_context_parallel_rank(),
            "dp": mpu.get_data_parallel_rank(),
            "pp": mpu.get_pipeline_model_parallel_rank(),
            "etp": mpu.get_expert_tensor_parallel_rank(),
            "ep": mpu.get_expert_model_parallel_rank(),
            "edp": mpu.get_expert_data_parallel_rank(),
        }

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute(self, batch: DataProto) -> DataProto:
        """Adds the data-parallel rank on the last stage; other stages return an empty batch."""
        if not self.parallel_state.is_pipeline_last_stage():
            return DataProto()
        dp = torch.full((len(batch),), self.parallel_state.get_data_parallel_rank() * self.scale)
        return batch.union(DataProto.from_dict({"dp": dp}))

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, timeout=10)
    def update(self, batch: DataProto) -> DataProto:
        return batch


def test_ranks_have_their_coordinates_in_init_and_in_calls() -> None:
    group: Any = mock_worker_group(StageModel, LAYOUT)
    assert group.coordinates() == [LAYOUT.coordinates(rank) for rank in range(8)]
    assert [worker.stage_at_init for worker in group.workers] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_the_result_is_that_of_the_last_stage_with_the_real_dispatch() -> None:
    group: Any = mock_worker_group(StageModel, LAYOUT, scale=10)
    result = group.compute(numbered(5))
    assert numbers(result) == [0, 1, 2, 3, 4]
    assert result.batch["dp"].tolist() == [0, 0, 10, 10, 10]


def test_a_topology_in_another_order_and_a_number_of_ranks_are_layouts_too() -> None:
    backwards = permuted(Topology.from_layout(LAYOUT), range(7, -1, -1))
    group: Any = mock_worker_group(StageModel, backwards)
    assert group.coordinates() == [LAYOUT.coordinates(rank) for rank in range(7, -1, -1)]
    assert group.compute(numbered(5)).batch["dp"].tolist() == [0, 0, 1, 1, 1]
    three: Any = mock_worker_group(ClassWithInitArgs(StageModel, 2), 3)
    assert three.compute(numbered(3)).batch["dp"].tolist() == [0, 2, 4]


def test_calls_are_recorded_by_rank_as_they_were_at_the_call() -> None:
    group: Any = mock_worker_group(StageModel, LAYOUT)
    batch = numbered(4)
    group.coordinates()
    future = group.compute.options(blocking=False)(batch=batch)
    batch.batch["n"] += 100
    group.update(future)
    first, second, third = group.calls[6]
    assert (first.method, first.args, first.result["pp"]) == ("coordinates", (), 1)
    assert (second.method, numbers(second.kwargs["batch"])) == ("compute", [2, 3])
    assert (third.method, third.args[0].batch["dp"].tolist()) == ("update", [1, 1])
    assert len(group.calls[0][1].result) == 0


def test_every_rank_of_a_large_layout_runs() -> None:
    group: Any = mock_worker_group(StageModel, ParallelLayout(1024, tp=8, pp=8, cp=2))
    assert group.update(every_kind(16)) == every_kind(16)
    assert all(len(calls) == 1 for calls in group.calls)


def test_a_rank_that_raises_is_a_worker_error_and_breaks_the_group() -> None:
    group: Any = mock_worker_group(StageModel, LAYOUT, name="actor", failures={3: raises(ValueError("loss is nan"))})
    with pytest.raises(WorkerError) as raised:
        group.update(numbered(4))
    assert (raised.value.role, raised.value.rank) == ("actor", 3)
    assert raised.value.rank == 3 and raised.value.coordinates["dp"] == 1
    with pytest.raises(GroupBroken):
        group.coordinates()


def test_a_failure_can_be_limited_to_one_method() -> None:
    group: Any = mock_worker_group(StageModel, LAYOUT, failures={3: raises("no", method="update")})
    group.coordinates()
    with pytest.raises(WorkerError) as caught:
        group.update(numbered(4))
    assert (caught.value.role, caught.value.rank) == ("mock", 3)


def test_a_rank_that_dies_is_a_worker_died_with_its_exit_cause() -> None:
    group: Any = mock_worker_group(StageModel, LAYOUT, name="actor", failures={5: dies("out of memory")})
    with pytest.raises(WorkerDied) as raised:
        group.update(numbered(4))
    assert (raised.value.role, raised.value.rank) == ("actor", 5)
    assert (raised.value.rank, raised.value.exit_cause) == (5, "out of memory")


def test_late_ranks_are_a_call_timeout_that_names_them_without_waiting() -> None:
    late: dict[int, Any] = {2: is_late(30), 7: is_late(11), 4: is_late(9)}
    group: Any = mock_worker_group(StageModel, LAYOUT, name="actor", failures=late)
    group.coordinates()  # it has no deadline
    with pytest.raises(CallTimeout) as raised:
        group.update(numbered(4))
    assert (raised.value.role, raised.value.method, raised.value.timeout) == ("actor", "update", 10)
    assert (raised.value.ranks, raised.value.timeout) == ((2, 7), 10)
    patient: Any = mock_worker_group(StageModel, LAYOUT, failures=late)
    assert numbers(patient.update.options(timeout=60)(numbered(4))) == [0, 1, 2, 3]


def test_failures_can_be_changed_between_calls() -> None:
    group: Any = mock_worker_group(StageModel, LAYOUT)
    group.coordinates()
    group.failures[0] = raises("now")
    with pytest.raises(WorkerError) as caught:
        group.coordinates()
    assert (caught.value.role, caught.value.rank) == ("mock", 0)


def test_failures_of_ranks_that_do_not_exist_are_rejected() -> None:
    with pytest.raises(DispatchError) as caught:
        mock_worker_group(StageModel, LAYOUT, failures={8: dies()})
    assert (caught.value.ranks, caught.value.world_size) == ([8], 8)


def test_failures_of_methods_that_do_not_exist_are_rejected_with_those_that_do() -> None:
    with pytest.raises(DispatchError) as raised:
        mock_worker_group(StageModel, LAYOUT, failures={1: raises("no", method="updat")})
    assert raised.value.method == "updat"


def test_failures_of_methods_called_on_every_rank_by_name_are_accepted() -> None:
    group: Any = mock_worker_group(StageModel, LAYOUT, failures={1: raises("no", method="get_master_addr_port")})
    with pytest.raises(WorkerError) as caught:
        group.execute_all_sync("get_master_addr_port")
    assert (caught.value.role, caught.value.rank) == ("mock", 1)


def test_arguments_next_to_a_class_with_init_args_are_rejected() -> None:
    with pytest.raises(DispatchError) as caught:
        mock_worker_group(ClassWithInitArgs(StageModel, 2), LAYOUT, 3, scale=4)
    assert caught.value.arguments == (3, "scale")


def test_a_plain_function_can_be_tested_on_one_rank() -> None:
    with mocked_rank(LAYOUT, 5) as coordinates:
        from megatron.core import parallel_state

        assert parallel_state.get_tensor_model_parallel_rank() == coordinates["tp"] == 1
        assert parallel_state.get_pipeline_model_parallel_rank() == coordinates["pp"] == 1
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("5", "8", "5")
    assert os.environ.get("RANK") is None


def test_a_rank_that_the_layout_does_not_have_cannot_be_mocked() -> None:
    with pytest.raises(TopologyError) as caught, mocked_rank(LAYOUT, 8):
        pass
    assert caught.value.rank == 8
