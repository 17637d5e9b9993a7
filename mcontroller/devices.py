"""The device that a rank computes on."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mcontroller.errors import ResourceError

if TYPE_CHECKING:
    import torch

DRIVER = Path("/proc/driver/nvidia/version")


def device_of_rank(local_rank: int, local_world_size: int) -> torch.device:
    """Return the GPU of a rank among the visible ones, or what stands for it if torch can use none, such as the CPU.

    A cluster may count GPUs that torch cannot use. Then a rank of a GPU pool computes on the CPU too.

    Args:
        local_rank: the rank's index among the ranks of its group on its node; also the index of its GPU.
        local_world_size: number of ranks of its group on its node.

    Raises:
        ResourceError: there are more ranks than GPUs. Two ranks would share one, which NCCL rejects.
    """
    import torch

    from parallel_state.cpu.device import current

    if not torch.cuda.is_available():
        return current.torch
    needed, visible = max(local_world_size, local_rank + 1), torch.cuda.device_count()
    if needed > visible:
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ResourceError(
            f"the group has {needed} ranks on this node and needs a GPU for each, but the process of local rank "
            f"{local_rank} can see {visible} (CUDA_VISIBLE_DEVICES is {'not set' if listed is None else repr(listed)}):"
            f" let every process see {needed} GPUs, put at most {visible} ranks on a node, or use a pool with "
            "use_gpu=False",
            local_rank=local_rank,
            local_world_size=local_world_size,
            visible=visible,
        )
    return torch.device("cuda", local_rank)


def compute_capability() -> tuple[int, int] | None:
    """Return the least compute capability of the GPUs of this machine; None without a driver.

    It asks NVML, because torch would initialize CUDA, which reads its environment variables then.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    count, major, minor, device = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    capabilities = []
    for index in range(count.value):
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
        if not (failed or nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))):
            capabilities.append((major.value, minor.value))
    nvml.nvmlShutdown()
    return min(capabilities, default=None)


def check_torch_without_gpu() -> None:
    """Raise if a rank of a GPU pool would compute on the CPU although its node has a driver for GPUs.

    A cluster may count GPUs that do not exist, as in tests: without a driver this logs a warning.

    Raises:
        ResourceError: torch is built without CUDA, the driver is older than torch's CUDA, or no GPU has the names in
            CUDA_VISIBLE_DEVICES.
    """
    if DRIVER.exists():
        raise torch_without_gpu(", or use a pool with use_gpu=False")
    logging.getLogger(__name__).warning(
        "this rank of a GPU pool computes on the CPU: Ray assigned it CUDA_VISIBLE_DEVICES=%s, but the node has no "
        "NVIDIA driver (%s does not exist)",
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        DRIVER,
    )


def torch_without_gpu(otherwise: str = "") -> ResourceError:
    """Return the error for a node whose GPUs torch cannot use, with the reason that torch gives.

    Args:
        otherwise: what can be done instead of the installation of another torch.
    """
    import torch

    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    driver = "missing"
    if DRIVER.exists():
        driver = DRIVER.read_text().splitlines()[0].removeprefix("NVRM version:").strip()
    reason = "torch.cuda.is_available() is False"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        reason = str(error).splitlines()[0].split(". ")[0].rstrip(".")
    return ResourceError(
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) can use no GPU of this node, whose driver is {driver} "
        f"and CUDA_VISIBLE_DEVICES={listed}: {reason}. Install a torch for this driver{otherwise}",
        torch=torch.__version__,
        cuda=torch.version.cuda,
        driver=driver,
        visible=listed,
    )
