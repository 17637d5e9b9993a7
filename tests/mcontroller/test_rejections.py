"""Mistakes in a call, a mode or a group are reported with names and numbers, before anything is sent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcontroller import (
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
    ("args", "kwargs", "message"),
    [
        ((), {}, r"missing a required argument: 'batch'; it takes \(batch, scale=1\.0\)"),
        ((numbered(4),), {"sclae": 2}, "unexpected keyword argument 'sclae'; it takes"),
        ((numbered(4), 1, 2), {}, "too many positional arguments; it takes"),
        (([numbered(4)],), {}, "none of its arguments has rows to split: argument 0 is list; pass a DataProto"),
        ((numbered(4).batch,), {"scale": 2}, "argument 0 is TensorDict, argument 'scale' is int; pass a DataProto"),
    ],
)
def test_arguments_that_a_method_does_not_take_never_reach_a_rank(
    group: Any, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    for call in (group.compute, group.compute.explain):
        with pytest.raises(DispatchError, match=r"actor\.compute \(MEGATRON_COMPUTE_PROTO\): .*" + message):
            call(*args, **kwargs)
    assert numbers(group.compute(numbered(4))) == [0, 1, 2, 3]
    assert [len(calls) for calls in group.calls] == [1] * 8


def test_a_decorated_or_static_method_is_called_with_what_it_takes(group: Any) -> None:
    assert group.injected(2) == [6] * 8
    assert group.static(2) == [2] * 8
    with pytest.raises(DispatchError, match=r"actor\.static .*too many positional arguments; it takes \(value\)"):
        group.static(2, 3)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("unknown_axis", r"actor\.unknown_axis \(over\(dq\)\): the topology has no axis 'dq'; it has tp, cp, dp, pp"),
        ("unknown_stage", r"actor\.unknown_stage .*: pp=7 lies outside axis pp of size 2 \(0 to 1\)"),
    ],
)
def test_a_mode_that_does_not_fit_the_topology_is_reported_with_the_method(
    group: Any, method: str, message: str
) -> None:
    with pytest.raises(TopologyError, match=message) as raised:
        getattr(group, method)(numbered(4))
    assert (raised.value.role, raised.value.method) == ("actor", method)


def test_results_that_do_not_join_are_reported_with_their_ranks(group: Any) -> None:
    with pytest.raises(DataError, match=r"actor\.by_rank: .*part 1 of rank 6\): .*of part 1 has columns") as raised:
        group.by_rank(numbered(4))
    assert raised.value.ranks == (4, 6)


def test_workers_that_form_no_grid_are_reported_with_their_role() -> None:
    class Twice(Model):
        def get_megatron_rank_info(self) -> DistRankInfo:
            return DistRankInfo(tp_rank=0, dp_rank=0, pp_rank=0)

        def get_megatron_global_info(self) -> DistGlobalInfo:
            return DistGlobalInfo(tp_size=1, dp_size=2, pp_size=1)

    with pytest.raises(TopologyError, match=r"ranks 0 and 1 both .* rank 1 \(critic on node .*is wrong"):
        _ = LocalWorkerGroup(Twice, 2, name_prefix="critic").topology


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dispatch.over(["dp", "cp"]), "expected names of axes, each a separate string"),
        (lambda: Dispatch.over("dp", collect=["tp"]), r"collect is \['tp'\]; expected the index on each axis"),
        (lambda: Dispatch.over("dp", collect={"tp": "0"}), r"collect is \{'tp': '0'\}; expected the index"),
        (lambda: Dispatch.over("dp", result="cat"), "result is 'cat'; expected one of value, list, concat"),
        (lambda: Dispatch.over("dp", arguments="row"), "arguments is 'row'; expected one of whole, rows, entries"),
        (
            lambda: Dispatch.over("dpp"),
            r"over\(dpp\): there is no axis 'dpp'; did you mean 'dp' or 'pp' or 'edp'\? If the lay",
        ),
        (lambda: Dispatch.over("DP"), "no axis 'DP'; did you mean 'dp'"),
        (lambda: Dispatch.over("dp", collect={"ttp": 0}), "no axis 'ttp'; did you mean 'tp'"),
        (lambda: Dispatch.over(by="ppp"), r"pass extra=\['ppp'\] to Dispatch.over"),
        (lambda: register("MEGATRON_COMPUTE_PROTO"), r"write Dispatch\.MEGATRON_COMPUTE_PROTO, without quotes"),
        (lambda: register("Dispatch.ONE_TO_ALL"), r"write Dispatch\.ONE_TO_ALL, without quotes"),
        (lambda: register("dp_compute_prot"), r"write Dispatch\.DP_COMPUTE_PROTO, without quotes"),
        (lambda: register("spread"), "modes are RANK_ZERO, ONE_TO_ALL, "),
        (lambda: register(blocking="no"), "blocking is 'no'; expected True or False"),
        (lambda: register(balance=["ids"]), r"balance is \['ids'\]; expected None or the name of a column"),
        (lambda: register(timeout=-1), "timeout is -1; expected None or more than 0 seconds"),
        (lambda: mock_worker_group(Model, 2).compute.options(ranks=1), "ranks is 1; expected None or a list of ranks"),
        (lambda: mock_worker_group(Model, 2, failures={1: ValueError()}), r"failures\[1\] is .*; expected raises"),
    ],
)
def test_wrong_modes_and_options_are_rejected_where_they_are_written(make: Any, message: str) -> None:
    with pytest.raises(DispatchError, match=message):
        make()


def test_wrong_classes_and_layouts_are_rejected() -> None:
    with pytest.raises(ConfigError, match="expected the worker class first, then its arguments"):
        ClassWithInitArgs(Model())  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="layout is '8'; expected a ParallelLayout, a Topology or a number of ranks"):
        mock_worker_group(Model, "8")  # type: ignore[arg-type]


def test_an_axis_with_a_name_close_to_megatrons_is_accepted_as_extra() -> None:
    topology = topology_of(4, order="tp-cp-ep-dp-pp-fsdp", extra={"fsdp": 2})
    assert plan(Dispatch.over("fsdp", extra=["fsdp"]), topology).shard_count == 2


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            "tensors",
            r"actor\.tensors \(MEGATRON_COMPUTE_PROTO\): rank 4 returned Tensor; expected a DataProto, because",
        ),
        ("nothing", r"rank 4 returned None; .* with Dispatch\.over\('dp', collect=\{'tp': 0, 'cp': 0, 'pp': -1\}, res"),
        ("sizes", r"rank 0 returned dict; .* register the method with Dispatch\.DP_COMPUTE_METRIC$"),
    ],
)
def test_a_mode_that_concatenates_rejects_other_results_than_batches(group: Any, method: str, message: str) -> None:
    for call in (getattr(group, method), getattr(group, method).options(blocking=False)):
        with pytest.raises(DispatchError, match=message) as raised:
            result = call(numbered(8))
            result.get()
        assert (raised.value.role, raised.value.method) == ("actor", method)
    assert numbers(group.compute(numbered(4))) == [0, 1, 2, 3]


def test_without_axes_a_mode_lists_its_results() -> None:
    stages = Dispatch.over(collect={"tp": 0, "dp": 0}, by="pp")
    assert stages.result == "list" and plan(stages, topology_of(8, tp=2, pp=2)).collected == (0, 4)
