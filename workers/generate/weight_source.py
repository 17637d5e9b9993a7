"""The current weights in the shape that vLLM's transfer engines read: ``WeightSource`` of vLLM 0.32.

It has the methods of vLLM's class, and vLLM is not imported. ``make test-vllm`` sends it with the two sides of vLLM's
transfer engine nccl, over a pipe in place of NCCL, and checks what sharded_rdt requires. The engines themselves need
GPUs, and were not tried. The engine nccl_m2n needs a source that describes shards of tensors, which this is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from workers.generate.rollout_protocol import PolicyWeights

__all__ = ["PolicyWeightSource", "TensorMetadata"]


class TensorMetadata(NamedTuple):
    """The facts about one tensor that an engine allocates memory for.

    Attributes:
        name: its Hugging Face name.
        shape: of the whole tensor.
        dtype: of its elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class PolicyWeightSource:
    """The policy's current weights as whole tensors with their Hugging Face names.

    Every rank has an object, and all of its methods are collectives over the ranks of the policy.

    Args:
        weights: of the policy.
        dtype: converts the tensors; None keeps their dtype.
    """

    def __init__(self, weights: PolicyWeights, dtype: torch.dtype | None = None) -> None:
        self._weights = weights
        self._dtype = dtype
        self._metadata: list[TensorMetadata] = []

    def metadata(self) -> list[TensorMetadata]:
        """Return the name, shape and dtype of every tensor, in the order of the iteration; computed once."""
        if not self._metadata:
            self._metadata = [TensorMetadata(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self]
        return self._metadata

    def held_names(self) -> list[str]:
        """Return the names of the tensors that this rank yields: all of them, since they are gathered as they come."""
        return [each.name for each in self.metadata()]

    def groups(self) -> list[list[str]]:
        """Return the names by layer, in the order of the iteration; those before and after them are groups too."""
        return [list(names) for _, names in itertools.groupby(self.held_names(), _layer)]

    def iter_groups(self) -> Iterator[tuple[list[str], list[Tensor]]]:
        """Yield the names and tensors of one group after another; a rank has all tensors of a group at a time."""
        for _, pairs in itertools.groupby(self, lambda pair: _layer(pair[0])):
            names, tensors = zip(*pairs, strict=True)
            yield list(names), list(tensors)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            yield name, tensor if self._dtype is None else tensor.to(self._dtype)


def _layer(name: str) -> str:
    """The name up to its first number, which is that of the layer; the same for all names without one."""
    parts = name.split(".")
    return ".".join(parts[: next((index + 1 for index, part in enumerate(parts) if part.isdigit()), 0)])
