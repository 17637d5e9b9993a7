"""Linears as generation computes them: nothing for a backward pass, and on a CPU weights in the order they are read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

__all__ = ["linears_for_generation"]

WORTH_LAYING_OUT = 1 << 16  # elements; a smaller weight stays in the processor's cache however it lies


@contextlib.contextmanager
def linears_for_generation(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """What a linear does for its backward pass costs as much as a small product; on whole sequences nothing else than
    the product, and the sum over tp, is left of its forward pass. Weights do not change inside. What a user's own
    linear computes in the place of Megatron's stays as it is.
    """
    modules: list[Any] = [module for chunk in chunks for module in chunk.modules()]
    columns = [
        (linear, linear.disable_grad_reduce) for linear in modules if _multiplies_as(ColumnParallelLinear, linear)
    ]
    rows = [linear for linear in modules if _multiplies_as(RowParallelLinear, linear)]
    whole = [
        linear
        for linear in rows
        if linear.tp_group.size() == 1 and linear.skip_bias_add and _is(linear.forward, RowParallelLinear.forward)
    ]
    product = _Product()
    for linear, _ in columns:
        linear._forward_impl, linear.disable_grad_reduce = product, True
    for linear in rows:
        linear._forward_impl = product
    for linear in whole:
        linear.forward = functools.partial(_product_and_bias, product, linear)
    try:
        yield
    finally:
        for linear, reduces in columns:
            linear.disable_grad_reduce = reduces
            del linear._forward_impl
        for linear in rows:
            del linear._forward_impl
        for linear in whole:
            del linear.forward


def _multiplies_as(kind: Any, module: Any) -> bool:
    return isinstance(module, kind) and _is(module._forward_impl, kind._forward_impl)


def _is(method: Any, function: Any) -> bool:
    """Whether a bound method is this one, and not a subclass's or an instance's own."""
    return getattr(method, "__func__", None) is function


class _Product:
    """``nn.functional.linear``; a float32 parameter on a CPU is first copied into the order in which oneDNN reads it.

    The next tokens of a batch are a product with few rows, in which reading the weight counts: it takes 0.6 to 0.85 of
    the time at 64 rows, less at 8. The copies live as long as this object: one generation, each weight twice.
    """

    def __init__(self) -> None:
        self.laid_out: dict[int, Tensor] = {}

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **_for_gradients: Any) -> Tensor:
        if not _gains_by_layout(weight):
            return nn.functional.linear(input, weight, bias)
        held = self.laid_out.get(id(weight))
        if held is None:
            held = self.laid_out[id(weight)] = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        return torch.ops.mkldnn._linear_pointwise(input, held, bias, "none", [], "")


def _gains_by_layout(weight: Tensor) -> bool:
    """Whether to keep a copy: never of a tensor made for one call, whose id may be another's in the next."""
    on_cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    lasting = isinstance(weight, nn.Parameter) and weight.dtype == torch.float32
    return on_cpu and lasting and weight.numel() >= WORTH_LAYING_OUT


def _product_and_bias(product: _Product, linear: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    return product(hidden, linear.weight), linear.bias
