"""What a GPU computes with one kernel, and functions of torch that do not know the ``meta`` device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.amp import autocast_mode

from parallel_state.dry_run.counting import running_mode

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


class _RmsNorm(torch.autograd.Function):
    """Saves its input and one number for each row."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        inverse = torch.empty(*hidden.shape[:-1], 1, dtype=torch.float32, device=_META)
        ctx.save_for_backward(hidden, weight, inverse)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden, weight, _ = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weight)


def _rms_norm(function: Any, input: torch.Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    if input.is_meta and weight is not None:
        return _RmsNorm.apply(input, weight)  # type: ignore[no-untyped-call]
    return function(input, normalized_shape, weight, eps)


class _Attention(torch.autograd.Function):
    """Saves queries, keys, values, its output, and one number for each query and head, as flash attention does."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, bias: Any) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        shape = batch, length, heads, value.shape[-1]
        output = torch.empty(shape, dtype=query.dtype, device=_META).transpose(1, 2)
        sums = torch.empty(batch, heads, length, dtype=torch.float32, device=_META)
        ctx.save_for_backward(query, key, value, output, sums, bias)
        _count_flops(query, key, value, 1.0)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        _count_flops(query, key, value, 2.5)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _count_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, factor: float) -> None:
    mode = running_mode()
    if mode is not None:
        batch, heads, length, width = query.shape
        mode.flops += int(factor * 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1]))


def _attend(function: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not query.is_meta:
        return function(query, key, value, attn_mask, *args, **kwargs)
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.empty(attn_mask.shape, dtype=query.dtype, device=_META)
    return _Attention.apply(query, key, value, bias)  # type: ignore[no-untyped-call]


_REPLACEMENTS: list[tuple[Any, str, Callable[..., Any]]] = [
    (torch, "tensor", _tensor),
    (torch, "as_tensor", _tensor),
    (torch.Tensor, "tolist", _on_host),
    (torch.Tensor, "numpy", _on_host),
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
