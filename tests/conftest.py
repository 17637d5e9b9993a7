"""Megatron-Core is importable by any test on a machine without a GPU; one Ray cluster serves the whole run."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import ray

from parallel_state import cpu

cpu.install()
# Where the run was started with Ctrl-C ignored, as in the background of a script, what it starts would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that fork their ranks run before Ray is started, whose threads a fork would leave half alive."""
    items.sort(key=lambda item: "ray_cluster" in getattr(item, "fixturenames", ()))


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
