"""The collectives that gloo lacks or gets wrong without a word, mended in ``torch.distributed``.

NCCL takes lists of unequal shapes, non-contiguous tensors and booleans; Megatron and its bridges rely on it. Each
collective here goes to gloo unchanged unless it is of a kind that gloo gets wrong (torch 2.13): then it is made of
collectives that gloo gets right, and is complete when it returns, ``async_op`` or not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_Collective = Callable[..., Any]


class _Complete:
    """The handle of a collective that is already done."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def redirect() -> None:
    """Put the mended collectives in place, in ``torch.distributed`` and in the module that defines them."""
    for name, mend in _MENDED.items():
        mended = mend(getattr(dist, name))
        setattr(dist, name, mended)
        setattr(distributed_c10d, name, mended)


def _in_place(collective: _Collective) -> _Collective:
    """For ``collective(tensor, ...)``, which writes into ``tensor``: gloo takes its storage for contiguous."""

    @functools.wraps(collective)
    def mended(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if tensor.is_contiguous():
            return collective(tensor, *args, async_op=async_op, **kwargs)
        dense = tensor.contiguous()
        collective(dense, *args, **kwargs)
        tensor.copy_(dense)
        return _Complete() if async_op else None

    return mended


def _all_reduce(collective: _Collective) -> _Collective:
    """A sum of booleans is "any", as it is for NCCL; gloo counts the trues in a byte that is no boolean then."""
    dense = _in_place(collective)

    @functools.wraps(collective)
    def mended(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if tensor.dtype != torch.bool:
            return dense(tensor, op, group=group, async_op=async_op)
        counted = tensor.to(torch.uint8)
        dense(counted, dist.ReduceOp.MAX if op == dist.ReduceOp.SUM else op, group=group)
        tensor.copy_(counted)
        return _Complete() if async_op else None

    return mended


def _scatter(collective: _Collective) -> _Collective:
    @functools.wraps(collective)
    def mended(tensor: torch.Tensor, scatter_list: list[torch.Tensor] | None = None, *args: Any, **kwargs: Any) -> Any:
        dense = [part.contiguous() for part in scatter_list] if scatter_list else scatter_list
        return collective(tensor, dense, *args, **kwargs)

    return mended


def _all_gather(collective: _Collective) -> _Collective:
    @functools.wraps(collective)
    def mended(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if _equal_shapes(tensor_list):
            return collective(tensor_list, tensor, group=group, async_op=async_op)
        for rank, part in enumerate(tensor_list):
            if rank == dist.get_rank(group):
                part.copy_(tensor)
            dist.broadcast(part, group=group, group_src=rank)
        return _Complete() if async_op else None

    return mended


def _equal_shapes(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) <= 1


_MENDED: dict[str, Callable[[_Collective], _Collective]] = {
    "broadcast": _in_place,
    "all_reduce": _all_reduce,
    "scatter": _scatter,
    "all_gather": _all_gather,
}
