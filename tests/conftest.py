"""Megatron-Core is importable by any test on a machine without a GPU; one Ray cluster serves the whole run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import ray
import torch

from parallel_state import cpu
from tests.tiers import (
    ProcessGuard,
    needs_ray,
    simulates_in_this_process,
    starts_processes,
    uses_simulated_ranks_alone,
)

# torch.cuda.is_available() must not initialize CUDA: a process that has initialized it cannot be forked into ranks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
if torch.version.cuda and not torch.cuda.is_available():
    # A torch that is built for CUDA pretends one device for fake tensors, which DTensor uses. Autograd then starts a
    # thread for it, and the process can no longer fork ranks that compute gradients.
    torch._C._ensureCUDADeviceGuardSet = lambda: None  # type: ignore[attr-defined]
cpu.install()
# A run in the background of a script ignores Ctrl-C, and so would every process that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Watch every test for processes that its mark does not announce."""
    config.pluginmanager.register(ProcessGuard(), "process guard")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start processes, and those on simulated ranks.

    Those that fork run before Ray starts: a fork copies no threads. With a torch that is built for CUDA, they also run
    before the tests of the simulator: ranks that compute gradients cannot be forked by a process that has done so.

    On CI a failed test that starts processes runs a second time, since processes may be late on a shared machine. The
    summary lists it as RERUN with its first failure, which is a defect to fix like any other.
    """
    for item in items:
        if uses_simulated_ranks_alone(item):
            item.add_marker("simulated")
        if starts_processes(item):
            item.add_marker("processes")
            if os.environ.get("CI"):
                item.add_marker(pytest.mark.flaky(reruns=1))
    built_for_cuda = torch.version.cuda is not None
    items.sort(key=lambda item: (needs_ray(item), built_for_cuda and simulates_in_this_process(item)))


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
