from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import ray

from mcontroller import ClassWithInitArgs
from mcontroller.channel.options import ChannelOptions
from mcontroller.errors import CallTimeout, ConfigError, DispatchError, GroupError, TopologyError, WorkerError
from mcontroller.ray import MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from mcontroller.transport import Arguments
from parallel_state import ParallelLayout
from tests.free_ports import free_ports
from tests.mcontroller.ray.roles import Finishes, NeverFinishes, Plain, SameCoordinates

Start = Callable[..., RayWorkerGroup]


def test_ranks_get_the_environment_that_torchrun_sets(steady: RayWorkerGroup) -> None:
    environments = steady.environment()
    assert [variables["RANK"] for variables in environments] == ["0", "1", "2", "3"]
    assert [variables["LOCAL_RANK"] for variables in environments] == ["0", "1", "2", "3"]
    assert {variables["WORLD_SIZE"] for variables in environments} == {"4"}
    assert {variables["LOCAL_WORLD_SIZE"] for variables in environments} == {"4"}
    assert {variables["OMP_NUM_THREADS"] for variables in environments} == {"1"}
    assert {variables["MASTER_ADDR"] for variables in environments} == {steady.executor.nodes[0]}
    assert len({variables["MASTER_PORT"] for variables in environments}) == 1


def test_processes_have_the_title_of_their_rank(steady: RayWorkerGroup) -> None:
    titles = [Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0") for pid in steady.pid()]
    assert titles == [f"ray::steady rank {rank}" for rank in range(4)]


def test_groups_that_start_together_have_different_ports_and_can_listen(start: Start) -> None:
    groups = [start("actor"), start("critic")]
    assert len({group.environment()[0]["MASTER_PORT"] for group in groups}) == 2
    assert all(group.execute_rank_zero_sync("can_listen_on_master_port") for group in groups)


def test_a_group_listens_on_ports_of_the_range_only(ray_cluster: None) -> None:
    first, last = ports = free_ports(12)
    options = ChannelOptions(ports=ports)
    with RayResourcePool([2], use_gpu=False, channel=options) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Plain), name_prefix="pinned")
        infos = group.executor.processes.handles.infos
        used = [port for info in infos for port in (info.address.call_port, info.address.query_port)]
        used += [int(group.environment()[0]["MASTER_PORT"])]
        assert len({*used}) == 5 and all(first <= port <= last for port in used)
        assert group.execute_rank_zero_sync("can_listen_on_master_port")


def test_values_go_to_their_rank_and_come_back_by_rank(steady: RayWorkerGroup) -> None:
    assert steady.echo(["a", "b", "c", "d"]) == ["a", "b", "c", "d"]
    assert steady.first("x") == (0, "x")


def test_a_signal_handler_that_native_code_has_set_stays(pool: RayResourcePool) -> None:
    with RayWorkerGroup(pool, RayClassWithInitArgs(Plain), name_prefix="native") as group:
        assert group.ignores_sigint(0) == [False, False]
        group.ignore_sigint_natively()
        assert group.ignores_sigint(1) == [True, True]


def test_workers_are_built_and_called_on_the_main_thread_as_under_torchrun(steady: RayWorkerGroup) -> None:
    assert steady.runs_on_the_main_thread() == [True] * 4


def test_async_methods_are_called_like_others(steady: RayWorkerGroup) -> None:
    assert steady.awaited("x") == [(0, "x"), (1, "x"), (2, "x"), (3, "x")]


def test_a_future_is_polled_waited_for_and_got(steady: RayWorkerGroup) -> None:
    future = steady.later("x")
    assert future.wait(60)
    assert future.done()
    assert future.get() == future.get() == [(0, "x"), (1, "x"), (2, "x"), (3, "x")]


def test_a_call_cancelled_before_it_began_is_never_run(steady: RayWorkerGroup, tmp_path: Path) -> None:
    steady.keep("before")
    running = steady.wait_for_file(str(tmp_path / "go"))
    cancelled = steady.keep("after")
    cancelled.cancel()
    (tmp_path / "go").touch()
    running.get()
    assert steady.get() == ["before"] * 4
    with pytest.raises(GroupError) as caught:
        cancelled.get()
    assert caught.value.fields == {"role": "steady", "method": "keep"}


def test_a_call_cancelled_after_one_rank_began_is_run_by_all(steady: RayWorkerGroup, tmp_path: Path) -> None:
    arguments = dict.fromkeys((1, 2, 3), Arguments((str(tmp_path / "go"),)))
    running = steady.executor.submit("wait_for_file", arguments, ())
    half_begun = steady.keep("begun")
    assert steady.execute_rank_zero_sync("get") == "begun"
    half_begun.cancel()
    (tmp_path / "go").touch()
    running.check()
    assert steady.get() == ["begun"] * 4


def test_execute_all_and_rank_zero_reach_methods_that_are_not_registered(steady: RayWorkerGroup) -> None:
    assert steady.execute_all_sync("not_registered") == [0, 1, 2, 3]
    assert steady.execute_all_async("not_registered").get() == [0, 1, 2, 3]
    assert steady.execute_rank_zero_sync("not_registered") == 0
    assert steady.execute_rank_zero_async("not_registered").get() == 0


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_worker_writes_into_what_it_receives_and_no_other_process_sees_it(steady: RayWorkerGroup, size: int) -> None:
    array = np.full(size, 7)
    assert steady.scribble(array) == [rank * size for rank in range(4)]
    assert (array == 7).all()


def test_what_comes_back_may_be_written_into(steady: RayWorkerGroup) -> None:
    arrays = steady.echo([np.zeros(50_000) for _ in range(4)])
    arrays[0][:] = 1
    assert [array.sum() for array in arrays] == [50_000, 0, 0, 0]


def test_a_class_made_an_actor_by_ray_is_taken_as_the_class(pool: RayResourcePool) -> None:
    with RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Plain), "given"), name_prefix="remote") as group:
        assert group.worker_cls is Plain
        assert group.get() == ["given", "given"]


@pytest.mark.parametrize("name", ["num_gpus", "max_concurrency", "max_restarts"])
def test_options_of_the_pool_and_the_group_cannot_be_taken_from_them(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RayClassWithInitArgs(Plain).update_options({name: 2})
    assert (caught.value.key, caught.value.value) == (name, 2)


@pytest.mark.parametrize(
    "given", [{}, {"CUDA_VISIBLE_DEVICES": "0,1", "RAY_LOCAL_RANK": "overwritten"}], ids=["nodes", "runtime_env"]
)
def test_processes_of_a_pool_without_gpus_see_none_and_have_their_ranks(
    pool: RayResourcePool, given: dict[str, str]
) -> None:
    init = RayClassWithInitArgs(Plain).update_options({"runtime_env": {"env_vars": given}})
    with RayWorkerGroup(pool, init, name_prefix="no gpus") as group:
        assert [variables["CUDA_VISIBLE_DEVICES"] for variables in group.environment()] == ["", ""]
        assert [variables["RAY_LOCAL_RANK"] for variables in group.environment()] == ["0", "1"]


def test_ranks_with_the_same_coordinates_are_rejected_at_the_start(pool: RayResourcePool) -> None:
    with pytest.raises(TopologyError):
        MegatronRayWorkerGroup(pool, RayClassWithInitArgs(SameCoordinates, ParallelLayout(2, tp=2)))
    assert pool.holders == []


def test_a_group_of_workers_without_rank_info_is_rejected(pool: RayResourcePool) -> None:
    with pytest.raises(ConfigError) as caught:
        MegatronRayWorkerGroup(pool, RayClassWithInitArgs(Plain))
    assert caught.value.value == "Plain"
    assert pool.holders == []


def test_a_bare_class_is_rejected_with_the_class_to_wrap_it_in(pool: RayResourcePool) -> None:
    for bare in (Plain, ray.remote(Plain), ClassWithInitArgs(Plain)):
        with pytest.raises(ConfigError) as caught:
            RayWorkerGroup(pool, bare)  # type: ignore[arg-type]
        assert "RayClassWithInitArgs(Plain)" in str(caught.value)


def test_an_init_argument_that_cannot_be_pickled_is_named(pool: RayResourcePool) -> None:
    for init, key in (
        (RayClassWithInitArgs(Plain, threading.Lock()), "argument 0"),
        (RayClassWithInitArgs(Plain, value=[threading.Lock()]), "argument 'value'[0]"),
    ):
        with pytest.raises(ConfigError) as caught:
            RayWorkerGroup(pool, init)
        assert caught.value.key == key
    assert pool.holders == []


def test_a_signature_in_an_error_has_no_parameters_of_ray(pool: RayResourcePool) -> None:
    with (
        RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Plain)), name_prefix="remote") as group,
        pytest.raises(DispatchError) as caught,
    ):
        group.first(1, 2, 3)
    assert caught.value.fields["parameters"] == ("value",)


def test_before_shutdown_runs_before_the_processes_end(pool: RayResourcePool, tmp_path: Path) -> None:
    with RayWorkerGroup(pool, RayClassWithInitArgs(Finishes, str(tmp_path)), name_prefix="finishes"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_an_error_in_before_shutdown_is_raised_after_the_end(pool: RayResourcePool) -> None:
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Finishes), name_prefix="full")
    with pytest.raises(WorkerError) as caught:
        group.shutdown()
    assert (caught.value.method, caught.value.cause) == ("before_shutdown", "OSError: the disk is full")
    assert pool.holders == []


def test_a_before_shutdown_that_does_not_return_has_a_deadline(pool: RayResourcePool) -> None:
    group = RayWorkerGroup(pool, RayClassWithInitArgs(NeverFinishes), name_prefix="never")
    with pytest.raises(CallTimeout) as caught:
        group.shutdown(timeout=1)
    assert "in before_shutdown" in caught.value.stacks[0] and "in block" in caught.value.stacks[0]
    assert pool.holders == []


@pytest.mark.parametrize("busy", [True, False])
def test_a_group_that_is_busy_or_broken_ends_at_once(pool: RayResourcePool, tmp_path: Path, busy: bool) -> None:
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Finishes, str(tmp_path)), name_prefix="ends")
    if busy:
        group.wait_for_file(str(tmp_path / "never"))
    else:
        with pytest.raises(WorkerError):
            group.fail_on({1: "x"})
    group.shutdown()
    assert list(tmp_path.iterdir()) == []
    assert pool.holders == []
