"""What functions that stand in for Transformer Engine's modules save, beside the sizes that its source saves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.models.common.embeddings import rope_utils

from parallel_state.dry_run import transformer_engine
from parallel_state.dry_run.counting import CountingMode
from parallel_state.dry_run.memory import Memory

TOKENS, HEADS, GROUPS, WIDTH = 1000, 16, 4, 128
ONE = 2 * TOKENS * WIDTH  # bytes of one head of all tokens in bfloat16
NUMBERS = 4 * TOKENS * HEADS


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta").requires_grad_()


def attended() -> torch.Tensor:
    query, key, value = (empty(TOKENS, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS))
    return transformer_engine.attend(query, key, value, pairs=TOKENS**2)


def attended_to_a_part() -> torch.Tensor:
    query, both = empty(TOKENS, HEADS, WIDTH), empty(TOKENS, GROUPS, 2 * WIDTH)
    key, value = both.chunk(2, dim=-1)
    return transformer_engine.attend(query, key, value, pairs=TOKENS**2)


def rotated() -> torch.Tensor:
    angles = torch.empty(TOKENS, 1, 1, WIDTH, device="meta")
    return rope_utils.fused_apply_rotary_pos_emb(empty(TOKENS, 1, HEADS, WIDTH), angles)


def activated() -> torch.Tensor:
    return fused_bias_swiglu.bias_swiglu_impl(empty(TOKENS, 2 * WIDTH), None)


def of_experts() -> torch.Tensor:
    weights = [empty(3 * WIDTH, WIDTH) for _ in range(4)]
    for weight in weights:
        weight.main_grad = weight.detach().float()  # type: ignore[attr-defined]
    return transformer_engine.grouped_linear(empty(TOKENS, WIDTH), weights)


ATTENDED = (2 * HEADS + 2 * GROUPS) * ONE + NUMBERS
CASES: dict[str, tuple[Callable[[], torch.Tensor], int, int]] = {
    "attention": (attended, ATTENDED, (4 * HEADS + 2 * GROUPS) * ONE),
    "attention, keys and values in one tensor": (
        attended_to_a_part,
        ATTENDED + 2 * GROUPS * ONE,
        (4 * HEADS + 2 * GROUPS) * ONE,
    ),
    "rotary positions": (rotated, 2 * HEADS * ONE + 4 * TOKENS * WIDTH, 2 * HEADS * ONE),
    "SwiGLU": (activated, 3 * ONE, 3 * ONE),
    "experts": (of_experts, 4 * ONE + 4 * 6 * 3 * WIDTH * WIDTH, 4 * ONE),
}
"""What computes an output, the bytes that exist after it, leaves of the graph included, and those that backward adds.

Backward adds the gradients of the output and of the inputs, and for attention those of the queries in float32.
"""


@pytest.mark.parametrize("name", CASES)
def test_saved_bytes_and_temporaries_are_those_of_the_source(name: str) -> None:
    compute, saved, added = CASES[name]
    mode = CountingMode(Memory())
    mode.transformer_engine = True
    with mode, transformer_engine.engine_kernels():
        output = compute()
        assert mode.memory.now == saved
        mode.memory.reset_peak()
        output.backward(torch.empty_like(output))
    assert mode.memory.peak == saved + added


def test_products_of_experts_count_as_products_of_one_matrix() -> None:
    mode = CountingMode(Memory())
    mode.transformer_engine = True
    with mode:
        of_experts().sum().backward()
    assert mode.flops == 3 * 2 * TOKENS * WIDTH * 3 * WIDTH
