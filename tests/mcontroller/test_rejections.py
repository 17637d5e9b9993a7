"""Mistakes in a call, a mode or a group are reported with names and numbers, before anything is sent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcontroller import (
    ChannelOptions,
    ClassWithInitArgs,
    ConfigError,
    DataError,
    DataProto,
    Dispatch,
    DispatchError,
    DistGlobalInfo,
    DistRankInfo,
    LayoutError,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    ResourceError,
    TopologyError,
    Worker,
    register,
)
from mcontroller.dispatch.modes import plan
from mcontroller.testing import mock_worker_group
from parallel_state.layout import ParallelLayout
from tests.mcontroller.batches import numbered, numbers
from tests.mcontroller.groups import topology_of

LAYOUT = ParallelLayout(8, tp=2, pp=2)


def scaled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Passes the method an argument that its callers do not pass."""

    @functools.wraps(method)
    def with_scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, scale=3, **kwargs)

    return with_scale


class Model(Worker):
    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute(self, batch: DataProto, scale: float = 1.0) -> DataProto:
        return batch

    @register(Dispatch.ONE_TO_ALL)
    @scaled
    def injected(self, value: int, scale: int) -> int:
        return value * scale

    @register(Dispatch.ONE_TO_ALL)
    @staticmethod
    def static(value: int) -> int:
        return value

    @classmethod
    @register(Dispatch.ONE_TO_ALL)
    def of_class(cls, value: int) -> int:
        return value

    @register(Dispatch.over("dq"))
    def unknown_axis(self, batch: DataProto) -> DataProto: ...

    @register(Dispatch.over("dp", collect={"pp": 7}))
    def unknown_stage(self, batch: DataProto) -> DataProto: ...

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def tensors(self, batch: DataProto) -> torch.Tensor:
        return torch.ones(len(batch))

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def nothing(self, batch: DataProto) -> None: ...

    @register(Dispatch.DP_COMPUTE_PROTO)
    def sizes(self, batch: DataProto) -> dict[str, int]:
        return {"rows": len(batch)}

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def by_rank(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({f"rank{self.rank}": batch.tensors()["n"]})


@pytest.fixture
def group() -> Any:
    return mock_worker_group(Model, LAYOUT, name="actor")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((numbered(4),), {"sclae": 2}),
        ((numbered(4), 1, 2), {}),
        (([numbered(4)],), {}),
        ((numbered(4).batch,), {"scale": 2}),
    ],
)
def test_arguments_that_a_method_does_not_take_never_reach_a_rank(
    group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    for call in (group.compute, group.compute.explain):
        with pytest.raises(DispatchError) as raised:
            call(*args, **kwargs)
        assert (raised.value.role, raised.value.method) == ("actor", "compute")
    assert numbers(group.compute(numbered(4))) == [0, 1, 2, 3]
    assert [len(calls) for calls in group.calls] == [1] * 8


def test_a_decorated_static_or_class_method_is_called_with_what_it_takes(group: Any) -> None:
    assert group.injected(2) == [6] * 8
    assert group.static(2) == group.of_class(2) == [2] * 8
    with pytest.raises(DispatchError) as raised:
        group.static(2, 3)
    assert raised.value.parameters == ("value",)


@pytest.mark.parametrize("method", ["unknown_axis", "unknown_stage"])
def test_a_mode_that_does_not_fit_the_topology_is_reported_with_the_method(group: Any, method: str) -> None:
    with pytest.raises(TopologyError) as raised:
        getattr(group, method)(numbered(4))
    assert (raised.value.role, raised.value.method) == ("actor", method)


def test_results_that_do_not_join_are_reported_with_their_ranks(group: Any) -> None:
    with pytest.raises(DataError) as raised:
        group.by_rank(numbered(4))
    assert raised.value.ranks == (4, 6)


def test_workers_that_form_no_grid_are_reported_with_their_role() -> None:
    class Twice(Model):
        def get_megatron_rank_info(self) -> DistRankInfo:
            return DistRankInfo(tp_rank=0, dp_rank=0, pp_rank=0)

        def get_megatron_global_info(self) -> DistGlobalInfo:
            return DistGlobalInfo(tp_size=1, dp_size=2, pp_size=1)

    with pytest.raises(TopologyError) as raised:
        _ = LocalWorkerGroup(Twice, 2, name_prefix="critic").topology
    assert (raised.value.role, raised.value.ranks) == ("critic", (0, 1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dispatch.over(["dp", "cp"]),
        lambda: Dispatch.over("dp", collect=["tp"]),
        lambda: Dispatch.over("dp", collect={"tp": "0"}),
        lambda: Dispatch.over("dp", result="cat"),
        lambda: Dispatch.over("dp", arguments="row"),
        lambda: Dispatch.over("dp", "dp"),
        lambda: LocalWorkerGroup(Model, 2, timeout="long"),
        lambda: register("MEGATRON_COMPUTE_PROTO"),
        lambda: register(timeout=-1),
        lambda: mock_worker_group(Model, 2, failures={1: ValueError()}),
    ],
)
def test_wrong_modes_and_options_are_rejected_where_they_are_written(make: Any) -> None:
    with pytest.raises(DispatchError):
        make()


def test_wrong_classes_and_layouts_are_rejected() -> None:
    with pytest.raises(ConfigError):
        ClassWithInitArgs(Model())  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        RayClassWithInitArgs(Model, wieght=1)
    with pytest.raises(LayoutError):
        LocalWorkerGroup(Model, "8")  # type: ignore[arg-type]
    with pytest.raises(TopologyError):
        mock_worker_group(Model, "8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        ChannelOptions(ports=(20000,))  # type: ignore[arg-type]
    for sizes in (3, 0, [], [4, 0], [2, 1]):
        with pytest.raises(ResourceError):
            RayResourcePool([4], use_gpu=False).split(sizes)


def test_a_mode_that_does_not_exist_is_reported_with_a_near_one() -> None:
    with pytest.raises(AttributeError, match="MEGATRON_COMPUTE_PROTO"):
        _ = Dispatch.MEGATRON_COMPUTE_PROT  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "rank", "kind"), [("tensors", 4, "Tensor"), ("nothing", 4, "NoneType"), ("sizes", 0, "dict")]
)
def test_a_mode_that_concatenates_rejects_other_results_than_batches(
    group: Any, method: str, rank: int, kind: str
) -> None:
    for call in (getattr(group, method), getattr(group, method).options(blocking=False)):
        with pytest.raises(DispatchError) as raised:
            result = call(numbered(8))
            result.get()
        assert (raised.value.method, raised.value.rank, raised.value.type) == (method, rank, kind)
    assert numbers(group.compute(numbered(4))) == [0, 1, 2, 3]


def test_without_axes_a_mode_lists_its_results() -> None:
    stages = Dispatch.over(collect={"tp": 0, "dp": 0}, by="pp")
    assert stages.result == "list" and plan(stages, topology_of(8, tp=2, pp=2)).collected == (0, 4)
