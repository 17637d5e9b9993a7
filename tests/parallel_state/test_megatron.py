"""Megatron's groups for a layout, read back from Megatron, and contexts that are independent of each other."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed import distributed_c10d

import parallel_state.megatron
from parallel_state.errors import LayoutError, ParallelStateError
from parallel_state.infos import DistGlobalInfo, DistRankInfo
from parallel_state.layout import ParallelLayout
from parallel_state.megatron import MegatronContext, initialize_distributed
from parallel_state.topology import Topology
from tests import forking
from tests.ranks import run_ranks

TP2_PP2 = ParallelLayout(world_size=4, tp=2, pp=2)
TP4 = ParallelLayout(world_size=4, tp=4)


def infos(layout: ParallelLayout) -> tuple[DistRankInfo, DistGlobalInfo]:
    context = MegatronContext(layout)
    return context.rank_info(), context.global_info()


@pytest.mark.simulated
@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(8, tp=2, pp=2),
        ParallelLayout(8, tp=2, cp=2, pp=2, vpp=2),
        ParallelLayout(8, tp=2, ep=4, etp=1),
        ParallelLayout(8, tp=2, ep=2, etp=2, pp=2),
        ParallelLayout(8, tp=2, cp=2, order="tp-pp-cp-ep-dp"),
        ParallelLayout(8, cp=2, pp=2, order="cp-tp-ep-dp-pp"),
    ],
    ids=lambda layout: f"tp{layout.tp}cp{layout.cp}pp{layout.pp}ep{layout.ep} {layout.order}",
)
def test_megatron_reports_the_coordinates_of_the_layout(layout: ParallelLayout) -> None:
    rank_infos, global_infos = zip(*run_ranks(infos, 8, layout), strict=True)
    for rank, info in enumerate(rank_infos):
        assert {axis: getattr(info, f"{axis}_rank") for axis in layout.sizes} == layout.coordinates(rank)
    assert {axis: getattr(global_infos[0], f"{axis}_size") for axis in layout.sizes} == dict(layout.sizes)
    assert global_infos[0].vpp_size == layout.vpp
    assert Topology.from_infos(rank_infos, global_infos).select(tp=0, pp=-1) == Topology.from_layout(layout).select(
        tp=0, pp=-1
    )


@pytest.mark.simulated
def test_a_layout_for_another_world_size_is_rejected() -> None:
    def rejected() -> dict[str, int]:
        with pytest.raises(LayoutError) as caught:
            MegatronContext(TP4)
        return caught.value.fields

    assert run_ranks(rejected, 2) == [{"layout_world_size": 4, "world_size": 2}] * 2


def test_a_context_needs_torch_distributed() -> None:
    with pytest.raises(ParallelStateError):
        MegatronContext(ParallelLayout(1))


@pytest.mark.simulated
def test_a_process_joins_torch_distributed_as_one_rank_only() -> None:
    def join_again() -> str:
        initialize_distributed(rank=dist.get_rank(), world_size=2)
        initialize_distributed()
        with pytest.raises(ParallelStateError) as caught:
            initialize_distributed(rank=dist.get_rank() + 1, world_size=2)
        return str(caught.value)

    assert run_ranks(join_again, 2)[1].startswith("torch.distributed runs in this process as rank 1 of 2; it cannot")


@pytest.mark.simulated
def test_the_globals_are_restored_after_the_block() -> None:
    def sizes() -> list[object]:
        one, other = MegatronContext(TP2_PP2), MegatronContext(TP4)
        recorded: list[object] = [mpu.model_parallel_is_initialized()]
        with one.activate():
            recorded.append(mpu.get_tensor_model_parallel_world_size())
            with other.activate():
                recorded.append(mpu.get_tensor_model_parallel_world_size())
                with one.activate(), one.activate():
                    recorded.append(mpu.get_pipeline_model_parallel_world_size())
                recorded.append(mpu.get_pipeline_model_parallel_world_size())
            recorded.append(mpu.get_tensor_model_parallel_world_size())
        return [*recorded, mpu.model_parallel_is_initialized()]

    assert run_ranks(sizes, 4)[3] == [False, 2, 4, 2, 1, 2, False]


@pytest.mark.simulated
def test_the_globals_are_restored_after_an_exception() -> None:
    def after_failure() -> tuple[bool, int]:
        context = MegatronContext(TP2_PP2)
        with pytest.raises(ZeroDivisionError), context.activate():
            _ = 1 / 0
        with context.activate():
            return mpu.model_parallel_is_initialized(), mpu.get_tensor_model_parallel_world_size()

    assert run_ranks(after_failure, 4) == [(True, 2)] * 4


@pytest.mark.simulated
def test_globals_set_inside_a_context_belong_to_it() -> None:
    def virtual_ranks() -> list[int | None]:
        layout = ParallelLayout(4, pp=2, vpp=2)
        one, other = MegatronContext(layout), MegatronContext(layout)
        with one.activate():
            mpu.set_virtual_pipeline_model_parallel_rank(1)
        return [one.rank_info().vpp_rank, other.rank_info().vpp_rank]

    assert run_ranks(virtual_ranks, 4)[0] == [1, 0]


@pytest.mark.simulated
def test_threads_in_different_contexts_take_turns() -> None:
    def sizes_seen_by_threads() -> dict[int, set[int]]:
        contexts = {2: MegatronContext(TP2_PP2), 4: MegatronContext(TP4)}
        recorded: dict[int, set[int]] = {2: set(), 4: set()}

        def look(tp: int) -> None:
            for _ in range(200):
                with contexts[tp].activate():
                    recorded[tp] |= {mpu.get_tensor_model_parallel_world_size() for _ in range(20)}

        threads = [threading.Thread(target=look, args=(tp,)) for tp in contexts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return recorded

    assert run_ranks(sizes_seen_by_threads, 4)[0] == {2: {2}, 4: {4}}


@pytest.mark.simulated
def test_the_random_numbers_of_a_context_do_not_depend_on_others() -> None:
    def draws(disturbed: bool) -> list[torch.Tensor]:
        one, other = MegatronContext(TP2_PP2, seed=5), MegatronContext(TP4, seed=6)
        numbers = []
        for _ in range(3):
            with one.activate():
                with get_cuda_rng_tracker().fork():
                    numbers.append(torch.rand(2))
                numbers.append(torch.rand(2))
            if disturbed:
                torch.manual_seed(0)
                with other.activate(), get_cuda_rng_tracker().fork():
                    torch.rand(7)
        return numbers

    alone, with_another = run_ranks(draws, 4, False), run_ranks(draws, 4, True)
    torch.testing.assert_close(alone, with_another, rtol=0, atol=0)
    assert not torch.equal(alone[0][0], alone[1][0])  # divided over tp: another stream on each tp rank
    assert torch.equal(alone[0][1], alone[1][1])


def test_a_new_context_starts_with_the_globals_of_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel.random, "_CUDA_RNG_STATE_TRACKER", None)  # any earlier test may have made one
    monkeypatch.setattr(tensor_parallel.random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)
    parts = parallel_state.megatron.layout_parts()[:-2]
    assert [part.fresh() for part in parts] == [part.read() for part in parts]
    assert len(parts[0].fresh()) > 40


def arguments_of_contexts() -> list[tuple[str, str | None]]:
    """Return what three readers find in the globals of ``megatron.training``, which is imported after the first."""
    training = ModuleType("megatron.training.global_vars")
    vars(training).update(_GLOBAL_ARGS=None, _GLOBAL_TIMERS=None)
    one = MegatronContext(ParallelLayout(1))
    sys.modules[training.__name__] = training
    try:
        with one.activate():
            vars(training)["_GLOBAL_ARGS"] = "of one"
        vars(training)["_GLOBAL_TIMERS"] = "of the process"
        other = MegatronContext(ParallelLayout(1))
        with other.activate():
            vars(training)["_GLOBAL_ARGS"] = "of the other"
        settings = []
        for context in (one, other):
            with context.activate():
                settings.append((vars(training)["_GLOBAL_ARGS"], vars(training)["_GLOBAL_TIMERS"]))
        return [*settings, (vars(training)["_GLOBAL_ARGS"], vars(training)["_GLOBAL_TIMERS"])]
    finally:
        del sys.modules[training.__name__]


@pytest.mark.processes
def test_the_globals_of_megatrons_training_code_belong_to_a_context() -> None:
    assert forking.run_ranks(arguments_of_contexts, 1) == [
        [("of one", None), ("of the other", "of the process"), (None, "of the process")]
    ]


@pytest.mark.simulated
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_gloo_groups_are_created_once() -> None:
    def shared() -> bool:
        with MegatronContext(TP2_PP2).activate():
            return mpu.get_data_parallel_group_gloo() is mpu.get_data_parallel_group()

    assert run_ranks(shared, 4) == [True] * 4


def destroyed() -> tuple[int, list[int], int]:
    before = len(distributed_c10d._world.pg_map)
    one, other = MegatronContext(TP2_PP2), MegatronContext(TP4)
    one.destroy()
    with other.activate():
        tensor = torch.ones(1)
        torch.distributed.all_reduce(tensor, group=other.pg.tp)
    other.destroy()
    return before, [int(tensor)], len(distributed_c10d._world.pg_map)


@pytest.mark.simulated
def test_a_destroyed_layout_leaves_no_process_group_and_the_others_work() -> None:
    for before, total, after in run_ranks(destroyed, 4):
        assert (after, total) == (before, [4])
