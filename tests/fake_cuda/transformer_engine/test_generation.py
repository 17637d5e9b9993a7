"""Generation with Transformer Engine's layers: flash attention stays possible for prompts of unequal length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformer_engine import received

from mcontroller.errors import ConfigError
from tests.forking import run_ranks
from tests.workers.roles import GREEDY, PROMPT, RESPONSE, actor, experience, prompts

pytestmark = pytest.mark.processes

LAYERS, ROWS = 2, 12


def generated(implementation: str, **model: Any) -> tuple[torch.Tensor, torch.Tensor, list[tuple[Any, ...]]]:
    """Return prompt lengths, greedy responses, and the queries, mask and mask type of each call of the attention."""
    fields = {"num_layers": LAYERS, "transformer_impl": implementation} | model
    worker = actor({}, "rollout", model=fields)
    batch = prompts(ROWS, GREEDY | {"eos_token_id": -1})
    received.calls.clear()
    responses = worker.generate_sequences(batch).batch["responses"]
    calls = received.calls["DotProductAttention.forward"]
    lengths = batch.batch["attention_mask"].sum(1)
    return lengths, responses, [(call["query"][0], call["mask"], call["attn_mask_type"]) for call in calls]


def test_prompts_of_unequal_length_reach_the_kernels_without_a_mask() -> None:
    [(lengths, responses, calls)] = run_ranks(generated, 1, "transformer_engine")
    [(_, expected, _)] = run_ranks(generated, 1, "local")
    assert calls == [(int(lengths.max()), None, "causal")] * LAYERS
    assert torch.equal(responses, expected)


def equal_prompts() -> set[tuple[int, int, int]]:
    """Return the shapes of attention for prompts of one length."""
    worker = actor({}, "rollout", model={"num_layers": LAYERS, "transformer_impl": "transformer_engine"})
    batch = prompts(ROWS, GREEDY | {"eos_token_id": -1})
    batch.batch["attention_mask"][:] = 1
    received.calls.clear()
    worker.generate_sequences(batch)
    return received.attention_shapes()


def test_a_response_reaches_the_attention_kernels_with_one_shape_only() -> None:
    assert run_ranks(equal_prompts, 1) == [{(ROWS, PROMPT, PROMPT)}]


def updated_by_tokens() -> set[int]:
    """Return the widths of attention in an update with a budget of tokens."""
    fields = {"num_layers": LAYERS, "transformer_impl": "transformer_engine"}
    worker = actor({}, "actor", model=fields, ppo_max_tokens_per_micro_batch=37, share_prompts=False)
    received.calls.clear()
    worker.update_actor(experience(16))
    return {keys for _, _, keys in received.attention_shapes()}


def test_micro_batches_by_tokens_have_one_width_up_to_128_tokens() -> None:
    assert run_ranks(updated_by_tokens, 1) == [{PROMPT + RESPONSE}]


def test_fused_rotation_of_training_is_off_while_rows_have_their_own_positions() -> None:
    [(_, responses, _)] = run_ranks(fused, 1)
    [(_, expected, _)] = run_ranks(generated, 1, "local")
    assert torch.equal(responses, expected)


def fused() -> tuple[torch.Tensor, torch.Tensor, list[tuple[Any, ...]]]:
    return generated("transformer_engine", transformer={"apply_rope_fusion": True})


def test_windows_of_all_layers_need_no_mask_of_transformer_engine() -> None:
    [(lengths, _, calls)] = run_ranks(windowed, 1, None)
    assert calls == [(int(lengths.max()), None, "causal")] * LAYERS


def test_windows_of_some_layers_are_rejected() -> None:
    [text] = run_ranks(rejected, 1)
    assert "window_attn_skip_freq" in text


def windowed(skip: int | None) -> tuple[torch.Tensor, torch.Tensor, list[tuple[Any, ...]]]:
    return generated("transformer_engine", transformer={"window_size": (32, 0), "window_attn_skip_freq": skip})


def rejected() -> str:
    with pytest.raises(ConfigError) as caught:
        windowed(2)
    return str(caught.value)


@pytest.fixture(autouse=True)
def no_calls_yet() -> None:
    received.calls.clear()
