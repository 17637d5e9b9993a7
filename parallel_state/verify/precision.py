"""Training in float64, to tell faults from rounding: what is float32 in a program and in Megatron is float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Return a context manager in which ``torch.float32`` is float64, and so is what ``Tensor.float`` returns.

    Names that modules have bound at their import, such as ``from torch import float32``, stay float32.
    """
    from megatron.core.optimizer import OptimizerConfig

    single, double = torch.float32, torch.float64
    init = OptimizerConfig.__init__  # its defaults were read at the import
    defaults = tuple(double if default is single else default for default in init.__defaults__ or ())
    before, type_of = torch.get_default_dtype(), torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = type_of(self, *args, **kwargs)
        return name.replace("Double", "Float") if isinstance(name, str) else name

    names = mock.patch.multiple(torch, float32=double, float=double)
    methods = mock.patch.multiple(torch.Tensor, float=torch.Tensor.double, type=type_name)
    with names, methods, mock.patch.object(init, "__defaults__", defaults):
        torch.set_default_dtype(double)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
