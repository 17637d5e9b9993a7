"""Sums over the bits of a tensor's elements, weighted by keys of their indices: what fingerprints of weights add up.

This file imports torch alone. Engines import it as a top-level module, without this project.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# 64-bit constants of splitmix64, as signed integers.
_INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The bits that are 0 in numbers that count as 0: in 8-bit exponents numbers below 1.2e-38 too, which kernels flush.
_NONZERO_BITS = {torch.bfloat16: 0x7F80, torch.float32: 0x7F800000, torch.float16: 0x7FFF}


class IndexKeys:
    """Odd keys of the indices of dims: numbers of splitmix64, seeded with the dim, of a power of two of indices."""

    def __init__(self) -> None:
        self._all: dict[tuple[int, int, torch.device], Tensor] = {}

    def get(self, dim: int, first: int, count: int, device: torch.device) -> Tensor:
        """Return the keys of ``count`` indices of a dim from ``first`` on, int64 ``[count]``."""
        size = 1 << (first + count).bit_length()
        keys = self._all.get((dim, size, device))
        if keys is None:
            keys = self._all[dim, size, device] = _keys(dim, size, device)
        return keys[first : first + count]


def sum_of_bits(tensor: Tensor, first: Sequence[int], dtype: torch.dtype, of_dims: IndexKeys) -> Tensor:
    """Return the sum of all bits times keys, modulo 2**64: int64 without dims, on the tensor's device.

    A bounded number of elements is hashed at a time.

    Args:
        tensor: a part of the whole tensor, with at least one dim.
        first: the index in the whole tensor of its first element, by dim.
        dtype: the values are converted to it; its bits are hashed.
        of_dims: the keys of dims, computed once for all tensors.
    """
    keys = [
        of_dims.get(dim, index, size, tensor.device)
        for dim, (index, size) in enumerate(zip(first, tensor.shape, strict=True))
    ]
    most = 1 << 24 if tensor.is_cuda else 1 << 17  # few launches on a GPU; the cache of a CPU
    rows = max(most // max(tensor[:1].numel(), 1), 1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for top in range(0, len(tensor), rows):
        block = _bits(tensor[top : top + rows].to(dtype))
        sums = block.to(torch.int64) if block.dim() == 1 else block
        if dtype.itemsize == 8:  # keys differ by even numbers, so the highest bits alone would cancel
            sums = sums.bitwise_xor(sums >> 32)
        for of_dim in reversed(keys[1:]):
            sums = (sums * of_dim).sum(-1)
        total += (sums * keys[0][top : top + rows]).sum()
    return total


def _bits(values: Tensor) -> Tensor:
    """The bits as integers; 0 for all numbers that kernels may compute with as 0."""
    bits = values.view(_INTEGERS[values.dtype.itemsize])
    nonzero = _NONZERO_BITS.get(values.dtype)
    return bits if nonzero is None else bits.masked_fill(bits & nonzero == 0, 0)


def _keys(dim: int, count: int, device: torch.device) -> Tensor:
    mixed = torch.arange(1, count + 1, device=device).mul_(_INCREMENT).add_(dim + 1)
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        mixed.bitwise_xor_(_shifted(mixed, shift)).mul_(factor)
    return mixed.bitwise_xor_(_shifted(mixed, 31)).bitwise_or_(1)


def _shifted(values: Tensor, by: int) -> Tensor:
    """Shift to the right and fill with zeros; ``>>`` fills with the sign."""
    return (values >> by).bitwise_and_((1 << (64 - by)) - 1)
