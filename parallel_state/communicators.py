"""The communicators of process groups, whose buffers can leave the GPU while no collective runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallel_state.errors import ParallelStateError


class Communicators:
    """The NCCL communicators of process groups in this process.

    NCCL keeps buffers on the GPU for every communicator that was used: the groups of one layout can take gigabytes.
    ``sleep`` frees them and ``wake_up`` allocates them again; the groups stay the same objects, so that models,
    optimizers and gradient buffers that refer to them are not affected. A collective in between fails. Both are called
    on all ranks of the groups, with the groups in the same order. Groups of other backends are left alone.

    Args:
        groups: the process groups.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = [group for group in groups if dist.get_backend(group) == "nccl"]

    def sleep(self) -> int:
        """Free the buffers, and return by how many bytes the free memory of the GPU has grown.

        Raises:
            ParallelStateError: the installed NCCL cannot free them; it needs 2.29.7.
        """
        if not self._groups:
            return 0
        torch.cuda.synchronize()
        before, _ = torch.cuda.mem_get_info()
        for group in self._groups:
            self._call(group, "suspend")
        return max(0, torch.cuda.mem_get_info()[0] - before)

    def wake_up(self) -> None:
        """Allocate the buffers again."""
        for group in self._groups:
            self._call(group, "resume")

    def _call(self, group: dist.ProcessGroup, method: str) -> None:
        backend: Any = group._get_backend(torch.device("cuda"))
        try:
            getattr(backend, method)()
        except (AttributeError, RuntimeError) as error:
            version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
            raise ParallelStateError(
                f"cannot {method} the communicators of NCCL: {error}. It needs NCCL 2.29.7 or later, and torch 2.13; "
                f"here are NCCL {version} and torch {torch.__version__}: leave communicators on the GPU "
                "(trainer.offload_communicators=false)",
                nccl=version,
            ) from error
