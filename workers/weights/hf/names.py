"""Map tensors of a Megatron GPT model to those of a Hugging Face checkpoint that they consist of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcontroller.errors import DataError
from workers.weights.hf.family import MODEL_FAMILIES, ModelFamily

__all__ = ["Counterpart", "counterpart", "names_of"]

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
_EXPERT = re.compile(r"(.*\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")


@dataclass(frozen=True)
class Counterpart:
    """The Hugging Face tensors that one tensor of Megatron's consists of, and their position in the model.

    ``split`` and ``join`` work on any rank's part as on the whole: a rank has the same share of each of them.

    Attributes:
        names: one name, or several whose tensors are interleaved along dim 0.
        rows: consecutive rows of each before the next one's (q, k and v of one query group); None: all of them.
        layer: counted from 0; -1 before the layers, None after them.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...] | None
    layer: int | None

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of each of ``names`` in ``tensor``."""
        if len(self.names) == 1:
            return [tensor]
        rows = self.rows or (tensor.size(0) // len(self.names),) * len(self.names)
        blocks = tensor.unflatten(0, (-1, sum(rows)))
        return [part.flatten(0, 1) for part in blocks.split(rows, dim=1)]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor that ``split`` would cut into ``parts``."""
        if len(parts) == 1:
            return parts[0]
        blocks = parts[0].size(0) // self.rows[0] if self.rows else 1
        return torch.cat([part.unflatten(0, (blocks, -1)) for part in parts], dim=1).flatten(0, 1)


def counterpart(name: str, family: ModelFamily | None, config: Any, value_head: bool) -> Counterpart:
    """Return the Hugging Face tensors of the tensor called ``name`` in the whole Megatron model.

    Args:
        name: layers and experts are counted over the whole model.
        family: the one whose names to use; None for a model that no family matches: those of any family.
        config: the model's TransformerConfig.
        value_head: the output layer is a value head: a sequence classifier's ``score`` with a single label.

    Raises:
        DataError: the family has no such tensor.
    """
    in_layer, of_expert = _LAYER.fullmatch(name), _EXPERT.fullmatch(name)
    numbers = {"layer": in_layer[2] if in_layer else "", "expert": of_expert[2] if of_expert else ""}
    template = f"{of_expert[1]}{{expert}}" if of_expert else name
    if in_layer:
        template = _LAYER.sub(r"\1{layer}\3", template)
    names = names_of(family).get(template, ())
    if value_head and name == "output_layer.weight":
        names = (family.value_head if family else ModelFamily.value_head,)
    gated = config.gated_linear_unit or ".linear_fc1." not in name
    if not names or (len(names) > 1 and not gated) or (in_layer and getattr(config, "attention_output_gate", False)):
        of = family.model_type if family else ", ".join(MODEL_FAMILIES)
        raise DataError(
            f"{name} has no counterpart in a Hugging Face checkpoint of {of} (the built-in families have RMSNorm, "
            "gated units, and no biases but those of q, k and v)",
            tensor=name,
        )
    return Counterpart(
        names=tuple(of_name.format(**numbers) for of_name in names),
        rows=_rows_of_group(config) if ".linear_qkv." in name and len(names) > 1 else None,
        layer=int(in_layer[2]) if in_layer else -1 if name.startswith("embedding.") else None,
    )


def names_of(family: ModelFamily | None) -> Mapping[str, tuple[str, ...]]:
    """Return the names of a family's weights (see ``ModelFamily.names``); for None those of all families together."""
    if family is not None:
        return family.names
    return {name: theirs for each in reversed([*MODEL_FAMILIES.values()]) for name, theirs in each.names.items()}


def _rows_of_group(config: Any) -> tuple[int, int, int]:
    """Rows of q, k and v in one query group of ``linear_qkv``."""
    width = config.kv_channels
    return (config.num_attention_heads // config.num_query_groups * width, width, width)
