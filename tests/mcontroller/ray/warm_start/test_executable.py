"""Groups whose processes are forked from a warm parent."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

from mcontroller import Dispatch, Worker, register
from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from mcontroller.ray.warm_start.executable import with_warm_start


class Reporter(Worker):
    """Reports how its process was started."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start(self) -> tuple[int, int]:
        """Return the ids of this process and of its parent."""
        return os.getpid(), os.getppid()


def start_of(pool: RayResourcePool) -> list[tuple[int, int]]:
    with RayWorkerGroup(pool, RayClassWithInitArgs(Reporter), name_prefix="reporter") as group:
        return list(group.start())


def test_a_group_does_not_need_its_parent_any_more(pool: RayResourcePool) -> None:
    with RayWorkerGroup(pool, RayClassWithInitArgs(Reporter), name_prefix="reporter") as group:
        [(_, parent), *_] = group.start()
        assert "warm_start" in " ".join(psutil.Process(parent).cmdline()), "not the raylet"
        os.kill(parent, signal.SIGKILL)
        assert [pid for pid, _ in group.start()] == [pid for pid, _ in group.start()]


def test_a_pool_can_start_its_processes_as_ray_does(ray_cluster: None) -> None:
    with RayResourcePool([1], use_gpu=False, warm_start=False) as pool:
        [(_, parent)] = start_of(pool)
    assert psutil.Process(parent).name() == "raylet"


@pytest.mark.parametrize(
    "environment",
    [{"py_executable": "python"}, {"pip": ["a"]}, {"uv": ["a"]}, {"conda": "a"}, {"image_uri": "a"}],
)
def test_an_interpreter_of_the_user_is_kept(ray_cluster: None, environment: dict[str, Any]) -> None:
    options = {"num_cpus": 1, "runtime_env": environment}
    assert with_warm_start(options) == options


def test_the_other_fields_of_a_runtime_environment_are_kept(ray_cluster: None) -> None:
    chosen = with_warm_start({"num_cpus": 4, "runtime_env": {"env_vars": {"A": "1"}}})
    assert chosen["runtime_env"]["env_vars"] == {"A": "1"}
    assert "py_executable" in chosen["runtime_env"]
