"""Devices, driver and packages of this machine; the reason if no GPU can be used."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import distributions

import torch

from workers.gpucheck.rows import Figure, Row, judged

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "tensordict", "ray", "vllm")


def gpu_error() -> str | None:
    """Return one line that says why torch can use no GPU, and what to do; None if it can use one."""
    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
        reason = "torch finds no GPU"
    except (AssertionError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0].partition(" Please ")[0].rstrip(".")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    return (
        f"torch {torch.__version__} for CUDA {torch.version.cuda} can use no GPU: {reason}: install a build for the "
        f"CUDA version that nvidia-smi prints, or change CUDA_VISIBLE_DEVICES, which is {visible!r}"
    )


def versions(_: object) -> Iterator[Row]:
    """Yield the rows of packages and GPUs."""
    installed = {package.name: package.version for package in distributions()}
    packages = {name.replace("-", "_"): installed[name] for name in _PACKAGES if name in installed}
    supported = (3, 11) <= sys.version_info[:2] <= (3, 12)
    advice = "make an environment of Python 3.11 or 3.12"
    yield judged("versions", supported, "Python 3.11 or 3.12", advice, python=sys.version.split()[0], **packages)
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        figures: dict[str, Figure] = {
            "gpu": torch.cuda.get_device_name(index),
            "capability": f"{major}.{minor}",
            "free_gb": free / 2**30,
        }
        advice = "set model.dtype=float16 or float32: bfloat16 needs capability 8.0"
        if major >= 8:
            advice = "other processes use this GPU (nvidia-smi lists them): end them, or set CUDA_VISIBLE_DEVICES"
        passed = major >= 8 and free >= 0.9 * total
        yield judged(f"cuda:{index}", passed, "capability 8.0, 90% free", advice, **figures)
