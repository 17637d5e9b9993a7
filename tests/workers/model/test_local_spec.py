"""The public provider of local layers, in specs of Megatron's."""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.moe.experts import SequentialMLP

from workers.model.local_modules import TELayerNormColumnParallelLinear
from workers.model.local_spec import LocalProvider


def submodules_of(spec: Any) -> Any:
    """Those of a spec; later releases of Megatron have functions in its place."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def test_a_dense_layer_has_its_norm_in_the_first_linear_layer() -> None:
    spec = get_mlp_module_spec_for_backend(backend=LocalProvider())
    assert submodules_of(spec).linear_fc1 is TELayerNormColumnParallelLinear


def test_experts_are_grouped_only_if_the_spec_asks_for_it() -> None:
    def experts(grouped: bool) -> str:
        spec = get_mlp_module_spec_for_backend(backend=LocalProvider(), num_experts=4, moe_grouped_gemm=grouped)
        return str(submodules_of(spec).experts)

    assert "TEGroupedMLP" in experts(True) and SequentialMLP.__name__ in experts(False)
