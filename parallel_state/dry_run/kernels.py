"""What a GPU computes with one kernel, and functions of torch that do not know the ``meta`` device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.amp import autocast_mode
from torch.utils._python_dispatch import _disable_current_modes

from parallel_state.dry_run.counting import counts_transformer_engine, running_mode
from parallel_state.dry_run.values import BRANCH, note_read, value_of

_META = torch.device("meta")
_functional = torch.nn.functional


def _tensor(function: Any, data: Any, *args: Any, device: Any = None, **options: Any) -> torch.Tensor:
    """Keep the numbers, which torch forgets on ``meta``; tensors of a list are stacked instead of read."""
    if _has_meta_scalars(data):
        return _stacked(data)
    if device is None or torch.device(device).type != "meta":
        return function(data, *args, **options, **({} if device is None else {"device": device}))  # type: ignore[no-any-return]
    requires_grad = options.pop("requires_grad", False)
    made: torch.Tensor = function(data, *args, **options).to(_META)
    return made.requires_grad_(requires_grad)


def _has_meta_scalars(data: Any) -> bool:
    if isinstance(data, (list, tuple)):
        return any(map(_has_meta_scalars, data))
    return isinstance(data, torch.Tensor) and data.is_meta and data.dim() == 0


def _stacked(data: Any) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack(list(map(_stacked, data)))
    return data if isinstance(data, torch.Tensor) else torch.tensor(data, device=_META)


def _on_host(function: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return function(tensor.detach().to("cpu") if tensor.is_meta else tensor, *args, **kwargs)


def _as_bool(function: Any, tensor: torch.Tensor) -> bool:
    mode = running_mode()
    if mode is None or not tensor.is_meta or tensor.numel() != 1 or value_of(tensor) is not None:
        return bool(function(tensor))
    note_read(mode.read, BRANCH)
    return tensor.dtype != torch.bool


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], run_backward: Callable[..., Any] | None, *inputs: Any) -> Any:
        with _disable_current_modes():
            ctx.like = [
                None if tensor is None or hasattr(tensor, "main_grad") else torch.empty_like(tensor)
                for tensor in inputs
            ]
        ctx.run_backward = run_backward
        outputs, saved = run(*inputs)
        ctx.save_for_backward(*saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = ctx.saved_tensors
        temporaries = None if ctx.run_backward is None else ctx.run_backward(*saved)
        likes = [like if needed else None for like, needed in zip(ctx.like, ctx.needs_input_grad[2:], strict=True)]
        results = [None if like is None else torch.empty_like(like) for like in likes]
        del temporaries, saved
        return None, None, *results


def one_kernel(run: Callable[..., Any], *inputs: Any, run_backward: Callable[..., Any] | None = None) -> Any:
    """Compute an operation that is one kernel in each pass.

    Args:
        run: of the inputs, returns the output, or several, and the tensors that are saved for backward.
        inputs: tensors or None. Gradients are allocated in the backward pass, except those of weights with a
            ``main_grad``, which the kernel adds to it.
        run_backward: of the saved tensors, returns what exists during the backward pass only.
    """
    return _Kernel.apply(run, run_backward, *inputs)  # type: ignore[no-untyped-call]


def compiled(function: Callable[..., Any], *args: Any) -> Any:
    """Compute a function without gradients as one kernel, which allocates the results only."""
    with _disable_current_modes():
        results = function(*args)
    mode = running_mode()
    if mode is not None:
        mode.count(results)
    return results


def count_flops(flops: float) -> None:
    """Count FLOPs of the running rank."""
    mode = running_mode()
    if mode is not None:
        mode.flops += int(flops)


def _rms_norm(function: Any, input: torch.Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    """Save the input and one number for each row."""

    def run(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        inverse = torch.empty(*hidden.shape[:-1], 1, dtype=torch.float32, device=_META)
        saved = hidden.contiguous() if counts_transformer_engine() else hidden
        return torch.empty_like(hidden), (saved, weight, inverse)

    if input.is_meta and weight is not None:
        return one_kernel(run, input, weight)
    return function(input, normalized_shape, weight, eps)


def _attend(function: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Save queries, keys, values, the output, and one number for each query and head, as flash attention does."""
    if not query.is_meta:
        return function(query, key, value, attn_mask, *args, **kwargs)
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.empty(attn_mask.shape, dtype=query.dtype, device=_META)
    batch, heads, length, width = query.shape
    flops = 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None) -> Any:
        if width == value.shape[-1]:
            output = torch.empty_like(query)  # flash attention and cuDNN keep the order of dims in memory
        else:
            output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        sums = torch.empty(batch, heads, length, dtype=torch.float32, device=_META)
        count_flops(flops)
        return output, (query, key, value, output, sums, bias)

    return one_kernel(run, query, key, value, bias, run_backward=lambda *saved: count_flops(2.5 * flops))


_REPLACEMENTS: list[tuple[Any, str, Callable[..., Any]]] = [
    (torch, "tensor", _tensor),
    (torch, "as_tensor", _tensor),
    (torch.Tensor, "tolist", _on_host),
    (torch.Tensor, "numpy", _on_host),
    (torch.Tensor, "__bool__", _as_bool),
    (_functional, "rms_norm", _rms_norm),
    (_functional, "scaled_dot_product_attention", _attend),
]
"""Owner, name, and what is called with the function of torch first; for tensors of the host, it calls that function."""


def _replaced(function: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(function, *args, **kwargs)

    return call


class _Autocast(torch.autocast):
    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "meta" else device_type, *args, **kwargs)


@contextlib.contextmanager
def torch_on_meta() -> Iterator[None]:
    """Return a context manager in which ``meta`` tensors save what a GPU saves, and values go to the host and back."""
    resize = torch.UntypedStorage.resize_

    def resize_and_count(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        counted = getattr(storage, "counted", None)
        if counted is not None:
            counted.resize(size)
        return result

    def of_cpu(name: str) -> Any:
        function = getattr(torch, name)
        return lambda *args: function(*("cpu" if argument == "meta" else argument for argument in args))

    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            (torch.UntypedStorage, "resize_", resize_and_count),
            (torch, "get_autocast_dtype", of_cpu("get_autocast_dtype")),
            (torch, "is_autocast_enabled", of_cpu("is_autocast_enabled")),
            (autocast_mode, "autocast", _Autocast),
            *((owner, name, _replaced(getattr(owner, name), with_meta)) for owner, name, with_meta in _REPLACEMENTS),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield
