"""Weights and buffers of a rank's part of a model under the names and positions that they have in the whole model.

Names and positions are those of Megatron's ``sharded_state_dict``, which distributed checkpoints use too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallel_state.verify.program import VerifyError

ModelTensors = dict[str, torch.Tensor]
"""Name -> a tensor of the whole model."""


@dataclass(frozen=True)
class NamedTensor:
    """A parameter or a buffer of this rank.

    Attributes:
        tensor: the parameter or buffer itself.
        sharded: Megatron's ShardedTensor, or its factory of several.
    """

    tensor: torch.Tensor
    sharded: Any

    def pieces(self, values: torch.Tensor) -> Iterator[Any]:
        """Yield the ShardedTensors of ``values``, which has the shape of the tensor, as views."""
        if hasattr(self.sharded, "build_fn"):
            built = self.sharded.build_fn(self.sharded.key, values, self.sharded.replica_id, None)
            yield from _leaves(built)
        else:
            yield dataclasses.replace(self.sharded, data=values, dtype=values.dtype)

    def of(self, whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return this rank's part of a tensor of the whole model.

        Raises:
            VerifyError: one process has no such weight, or one of another shape.
        """
        part = torch.zeros(self.tensor.shape, dtype=self.tensor.dtype)
        for piece in self.pieces(part):
            true = whole.get(piece.key)
            if true is None:
                raise VerifyError(f"this layout has the weight {piece.key}, and one process has not", key=piece.key)
            if true.shape != tuple(piece.global_shape):
                raise VerifyError(
                    f"{piece.key} has the global shape {list(piece.global_shape)} in this layout and "
                    f"{list(true.shape)} in one process; pad sizes such as the vocabulary to a multiple that does not "
                    "depend on the layout",
                    key=piece.key,
                )
            piece.data.copy_(true[_slice_in_whole(piece)])
        return part

    @property
    def name(self) -> str:
        """The name in the whole model, with the index of the layer or expert if they are stacked."""
        piece = next(self.pieces(self.tensor.detach()))
        indices = [f"[{position}]" for position in _slice_in_whole(piece) if isinstance(position, int)]
        return str(self.sharded.key) + "".join(indices)

    @property
    def position(self) -> str:
        """The name and the part of the whole tensor: equal on replicas."""
        return "; ".join(f"{piece.key}{piece.global_offset}" for piece in self.pieces(self.tensor.detach()))

    @property
    def fragments(self) -> tuple[int, ...]:
        """The number of parts along each dim of the tensor."""
        piece = next(self.pieces(self.tensor.detach()))
        parts = tuple(piece.axis_fragmentations or ())
        return parts[piece.prepend_axis_num :]


def named_tensors(models: Sequence[torch.nn.Module]) -> list[NamedTensor]:
    """Return all parameters and persistent buffers of the chunks of a model.

    Raises:
        VerifyError: ``sharded_state_dict`` leaves one out.
    """
    tensors = []
    for model in models:
        leaves = [NamedTensor(leaf.data, leaf) for leaf in _leaves(model.sharded_state_dict())]  # type: ignore[operator]
        known = {id(leaf.tensor) for leaf in leaves}
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and not name.endswith("_extra_state") and id(value) not in known:
                raise VerifyError(
                    f"{name} {list(value.shape)} of {type(model).__name__} has no global name: sharded_state_dict "
                    "leaves it out; define sharded_state_dict in its module, from state_dict(keep_vars=True), which "
                    "distributed checkpoints need too",
                    key=name,
                )
        tensors += leaves
    return tensors


def assemble(named: Sequence[NamedTensor], values: Sequence[torch.Tensor]) -> ModelTensors:
    """Return copies of values of one process by name."""
    whole: ModelTensors = {}
    for parameter, value in zip(named, values, strict=True):
        for piece in parameter.pieces(value.detach()):
            if piece.key not in whole:
                whole[piece.key] = torch.zeros(piece.global_shape, dtype=value.dtype)
            whole[piece.key][_slice_in_whole(piece)] = piece.data
    return whole


def _slice_in_whole(piece: Any) -> tuple[int | slice, ...]:
    """Return the part of the whole tensor that a ShardedTensor is: an index for each stacked dim, then slices."""
    stacked, offsets = piece.global_offset[: piece.prepend_axis_num], piece.global_offset[piece.prepend_axis_num :]
    return *stacked, *(slice(start, start + size) for start, size in zip(offsets, piece.local_shape, strict=True))


def _leaves(tree: Any) -> Iterator[Any]:
    """Yield the ShardedTensors and factories in nested containers."""
    if hasattr(tree, "key") and hasattr(tree, "replica_id"):
        if isinstance(tree.data, torch.Tensor):
            yield tree
    elif isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(value)
