"""The fields of a TransformerConfig that has one layer on each stage of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallel_state.layout import ParallelLayout

CUSTOM_SPLIT = {
    "pipeline_model_parallel_layout": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
"""Fields that divide the layers over the stages in another way than equally, and their defaults."""


def fields_of_one_layer(config: Mapping[str, Any], layers: int, layout: ParallelLayout) -> dict[str, Any]:
    """Return the fields that differ if each stage has its last layer only; a list has an entry for each layer.

    Args:
        config: fields of a TransformerConfig by name.
        layers: the number of layers of the whole model.
        layout: the layout.
    """
    stages = layout.pp * (layout.vpp or 1)
    kept = [(stage + 1) * layers // stages - 1 for stage in range(stages)]
    changed: dict[str, Any] = {"num_layers": stages}
    of_one_layer = CUSTOM_SPLIT | {"recompute_num_layers": 1}
    for name, value in config.items():
        if name in of_one_layer and value is not None:
            changed[name] = of_one_layer[name]
        elif isinstance(value, (list, tuple)) and len(value) == layers:
            changed[name] = [value[index] for index in kept]
    return changed
