"""The current weights in the shape that vLLM's transfer engines read: ``WeightSource`` of vLLM 0.32.

It is duck typed: vLLM is not imported. It was not tried with vLLM's engines for GPUs (nccl, ipc, sharded_rdt).
"""

from __future__ import annotations

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

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            yield name, tensor if self._dtype is None else tensor.to(self._dtype)
