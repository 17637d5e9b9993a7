"""Marks of parameters that Megatron reads: which are divided over tensor-parallel ranks, and which are reduced how."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from parallel_state.verify.layouts import Variant
from parallel_state.verify.weights import NamedTensor


def wrong_marks(named: Sequence[NamedTensor], variant: Variant) -> Iterator[tuple[str, str]]:
    """Yield the names of parameters whose mark ``tensor_model_parallel`` is wrong, and what follows from it."""
    layout = variant.layout
    for parameter in named:
        is_expert = not getattr(parameter.tensor, "allreduce", True)
        axis = "etp" if is_expert and layout.etp is not None else "tp"
        size = layout.sizes[axis]
        if size == 1 or not isinstance(parameter.tensor, torch.nn.Parameter):
            continue
        divided = max(parameter.fragments, default=1) > 1
        marked = bool(getattr(parameter.tensor, "tensor_model_parallel", False))
        if divided and not marked:
            yield parameter.name, f"divided over {axis} and not marked tensor_model_parallel: the norm leaves parts out"
        if marked and not divided:
            yield (
                parameter.name,
                f"whole on every {axis} rank and marked tensor_model_parallel: the norm counts it {size} times",
            )


def missing_mark(named: NamedTensor, variant: Variant) -> str:
    """Return which mark of a parameter is missing, if the sum of its gradients over tp is; else nothing."""
    if variant.sequence_parallel and not getattr(named.tensor, "sequence_parallel", False):
        return "; it is not marked sequence_parallel"
    return ""
