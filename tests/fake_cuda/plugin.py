"""A pytest plugin: a CUDA device that computes on the CPU, for tests of the GPU path on a machine without a GPU.

The real, unpatched GPU path of the packages and of Megatron-Core runs with real values. Storages carry the tag "on the
device"; operations that mix devices are rejected as CUDA rejects them, and collectives as NCCL rejects them; copies
between host and device and host synchronisations are counted.

It cannot show what kernels compute, hangs of NCCL, races between streams, memory limits or speed.

Run tests under it with ``python -m pytest -p tests.fake_cuda.plugin tests/workers``.
"""

from __future__ import annotations

import logging
import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from tests.fake_cuda import cuda_api, modes, nccl


def enable() -> None:
    """Turn the pretended device on in this thread, and in every process that is forked from it."""
    cuda_api.install()
    operations, functions = modes.DeviceOperations(), modes.DeviceFunctions()
    modes.patch_backward(functions)
    operations.__enter__()
    functions.__enter__()
    nccl.install()
    # Megatron warns that the generators of the CPU are those of the device.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


enable()
