"""Packages and GPUs of this machine; the reason if no GPU can be used."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from mcontroller.devices import why_torch_has_no_gpu
from mcontroller.doctor.verb import NodeAgent
from workers.gpucheck.rows import Figure, Row


def gpu_error() -> str | None:
    """Return one line that says why torch can use no GPU, and what to do; None if it can use one."""
    if torch.cuda.is_available():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    return (
        f"torch {torch.__version__} for CUDA {torch.version.cuda} can use no GPU: {why_torch_has_no_gpu()}: install a "
        f"build for the CUDA version that nvidia-smi prints, or change CUDA_VISIBLE_DEVICES, which is {visible!r}"
    )


def versions(_: object) -> Iterator[Row]:
    """Yield the rows of packages and GPUs."""
    yield Row("versions", dict(NodeAgent().facts().versions))
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        figures: dict[str, Figure] = {"gpu": torch.cuda.get_device_name(index), "capability": f"{major}.{minor}"}
        figures |= {"computes_bfloat16": str(major >= 8), "free_gb": free / 2**30, "used": 1 - free / total}
        yield Row(f"cuda:{index}", figures, {"computes_bfloat16": "True", "used": 0.1})
