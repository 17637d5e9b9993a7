"""Multiply float32 matrices with oneDNN on AMD's processors, where the MKL in PyTorch takes twice as long.

MKL chooses its kernels by the vendor, and those for AMD use half the width of AVX-512. With one thread of such a
processor, a product of ``[2048, 128]`` and ``[128, 1024]`` takes 5.8 ms with MKL and 2.3 ms with oneDNN, which PyTorch
contains too. Both sum in another order, so results differ in the last bits.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MIN_PRODUCTS = 1 << 22
"""Multiplications from which on oneDNN is used: a new shape takes it 0.4 ms, as much as ten of these products gain."""

_KERNELS = "64"
"""Products of different shapes whose kernels oneDNN keeps, each in 0.7 MB; by default 1,024."""

_library: Any = None  # torch.library.Library, which has no types


def is_slow_processor(information: str | None = None) -> bool:
    """Return whether MKL is slower than oneDNN here: on a processor of AMD with AVX-512.

    Args:
        information: the text of ``/proc/cpuinfo``; None reads it.
    """
    path = Path("/proc/cpuinfo")
    if information is None:
        information = path.read_text() if path.exists() else ""
    slow = "AuthenticAMD" in information and "avx512f" in information
    return slow and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def patch_products() -> None:
    """Use oneDNN for the large float32 products of ``torch.mm``, and what is computed with it, if MKL is slow here."""
    global _library
    if _library is not None or not is_slow_processor():
        return
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _KERNELS)  # read at the first product
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"[\s\S]*Overriding a previously registered kernel")
        _library.impl("mm", _product, "CPU")


def add_product_of_transposed(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of ``left`` transposed and ``right`` to ``total``, as the gradient of a weight is computed.

    Args:
        total: ``[m, n]``.
        left: ``[k, m]``, of the dtype of ``total``.
        right: ``[k, n]``, likewise.
    """
    if _library is None or not _is_large(left.t(), right):
        total.addmm_(left.t(), right)
    elif total.size(0) > total.size(1):  # faster with the smaller matrix on the left
        total.add_(_with_onednn(right.t(), left).t())
    else:
        total.add_(_with_onednn(left.t(), right))


def _product(left: Tensor, right: Tensor) -> Tensor:
    if _is_large(left, right):
        return _with_onednn(left, right)
    result: Tensor = torch.ops.aten.mm.out(left, right, out=left.new_empty(0))
    return result


def _is_large(left: Tensor, right: Tensor) -> bool:
    if left.dtype is not torch.float32 or right.dtype is not torch.float32 or right.dim() != 2:
        return False
    return left.numel() * right.size(1) >= MIN_PRODUCTS and left.size(-1) == right.size(0)


def _with_onednn(left: Tensor, right: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")
    return result
