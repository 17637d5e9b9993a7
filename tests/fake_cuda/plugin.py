"""A pytest plugin: a CUDA device that computes on the CPU, for tests of the GPU path on a machine without a GPU.

The real, unpatched GPU path of the packages and of Megatron-Core runs with real values. Storages carry the tag "on the
device"; operations that mix devices are rejected as CUDA rejects them, and collectives as NCCL rejects them; copies
between host and device and host synchronisations are counted. A copy that the host does not wait for lands as late as
CUDA allows (``streams.py``), and a process has a context on every GPU that it uses (``tags.py``).

It cannot show what kernels compute, hangs of NCCL, races between kernels, what the allocator wastes, or speed. Groups
that ranks use in different orders are an error of simulated ranks.

Run tests under it with ``python -m pytest -p tests.fake_cuda.plugin tests/workers``. ``tests/fake_cuda/selection.py``
chooses what runs; with ``--all`` every test runs, and tests that must fail on a GPU must fail.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import pytest

from tests.fake_cuda import cuda_api, ipc, modes, nccl
from tests.fake_cuda.selection import cases_that_do_not_exist, is_chosen, reason_to_fail
from tests.fake_cuda.tags import initialization, memory


def enable() -> None:
    """Turn the fake CUDA device on in this thread, and in every process that is forked from it."""
    cuda_api.install()
    operations, functions = modes.DeviceOperations(), modes.DeviceFunctions()
    modes.patch_backward(functions)
    operations.__enter__()
    functions.__enter__()
    nccl.install()
    ipc.install()
    # Megatron warns that the generators of the CPU serve the device.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--all``."""
    parser.addoption("--all", action="store_true", help="run every case on the fake CUDA device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs with ``--all`` only; mark what must fail on a GPU."""
    unknown = cases_that_do_not_exist([item.nodeid for item in items])
    if unknown and not config.option.keyword and all(Path(argument).is_dir() for argument in config.args):
        raise pytest.UsageError(f"tests/fake_cuda/selection.py chooses cases that do not exist: {unknown}")
    if not config.getoption("--all"):
        config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item.nodeid)])
        items[:] = [item for item in items if is_chosen(item.nodeid)]
    for item in items:
        reason = reason_to_fail(item.nodeid)
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def pytest_configure(config: pytest.Config) -> None:
    """Select what is marked ``slow`` too with ``--all``."""
    if config.getoption("--all"):
        config.option.markexpr = ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test of the workers that uses a GPU in this process: CUDA does not survive the fork of ranks.

    Other tests may use it; the ranks of the next test are forked as from a process that has not.
    """
    initialization.forget()
    before = _changes()
    result = yield
    if item.nodeid.startswith("tests/workers/") and _changes() != before:
        raise AssertionError("the test uses a GPU in the process that forks ranks: use it inside run_ranks")
    return result


def _changes() -> int:
    return sum(pool.changes for pool in memory.values())
