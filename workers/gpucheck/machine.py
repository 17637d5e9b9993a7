"""Devices, driver and packages of this machine; the reason if no GPU can be used. Imports neither Megatron nor Ray."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from workers.gpucheck.rows import Result, Row, compared

__all__ = [
    "bfloat16_problem",
    "cpu_problem",
    "gpu_problem",
    "machine_rows",
    "transformer_engine_problem",
]


def gpu_problem() -> str | None:
    """Return one line that says why torch can use no GPU here, and what to do; None if it can use one.

    Call this before anything patches ``torch.cuda`` for a CPU.
    """
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch, or use --device cpu"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides all GPUs: unset it, or use --device cpu"
    try:
        torch._C._cuda_init()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0].partition(" Please ")[0].rstrip(".")
        return (
            f"the CUDA driver cannot be used: {reason}: run nvidia-smi, and compare the CUDA version that it prints "
            f"with that of torch, {torch.version.cuda}"
        )
    chosen = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    return f"torch {torch.__version__} with CUDA {torch.version.cuda} finds no GPU{chosen}: run nvidia-smi"


def cpu_problem() -> str | None:
    """Return one line that says why the CPU cannot be checked here; None if it can."""
    if torch.cuda.is_available():
        return "--device cpu needs a process that sees no GPU: set CUDA_VISIBLE_DEVICES= (empty) and repeat"
    return None


def transformer_engine_problem() -> str | None:
    """Return one line about a Transformer Engine that is installed and does not import; None if there is no problem.

    If it does not import, hide it from this process: Megatron expects an ImportError, and fails on any other.
    """
    name = "transformer_engine"
    if sys.modules.get(name, ...) is None or importlib.util.find_spec(name) is None:
        return None
    try:
        importlib.import_module(f"{name}.pytorch")
    except Exception as error:  # any: a missing library, a symbol of another torch, a driver that is too old
        for module in [each for each in sys.modules if each.partition(".")[0] == name]:
            del sys.modules[module]
        sys.modules[name] = None  # type: ignore[assignment]
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return (
            f"Transformer Engine is installed but does not import ({reason[:200]}): install the build for torch "
            f"{torch.__version__} and CUDA {torch.version.cuda}, or set model.transformer_impl=local"
        )
    return None


def bfloat16_problem(capability: tuple[int, int], name: str) -> str | None:
    """Return one line if a GPU of this compute capability has no bfloat16 arithmetic, otherwise None."""
    if capability >= (8, 0):
        return None
    major, minor = capability
    return f"{name} has compute capability {major}.{minor}; bfloat16 needs 8.0: set model.dtype=float16 or float32"


def machine_rows(device_type: str, transformer_engine: str | None) -> Iterator[Row]:
    """Return the rows of the devices and packages.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.
        transformer_engine: the result of ``transformer_engine_problem``.
    """
    yield Row("machine: packages", f"torch {torch.__version__}", f"megatron-core {_version('megatron-core')}")
    installed = _version("transformer-engine")
    if transformer_engine is not None:
        yield Row("machine: transformer engine", installed, result=Result.FAILED, note=transformer_engine)
    else:
        yield Row("machine: transformer engine", installed)
    if device_type == "cpu":
        yield compared("machine: devices", True, "CPU", f"{torch.get_num_threads()} threads")
        return
    yield Row("machine: CUDA", f"torch's {torch.version.cuda}", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    for index in range(torch.cuda.device_count()):
        yield from _device_rows(index)


def _device_rows(index: int) -> Iterator[Row]:
    name = torch.cuda.get_device_name(index)
    capability = torch.cuda.get_device_capability(index)
    free, total = torch.cuda.mem_get_info(index)
    problem = bfloat16_problem(capability, name)
    yield compared(
        f"machine: cuda:{index} {name}",
        problem is None,
        f"capability {capability[0]}.{capability[1]}",
        "8.0 (bfloat16)",
        note=problem or "",
    )
    yield compared(
        f"machine: cuda:{index} free memory",
        free > 0.5 * total,
        f"{free / 2**30:.1f} GiB",
        f"{total / 2**30:.1f} GiB",
        "50%",
        note="other processes use this GPU (nvidia-smi lists them): end them, or set CUDA_VISIBLE_DEVICES",
    )


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
