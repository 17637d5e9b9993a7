"""Weights between processes of one node on GPUs, through CUDA memory that both have mapped (CUDA IPC).

Status: run on one H100.

For groups whose ranks share GPUs: NCCL rejects two processes of one GPU in a communicator. A sender allocates its two
buckets on its own GPU, and exports them once for each receiver with torch's reduction of CUDA tensors. The receiver
maps them on the same GPU, whose index may differ there, and copies from them to its weights: within the GPU, or to
another GPU of the node if its weights are there.

The order of reads and writes does not depend on events of CUDA: the sender synchronizes its stream before it sends that
a bucket is full, and the receiver its own before it answers that it has read it.

torch frees exported memory when all receivers have dropped it, and a process that was killed never does. So the sender
drops the memory on behalf of its receivers when the transfer is closed: nothing reads it from then on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from workers.gpu_ids import gpu_id, visible_gpus
from workers.weights.transfer.mapped import Mapped
from workers.weights.transfer.plan import RankWeights
from workers.weights.transfer.transport import Deadline, PeerLost


class CudaIpc(Mapped):
    """A sender exports its buckets once for each receiver, which maps them on the same GPU."""

    _exports: Sequence[dict[str, Any]] = ()
    """The arguments that each receiver maps the buckets with."""

    @staticmethod
    def why_not(sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
        """Return why not: CPUs, several nodes, one process, or GPUs that a receiver cannot use."""
        everyone = (*sources, *targets)
        if any(each.device == "cpu" for each in everyone):
            return "there are weights on CPUs; expected GPUs"
        nodes = {each.node for each in everyone}
        if len(nodes) > 1:
            return f"the ranks are on {len(nodes)} nodes; expected one"
        if len({each.pid for each in everyone}) < len(everyone):
            return "ranks of the groups share a process"
        for rank, target in enumerate(targets):
            for gpu in sorted({source.device for source in sources} - set(target.visible)):
                return (
                    f"rank {rank} that receives cannot use GPU {gpu}, which weights come from: let it see that GPU "
                    "(a pool without isolate_gpus)"
                )
        return ""

    def share(self, deadline: Deadline) -> Tensor:
        """Export the buckets to every receiver."""
        memory = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self.device)
        for peer in self.schedule.peers:
            rebuild, arguments = reductions.reduce_tensor(memory)  # each counts as one receiver
            self._exports = [*self._exports, _by_name(rebuild, arguments)]
            self.mailbox.send(peer, (gpu_id(self.device), rebuild, arguments))
        return memory

    def map_memory(self, peer: int, message: Any) -> Tensor:
        """Map the buckets that a sender has exported."""
        gpu, rebuild, arguments = message
        try:
            memory: Tensor = rebuild(**_by_name(rebuild, arguments) | {"storage_device": visible_gpus().index(gpu)})
        except RuntimeError as error:
            raise PeerLost.of(peer, f"its memory on GPU {gpu} cannot be mapped: {error}") from error
        return memory

    def close(self) -> None:
        """Release what was exported, and drop the memory."""
        for export in self._exports:
            torch.UntypedStorage._release_ipc_counter(
                export["ref_counter_handle"], export["ref_counter_offset"], device="cuda"
            )
        self._exports = ()
        super().close()
        if self.schedule.sends:
            torch.cuda.ipc_collect()


def _by_name(rebuild: Callable[..., Tensor], arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments of torch's function that maps an exported tensor, by name."""
    return dict(inspect.signature(rebuild).bind(*arguments).arguments)
