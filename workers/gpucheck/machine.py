"""Devices, driver and packages of this machine; the reason if no GPU can be used."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from torch.torch_version import TorchVersion

from workers.gpucheck.rows import Row, judged


def gpu_error() -> str | None:
    """Return one line that says why torch can use no GPU, and what to do; None if it can use one.

    Call this before anything patches ``torch.cuda`` for a CPU.
    """
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides all GPUs: unset it"
    try:
        torch._C._cuda_init()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0].partition(" Please ")[0].rstrip(".")
        return (
            f"the CUDA driver cannot be used: {reason}: run nvidia-smi, and compare the CUDA version that it prints "
            f"with torch's, {torch.version.cuda}"
        )
    chosen = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    return f"torch {torch.__version__} with CUDA {torch.version.cuda} finds no GPU{chosen}: run nvidia-smi"


def bfloat16_error(capability: tuple[int, int], name: str) -> str | None:
    """Return one line if a GPU of this compute capability has no bfloat16 arithmetic, otherwise None."""
    if capability >= (8, 0):
        return None
    major, minor = capability
    return f"{name} has compute capability {major}.{minor}; bfloat16 needs 8.0: set model.dtype=float16 or float32"


def versions(_: object) -> Iterator[Row]:
    """Yield the rows of packages and GPUs."""
    supported = (3, 11) <= sys.version_info[:2] <= (3, 12) and TorchVersion(torch.__version__) >= "2.6"
    error = None if supported else "install torch 2.6 or newer, in an environment of Python 3.11 or 3.12"
    if find_spec("transformer_engine") is not None and not HAVE_TE:
        error = "Megatron cannot import the installed Transformer Engine: install a version that it knows"
    yield judged(
        "versions",
        error is None,
        "Python 3.11 or 3.12, torch 2.6",
        error or "",
        python=".".join(map(str, sys.version_info[:3])),
        **{name.replace("-", "_"): _version(name) for name in ("torch", "megatron-core", "transformer-engine")},
        cuda=str(torch.version.cuda),
        nccl=".".join(map(str, torch.cuda.nccl.version())),
    )
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        busy = "other processes use this GPU (nvidia-smi lists them): end them, or set CUDA_VISIBLE_DEVICES"
        error = bfloat16_error(capability, name) or (busy if free < 0.9 * total else None)
        yield judged(
            f"cuda:{index}",
            error is None,
            "capability 8.0, 90% free",
            error or "",
            gpu=name,
            capability="{}.{}".format(*capability),
            free_gb=free / 2**30,
        )


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
