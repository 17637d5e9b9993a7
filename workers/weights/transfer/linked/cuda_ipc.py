"""Weights between processes of one node on GPUs, through CUDA memory that both have mapped (CUDA IPC).

Status: tested on a fake CUDA device only.

For groups whose ranks share GPUs: NCCL rejects two processes of one GPU in a communicator. A sender allocates its two
buckets on its own GPU, and exports them once for each receiver with torch's reduction of CUDA tensors. The receiver
maps them on the same GPU, whose index may differ there, and copies from them to its weights: within the GPU, or to
another GPU of the node if its weights are there.

The order of reads and writes does not depend on events of CUDA: the sender synchronizes its stream before it sends that
a bucket is full, and the receiver its own before it answers that it has read it.

torch frees exported memory when all receivers have dropped it, and a process that was killed never does. So the sender
drops the memory on behalf of its receivers when the transfer is closed: nothing reads it from then on.

This has not run on a GPU. Under the fake CUDA device of the tests, the whole protocol runs between processes, with
memory of the host in place of torch's export and import of CUDA memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from workers.gpu_ids import gpu_id, visible_gpus
from workers.weights.transfer.errors import PeerLost
from workers.weights.transfer.linked.links import Link
from workers.weights.transfer.linked.mapped import MappedReceiver, MappedSender
from workers.weights.transfer.plan import RankWeights
from workers.weights.transfer.transport import Deadline, RankTraffic, Transport

__all__ = ["TRANSPORT"]


class _Sender(MappedSender):
    def __init__(self, traffic: RankTraffic) -> None:
        super().__init__(traffic)
        self._exports: list[dict[str, Any]] = []
        """The arguments that each receiver maps the buckets with."""

    def share(self, links: Mapping[int, Link], deadline: Deadline) -> Tensor:
        device = self.traffic.device
        memory = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=device)
        for link in links.values():
            rebuild, arguments = reductions.reduce_tensor(memory)  # each counts as one receiver
            self._exports.append(_by_name(rebuild, arguments))
            link.send((gpu_id(device), rebuild, arguments))
        return memory

    def close(self) -> None:
        for export in self._exports:
            torch.UntypedStorage._release_ipc_counter(
                export["ref_counter_handle"], export["ref_counter_offset"], device="cuda"
            )
        self._exports = []
        super().close()
        torch.cuda.ipc_collect()


class _Receiver(MappedReceiver):
    def map_memory(self, link: Link, deadline: Deadline) -> Tensor:
        gpu, rebuild, arguments = link.receive(deadline)
        here = _by_name(rebuild, arguments) | {"storage_device": visible_gpus().index(gpu)}
        try:
            memory: Tensor = rebuild(**here)
        except RuntimeError as error:
            cause = f"its memory on GPU {gpu} cannot be mapped: {error}"
            raise PeerLost(f"rank {link.peer} of the transfer: {cause}", peer=link.peer, cause=cause) from error
        return memory


def _by_name(rebuild: Callable[..., Tensor], arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments of torch's function that maps an exported tensor, by name."""
    return dict(inspect.signature(rebuild).bind(*arguments).arguments)


def _why_not(sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
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


TRANSPORT = Transport(_Sender, _Receiver, _why_not)
