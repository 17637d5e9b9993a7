"""Groups in the calling process: workers' environment, isolation of values, failures as a cluster would tell them."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import traceback
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from mcontroller import (
    ClassWithInitArgs,
    DataError,
    DataProto,
    Dispatch,
    DistGlobalInfo,
    DistRankInfo,
    Execute,
    GroupBroken,
    LocalWorkerGroup,
    TopologyError,
    Worker,
    WorkerError,
    register,
)
from mcontroller.local import private_copy
from mcontroller.ray.values.wire import pack
from mcontroller.testing import mock_worker_group
from parallel_state.layout import ParallelLayout
from tests.mcontroller.batches import every_kind, numbered, numbers


@dataclass
class Settings:
    """An object of the user's own."""

    steps: list[int] = field(default_factory=list)


class Model(Worker):
    def __init__(self, start: int, settings: Settings) -> None:
        self.weights = torch.full((2,), float(start))
        self.settings = settings
        self.variables = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}

    @register(Dispatch.ONE_TO_ALL)
    def environment(self) -> tuple[Any, ...]:
        return self.rank, self.world_size, self.variables, os.environ["RANK"]

    @register(Dispatch.ONE_TO_ALL)
    def spoil(self, value: Any) -> Any:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Settings):
                item.steps.append(self.rank)
            elif isinstance(item, DataProto):
                item.batch["n"] += 1  # type: ignore[index]
            else:
                item += 1
        return value

    @register(Dispatch.ONE_TO_ALL)
    def get_weights(self) -> torch.Tensor:
        return self.weights

    def add_to_weights(self, number: int) -> None:
        self.weights += number

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute(self, batch: DataProto) -> DataProto:
        return batch

    @register(Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("loss is nan")

    @register(Dispatch.DP_COMPUTE)
    def settle(self, number: int) -> list[int]:
        self.settings.steps.append(number)
        return self.settings.steps


class NoInit(Worker):
    """Does not call ``super().__init__()`` although its base has one."""

    def __init__(self, name: str) -> None:
        self.name = name

    @register(Dispatch.ONE_TO_ALL)
    def who(self) -> tuple[str, int, int]:
        return self.name, self.rank, self.world_size


class Plain:
    """No Worker at all."""

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def double(self, number: int) -> int:
        return 2 * number

    @register(Dispatch.ONE_TO_ALL)
    def lock(self) -> Any:
        return threading.Lock()

    @register(Dispatch.ONE_TO_ALL)
    def end(self, error: type[BaseException]) -> None:
        raise error(3)


def group_of(layout: int | ParallelLayout = 4, settings: Settings | None = None) -> Any:
    return LocalWorkerGroup(ClassWithInitArgs(Model, 1, settings=settings or Settings()), layout, name_prefix="actor")


def test_a_rank_sees_its_own_environment_when_made_and_when_called() -> None:
    before = dict(os.environ)
    rank, world_size, variables, at_call = group_of(4).environment()[2]
    assert (rank, world_size, at_call) == (2, 4, "2")
    assert variables == {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}
    assert dict(os.environ) == before


def test_workers_need_not_call_super_init_nor_be_workers() -> None:
    assert LocalWorkerGroup(ClassWithInitArgs(NoInit, "a"), 2).who() == [("a", 0, 2), ("a", 1, 2)]
    assert LocalWorkerGroup(ClassWithInitArgs(Plain), 2).double(4) == 8


def test_a_worker_made_without_a_group_is_rank_zero_of_one() -> None:
    assert NoInit("a").who() == ("a", 0, 1)


@pytest.mark.parametrize("value", [torch.zeros(2), np.zeros(2), [torch.zeros(2)]])
def test_what_a_worker_writes_into_its_arguments_is_private(value: Any) -> None:
    result = group_of(3).spoil(value)
    assert np.asarray(value).sum() == 0
    assert [float(np.asarray(item).sum()) for item in result] == [2, 2, 2]


def test_objects_and_batches_are_private_to_each_rank_too() -> None:
    settings, batch = Settings(), numbered(2)
    group = group_of(2)
    assert [item.steps for item in group.spoil(settings)] == [[0], [1]] and settings.steps == []
    assert [item.batch["n"].tolist() for item in group.spoil(batch)] == [[1, 2], [1, 2]]
    assert numbers(batch) == [0, 1]


def describe(value: Any) -> Any:
    """Return what code can tell of a value: of tensors, whether they have a gradient, and which are the same."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage().nbytes()
        return type(value), value.tolist(), value.requires_grad, value.is_leaf, value.grad, storage
    if isinstance(value, DataProto):
        return describe([value.tensors(), value.non_tensor_batch, value.meta_info])
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return type(value), [describe(item) for item in value], [first is second for first in value for second in value]
    return describe(vars(value)) if isinstance(value, Settings) else value


LEAF = torch.ones(2, requires_grad=True)
TWICE = torch.zeros(2)


@pytest.mark.parametrize(
    "value",
    [
        LEAF, LEAF * 2, torch.nn.Parameter(torch.ones(2)), torch.arange(1000)[:2], Settings([LEAF * 2, TWICE[:1]]),
        [TWICE, TWICE, {"again": TWICE}], (np.arange(3)[::2], len, Settings, "text"),
        DataProto.from_dict({"a": LEAF, "b": LEAF * 2}, {"o": [LEAF * 2, TWICE]}, {"m": LEAF * 2, "l": [LEAF * 2]}),
    ],
)  # fmt: skip
def test_a_value_arrives_as_in_another_process(value: Any) -> None:
    assert describe(private_copy(value)) == describe(pack(value).unpack())


@pytest.mark.parametrize("value", [(item for item in "ab"), torch.eye(2).to_sparse(), threading.Lock()])
@pytest.mark.parametrize("make", [LocalWorkerGroup, mock_worker_group])
def test_what_cannot_be_sent_is_rejected_as_over_ray_and_the_group_stays_usable(make: Any, value: Any) -> None:
    group = make(ClassWithInitArgs(Plain), 2)
    for call in (lambda: group.double(value), group.lock):
        with pytest.raises(DataError):
            call()
    assert group.broken is None and group.double(4) == 8


@pytest.mark.parametrize(("error", "raised"), [(SystemExit, WorkerError), (KeyboardInterrupt, KeyboardInterrupt)])
def test_a_call_that_some_ranks_have_not_run_breaks_the_group(
    error: type[BaseException], raised: type[BaseException]
) -> None:
    group: Any = LocalWorkerGroup(Plain, 2)
    with pytest.raises(raised):
        group.end(error)
    with pytest.raises(GroupBroken):
        group.double(4)


def test_init_arguments_are_private_to_each_rank() -> None:
    settings = Settings()
    group = group_of(2, settings)
    assert group.settle([7, 8]) == [[7], [8]] and settings.steps == []


def test_a_result_is_the_value_at_the_return_whatever_the_worker_or_the_caller_writes_later() -> None:
    group = group_of(2)
    weights, steps = group.get_weights.options(blocking=False)(), group.settle.options(blocking=False)([1, 1])
    group.execute_all_sync("add_to_weights", 1)
    group.settle([2, 2])
    assert weights.get()[0].tolist() == [1.0, 1.0] and steps.get() == [[1], [1]]
    group.get_weights()[0].zero_()
    assert group.get_weights()[0].tolist() == [2.0, 2.0]


def test_a_layout_sets_the_coordinates_of_the_ranks() -> None:
    group = group_of(ParallelLayout(8, tp=2, pp=2))
    assert group.topology.coordinates(6) == {"tp": 0, "cp": 0, "dp": 1, "pp": 1, "etp": 0, "ep": 0, "edp": 1}
    assert group.compute(every_kind(5)) == every_kind(5)


def test_workers_that_report_their_coordinates_must_fit_the_layout() -> None:
    class Reporting(Plain):
        def get_megatron_rank_info(self) -> DistRankInfo:
            return DistRankInfo(tp_rank=0, dp_rank=0, pp_rank=0)

        def get_megatron_global_info(self) -> DistGlobalInfo:
            return DistGlobalInfo(tp_size=1, dp_size=1, pp_size=1)

    assert LocalWorkerGroup(ClassWithInitArgs(Reporting), 1).topology.size("dp") == 1
    with pytest.raises(TopologyError):
        _ = LocalWorkerGroup(ClassWithInitArgs(Reporting), ParallelLayout(1, extra={"island": 1})).topology


def test_an_exception_names_the_rank_and_keeps_the_workers_traceback() -> None:
    group = group_of(ParallelLayout(4, tp=2))
    with pytest.raises(WorkerError) as raised:
        group.fail_on(2)
    error = raised.value
    assert (error.role, error.rank, error.method, error.pid) == ("actor", 2, "fail_on", os.getpid())
    assert error.coordinates["dp"] == 1 and error.cause == "ValueError: loss is nan"
    assert 'raise ValueError("loss is nan")' in error.worker_traceback
    assert isinstance(error.__cause__, ValueError)
    assert traceback.extract_tb(error.__cause__.__traceback__)[-1].name == "fail_on"


def test_a_worker_reports_its_coordinates_before_the_group_has_asked_for_them() -> None:
    class Reporting(Plain):
        def get_megatron_rank_info(self) -> DistRankInfo:
            return DistRankInfo(tp_rank=int(os.environ["RANK"]), dp_rank=0, pp_rank=0)

        @register(Dispatch.ONE_TO_ALL)
        def fail(self) -> None:
            raise ValueError("loss is nan")

    group = LocalWorkerGroup(ClassWithInitArgs(Reporting), 2)
    with pytest.raises(WorkerError) as raised:
        group.fail()
    assert raised.value.coordinates == {"tp": 0, "cp": 0, "dp": 0, "pp": 0}


def test_the_first_failure_breaks_the_group() -> None:
    group = group_of(4)
    with pytest.raises(WorkerError):
        group.fail_on(1)
    with pytest.raises(GroupBroken) as raised:
        group.environment()
    assert raised.value.first_cause.rank == 1  # type: ignore[attr-defined]


def test_a_constructor_that_raises_is_reported_with_its_rank() -> None:
    class Refusing(Worker):
        def __init__(self) -> None:
            if self.rank == 1:
                raise ValueError("no weights")

    with pytest.raises(WorkerError) as raised:
        LocalWorkerGroup(ClassWithInitArgs(Refusing), 2)
    assert (raised.value.rank, raised.value.method, raised.value.cause) == (1, "__init__", "ValueError: no weights")


def test_a_group_can_be_shut_down_twice_and_is_not_called_again() -> None:
    with group_of(2) as group:
        assert len(group.workers) == 2
    group.shutdown()
    with pytest.raises(GroupBroken) as raised:
        group.environment()
    assert raised.value.fields["first_cause"] is None


def test_what_is_under_way_is_finished_at_the_end_unless_the_group_is_broken() -> None:
    finished: list[int] = []

    class Finishing(Worker):
        def __init__(self, failing: int = -1) -> None:
            self.failing = failing

        def before_shutdown(self) -> None:
            if self.rank == self.failing:
                raise OSError("the disk is full")
            finished.append(self.rank)

        @register(Dispatch.ONE_TO_ALL)
        def fail(self) -> None:
            raise ValueError

    group = LocalWorkerGroup(ClassWithInitArgs(Finishing), 2)
    group.shutdown()
    group.shutdown()
    assert finished == [0, 1]
    with pytest.raises(WorkerError) as raised:
        LocalWorkerGroup(ClassWithInitArgs(Finishing, failing=1), 2).shutdown()
    assert (raised.value.rank, raised.value.method) == (1, "before_shutdown")
    broken = LocalWorkerGroup(ClassWithInitArgs(Finishing, failing=0), 2)
    with pytest.raises(WorkerError):
        broken.fail()
    broken.shutdown()


def test_a_breakpoint_in_a_worker_stops_the_caller_once_for_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stepped(Worker):
        @register(Dispatch.ONE_TO_ALL)
        def step(self, value: int) -> int:
            breakpoint()
            return value

    stops: list[tuple[int, int, bool]] = []

    def stop() -> None:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        variables = frame.f_back.f_locals
        stops.append(
            (variables["self"].rank, variables["value"], threading.current_thread() is threading.main_thread())
        )

    monkeypatch.setattr(sys, "breakpointhook", stop)
    assert LocalWorkerGroup(Stepped, 2).step(7) == [7, 7]
    assert stops == [(0, 7, True), (1, 7, True)]


class Communicating(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def meet(self) -> None:
        torch.distributed.init_process_group("gloo")


def test_ranks_that_would_wait_for_each_other_are_rejected_with_what_to_use() -> None:
    group = LocalWorkerGroup(Communicating, 2)
    with pytest.raises(WorkerError) as raised:
        group.meet()
    assert raised.value.cause.startswith("DispatchError")
    assert torch.distributed.distributed_c10d.rendezvous is torch.distributed.rendezvous
