"""Megatron-Core is importable by any test on a machine without a GPU; one Ray cluster serves the whole run."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import ray
import torch

from parallel_state import cpu
from tests.process_guard import MARKS, ProcessGuard

# torch.cuda.is_available() must not initialize CUDA: a process that has initialized it cannot be forked into ranks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
if torch.version.cuda and not torch.cuda.is_available():
    # A torch that is built for CUDA assumes one device for fake tensors, which DTensor uses. Autograd then starts a
    # thread for it, and the process can no longer fork ranks that compute gradients.
    torch._C._ensureCUDADeviceGuardSet = lambda: None  # type: ignore[attr-defined]
cpu.install()
# Processes of groups are started for their actors: none uses those that Ray starts in advance, of 1 s each.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
# Tests that compute beside them have a niceness of 0: with Ray's default, 15, workers get a thirtieth of their time.
os.environ.setdefault("RAY_worker_niceness", "0")
# Nobody reads the logs of workers in a driver: Ray would look for new ones among thousands ten times a second.
os.environ |= {"RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0", "LOG_NAME_UPDATE_INTERVAL_S": "600"}
# A run in the background of a script ignores Ctrl-C, and so would every process that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Watch every test for processes that it does not declare, and show the first failure of one that ran twice."""
    config.pluginmanager.register(ProcessGuard(), "process guard")
    config.option.rerun_show_tracebacks = True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use Ray, and run the forking ones first.

    Tests that fork run before Ray starts: a fork copies no threads. With a torch that is built for CUDA, they also run
    before ranks are simulated: a process that has computed gradients cannot fork ranks that do.

    On CI a failed test that starts processes runs a second time: they may be late on a shared machine. The summary
    lists it as RERUN with its first failure, which is a defect to fix like any other.
    """
    for item in items:
        if needs_ray(item):
            item.add_marker("processes")
        if os.environ.get("CI") and "processes" in marks_of(item):
            item.add_marker(pytest.mark.flaky(reruns=1))
    built_for_cuda = torch.version.cuda is not None
    items.sort(key=lambda item: (needs_ray(item), built_for_cuda and not forks(item)))


def pytest_collection_finish() -> None:
    """Leave what exists now out of every garbage collection: Megatron collects on each rank, for seconds otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def without_older_objects() -> Iterator[None]:
    """Leave what a module's tests have made, such as caches, out of the collections of later ones too."""
    yield
    gc.collect()
    gc.freeze()


def needs_ray(item: pytest.Item) -> bool:
    """Whether the test uses the Ray cluster of the run."""
    return "ray_cluster" in getattr(item, "fixturenames", ())


def marks_of(item: pytest.Item) -> set[str]:
    """Return ``processes``, ``simulated``, or both."""
    return {mark for mark in MARKS.values() if item.get_closest_marker(mark) is not None}


def forks(item: pytest.Item) -> bool:
    """Whether all ranks of the test are processes, as the ranks of ``tests.ranks`` are on a GPU."""
    return marks_of(item) == {"processes"} or (marks_of(item) == {"simulated"} and torch.cuda.is_available())


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """The one Ray of a test run: CPUs and GPUs that need not exist, since the tests' processes hardly compute."""
    ray.init(
        address="local",
        num_cpus=16,
        num_gpus=2,
        resources={"accelerator_type:H200": 1},  # as Ray marks a node that has such GPUs
        object_store_memory=300_000_000,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    yield
    ray.shutdown()
