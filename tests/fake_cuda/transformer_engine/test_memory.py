"""Estimated memory of Transformer Engine's layers next to the bytes that the fake CUDA device counts."""

from __future__ import annotations

import pytest
import torch
from megatron.core.fusions import fused_bias_swiglu

from tests.workers.memory.counted import BF16, EXPERTS, RECOMPUTED, SHARDED, WHOLE, Layout, far_off

pytestmark = pytest.mark.processes

ENGINE = BF16 | {"transformer_impl": "transformer_engine"}
SELECTIVE = {"recompute_granularity": "selective"}
LAYOUTS: dict[str, Layout] = {
    "tp 2, sequence parallel": ({"tp": 2, "sequence_parallel": True}, ENGINE, {}),
    "pp 2, vpp 2": ({"pp": 2, "vpp": 2}, ENGINE, {}),
    "cp 2, sharded optimizer": ({"cp": 2}, ENGINE, SHARDED),
    "dp 2, MLP and norms recomputed": (
        {},
        ENGINE | {"transformer": SELECTIVE | {"recompute_modules": ["mlp", "layernorm"]}},
        WHOLE,
    ),
    "dp 2, recomputed": ({}, ENGINE | {"transformer": RECOMPUTED}, SHARDED),
    "ep 2, activation of experts recomputed": (
        {"ep": 2},
        ENGINE | EXPERTS | {"transformer": SELECTIVE | {"recompute_modules": ["moe_act"]}},
        WHOLE,
    ),
}


@pytest.fixture(autouse=True)
def activation_in_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As compiled on a GPU: the activation of the gate is no separate tensor."""

    def swiglu(whole: torch.Tensor) -> torch.Tensor:
        gate, linear = whole.chunk(2, -1)
        return torch.nn.functional.silu(gate).mul_(linear)

    monkeypatch.setattr(fused_bias_swiglu, "swiglu", swiglu)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_estimates_are_within_a_tenth_of_the_counted_bytes(layout: Layout) -> None:
    assert far_off(layout) == {}
