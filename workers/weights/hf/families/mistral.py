"""Mistral: Llama with sliding windows, in all layers or in none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.weights.hf.families.llama import Llama
from workers.weights.hf.family import register_model_family
from workers.weights.hf.fields import layered, optional_size_of


@register_model_family("mistral")
class Mistral(Llama):
    """Mistral 7B, Nemo and Small, and models in the same format."""

    architecture = "Mistral"
    # transformers has a window of 4096 tokens if the key is missing, and none if it is null.
    defaults: ClassVar[Mapping[str, Any]] = {**Llama.defaults, "num_key_value_heads": 8, "sliding_window": 4096}
    special: ClassVar[Mapping[str, Any]] = {k: value for k, value in Llama.special.items() if k != "window_size"}

    def fields_from(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """As Llama's, with the window: a token attends to itself and to ``sliding_window - 1`` tokens before it."""
        window = optional_size_of(layered(config, self.defaults), "sliding_window")
        fields = super().fields_from(config)
        return fields if window is None else fields | {"transformer": {"window_size": [window - 1, 0]}}

    def config_from(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As Llama's, with the window."""
        before, after = fields["transformer"].get("window_size") or (None, 0)
        if after:
            raise self.not_expressible("model.transformer.window_size", [before, after], [before, 0])
        return super().config_from(fields) | {"sliding_window": None if before is None else before + 1}
