"""Patch the collectives of ``torch.distributed`` that gloo does not support, or for which it returns wrong results.

NCCL supports lists of unequal shapes and sums of booleans, on which Megatron and its bridges rely; gloo does not. NCCL
rejects non-contiguous tensors with an error; gloo returns wrong values for some, without an error (torch 2.13). Each
patched collective calls gloo's unless its arguments are such a case. Then it is made of collectives that gloo computes
correctly, and is complete when it returns, with ``async_op`` too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_Collective = Callable[..., Any]


class _CompletedWork:
    """The handle of a collective that is already complete."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def patch_collectives() -> None:
    """Patch ``torch.distributed``, and the module that defines its collectives."""
    for name, patch in _PATCHES.items():
        patched = patch(getattr(dist, name))
        setattr(dist, name, patched)
        setattr(distributed_c10d, name, patched)


def _in_place(collective: _Collective) -> _Collective:
    """Patch a collective that writes into ``tensor``: gloo treats every tensor as contiguous."""

    @functools.wraps(collective)
    def patched(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if tensor.is_contiguous():
            return collective(tensor, *args, async_op=async_op, **kwargs)
        contiguous = tensor.contiguous()
        collective(contiguous, *args, **kwargs)
        tensor.copy_(contiguous)
        return _CompletedWork() if async_op else None

    return patched


def _all_reduce(collective: _Collective) -> _Collective:
    """Sum booleans as "any", as NCCL does; gloo adds them as bytes, and the sum may be no valid boolean."""
    contiguous = _in_place(collective)

    @functools.wraps(collective)
    def patched(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if tensor.dtype != torch.bool:
            return contiguous(tensor, op, group=group, async_op=async_op)
        as_bytes = tensor.to(torch.uint8)
        contiguous(as_bytes, dist.ReduceOp.MAX if op == dist.ReduceOp.SUM else op, group=group)
        tensor.copy_(as_bytes)
        return _CompletedWork() if async_op else None

    return patched


def _scatter(collective: _Collective) -> _Collective:
    @functools.wraps(collective)
    def patched(tensor: torch.Tensor, scatter_list: list[torch.Tensor] | None = None, *args: Any, **kwargs: Any) -> Any:
        parts = [part.contiguous() for part in scatter_list] if scatter_list else scatter_list
        return collective(tensor, parts, *args, **kwargs)

    return patched


def _all_gather(collective: _Collective) -> _Collective:
    @functools.wraps(collective)
    def patched(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if _equal_shapes(tensor_list):
            return collective(tensor_list, tensor, group=group, async_op=async_op)
        for rank, part in enumerate(tensor_list):
            if rank == dist.get_rank(group):
                part.copy_(tensor)
            dist.broadcast(part, group=group, group_src=rank)
        return _CompletedWork() if async_op else None

    return patched


def _equal_shapes(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) <= 1


_PATCHES: dict[str, Callable[[_Collective], _Collective]] = {
    "broadcast": _in_place,
    "all_reduce": _all_reduce,
    "scatter": _scatter,
    "all_gather": _all_gather,
}
