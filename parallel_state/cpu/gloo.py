"""Patch the collectives of ``torch.distributed`` so that gloo takes what NCCL takes, and rejects what NCCL rejects.

NCCL supports lists of unequal shapes, sums of booleans and sums of scaled values (``PREMUL_SUM``), on which Megatron
and its bridges rely; gloo does not. They are made of collectives that gloo computes correctly; the first two are
complete when they return, with ``async_op`` too. Megatron may free an output of a pipeline stage while it is sent
(``deallocate_pipeline_outputs``); gloo sends it later from that memory, so a send keeps it. NCCL rejects tensors that
are not contiguous, and sends their memory in another order; gloo returns wrong values for some, without an error
(torch 2.13). They are rejected here too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from parallel_state.errors import ParallelStateError

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
        if hasattr(dist, name):
            patched = patch(getattr(dist, name))
            setattr(dist, name, patched)
            setattr(distributed_c10d, name, patched)


def _contiguous_only(collective: _Collective) -> _Collective:
    """Reject tensors that are not contiguous. In lists, NCCL copies them first."""

    @functools.wraps(collective)
    def patched(*args: Any, **kwargs: Any) -> Any:
        _check_contiguous(collective.__name__, [*args, *kwargs.values()])
        return collective(*args, **kwargs)

    return patched


def _check_contiguous(name: str, arguments: Iterable[Any]) -> None:
    for tensor in arguments:
        if isinstance(tensor, torch.Tensor) and not tensor.is_contiguous():
            raise ParallelStateError(
                f"{name} of a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}; expected a "
                "contiguous tensor, as NCCL does: pass tensor.contiguous()",
                shape=tuple(tensor.shape),
                strides=tensor.stride(),
            )


def _all_reduce(collective: _Collective) -> _Collective:
    """Sum booleans as "any", as NCCL does; gloo adds them as bytes, and the sum may be no valid boolean."""
    contiguous = _contiguous_only(collective)

    @functools.wraps(collective)
    def patched(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op == dist.ReduceOp.PREMUL_SUM:
            tensor.mul_(_factor(op))
            op = dist.ReduceOp.SUM
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.bool:  # torch rejects what is no tensor
            return contiguous(tensor, op, group=group, async_op=async_op)
        as_bytes = tensor.to(torch.uint8)
        contiguous(as_bytes, dist.ReduceOp.MAX if op == dist.ReduceOp.SUM else op, group=group)
        tensor.copy_(as_bytes)
        return _CompletedWork() if async_op else None

    return patched


def _reduce_scatter(collective: _Collective) -> _Collective:
    """Scale the input before a sum, as NCCL does for ``PREMUL_SUM``."""
    contiguous = _contiguous_only(collective)

    @functools.wraps(collective)
    def patched(
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if op == dist.ReduceOp.PREMUL_SUM:
            input, op = input * _factor(op), dist.ReduceOp.SUM
        return contiguous(output, input, op, group=group, async_op=async_op)

    return patched


def _factor(op: Any) -> Any:
    """Return what ``_make_nccl_premul_sum`` got: a number, or a tensor of one element."""
    return op.__getstate__()[1]


def _isend(collective: _Collective) -> _Collective:
    """Send a tensor that shares the memory: a caller who sets the data of its own would free what is still sent."""
    contiguous = _contiguous_only(collective)

    @functools.wraps(collective)
    def patched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return contiguous(tensor.detach(), *args, **kwargs)

    return patched


def _scatter(collective: _Collective) -> _Collective:
    """Reject parts that are not contiguous too: NCCL sends their memory as it is."""

    @functools.wraps(collective)
    def patched(tensor: torch.Tensor, scatter_list: list[torch.Tensor] | None = None, *args: Any, **kwargs: Any) -> Any:
        _check_contiguous("scatter", [tensor, *(scatter_list or [])])
        return collective(tensor, scatter_list, *args, **kwargs)

    return patched


def _all_gather(collective: _Collective) -> _Collective:
    @functools.wraps(collective)
    def patched(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        _check_contiguous("all_gather", [tensor])
        if len({part.shape for part in tensor_list}) <= 1:
            return collective(tensor_list, tensor, group=group, async_op=async_op)
        for rank, part in enumerate(tensor_list):
            if rank == dist.get_rank(group):
                part.copy_(tensor)
            dist.broadcast(part, group=group, group_src=rank)
        return _CompletedWork() if async_op else None

    return patched


_PATCHES: dict[str, Callable[[_Collective], _Collective]] = {
    "broadcast": _contiguous_only,
    "reduce": _contiguous_only,
    "all_gather_into_tensor": _contiguous_only,
    "_all_gather_base": _contiguous_only,
    "reduce_scatter_tensor": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter,
    "all_gather_single": _contiguous_only,  # these two since torch 2.13
    "reduce_scatter_single": _reduce_scatter,
    "all_to_all_single": _contiguous_only,
    "all_reduce": _all_reduce,
    "isend": _isend,
    "irecv": _contiguous_only,
    "scatter": _scatter,
    "all_gather": _all_gather,
}
