"""Prompts of unequal length generate without a mask that has a row for every query."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from mcontroller.errors import ConfigError
from tests.ranks import run_ranks
from tests.workers.roles import GREEDY, RESPONSE, SAMPLED, actor, prompts
from workers.generate.decoding_patches import check_positions, masked_decoding
from workers.model.attend_once import attend_once

ROWS = 12
MODELS: dict[str, dict[str, Any]] = {
    "experts": {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 32,
        "transformer": {"moe_router_load_balancing_type": "none"},
    },
    "learned positions": {"position_embedding_type": "learned_absolute"},
    "rotation of half of the head": {"rotary_percent": 0.5},
    "interleaved rotation": {"transformer": {"rotary_interleaved": True}},
}


def sampled_and_scored(model: dict[str, Any]) -> list[Tensor]:
    worker = actor({}, "actor_rollout", model=model)
    samples = worker.generate_sequences(prompts(ROWS, SAMPLED))
    return [samples.batch["rollout_log_probs"], worker.compute_log_prob(samples).batch["old_log_probs"]]


@pytest.mark.simulated
@pytest.mark.parametrize("model", MODELS)
def test_log_probs_of_samples_equal_those_of_scoring(model: str) -> None:
    sampled, scored = run_ranks(sampled_and_scored, 1, MODELS[model])[0]
    assert sampled.abs().max() > 1
    torch.testing.assert_close(sampled, scored, atol=1e-4, rtol=0)


def seen_by_core_attention() -> list[tuple[int, tuple[int, ...] | None, AttnMaskType]]:
    """Return, for every call of the first layer's core attention, its queries, its mask's shape and its mask type."""
    worker = actor({}, "rollout")
    seen: list[Any] = []

    def record(core: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = args[3]
        seen.append((args[0].size(0), None if mask is None else tuple(mask.shape), kwargs["attn_mask_type"]))

    core = worker.model[0].decoder.layers[0].self_attention.core_attention
    core.register_forward_pre_hook(record, with_kwargs=True)
    worker.generate_sequences(prompts(ROWS, GREEDY | {"eos_token_id": -1}))
    return seen


@pytest.mark.simulated
def test_prompts_are_causal_and_later_tokens_have_a_mask_for_one_query() -> None:
    width = int(prompts(ROWS, {}).batch["attention_mask"].sum(1).max())
    prompt, *later = run_ranks(seen_by_core_attention, 1)[0]
    assert prompt == (width, None, AttnMaskType.causal)
    assert [shape for _, shape, _ in later] == [(ROWS, 1, 1, width + step) for step in range(1, RESPONSE)]
    assert {queries for queries, _, _ in later} == {1}


class Core(nn.Module):
    """A core attention that records the mask type that it gets."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        defaults = {"window_size": None, "softmax_type": "vanilla", "softmax_scale": None}
        self.config = SimpleNamespace(**defaults | config)
        self.types: list[AttnMaskType] = []

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, attn_mask_type: AttnMaskType
    ) -> Tensor:
        self.types.append(attn_mask_type)
        return query.flatten(2)


class OfTransformerEngine(Core):
    __module__ = "megatron.core.extensions.transformer_engine"


def decode(core: Core, mask: Tensor | None) -> Tensor:
    query, key, value = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(1))
        for shape in ((1, 2, 4, 8), (5, 2, 2, 8), (5, 2, 2, 8))
    )
    model = nn.ModuleDict({"core_attention": core})
    with masked_decoding([model]):
        output = model["core_attention"](query, key, value, mask, attn_mask_type=AttnMaskType.no_mask)
    assert "forward" not in vars(core)
    if not core.types:
        expected = attend_once(query, key, value, None if mask is None else ~mask, 8**-0.5)
        torch.testing.assert_close(output, expected)
    return output


def test_single_tokens_reach_transformer_engine_only_with_unmasked_windows() -> None:
    mask = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    mask[0, ..., 2] = True
    engine, windowed, other = OfTransformerEngine(), OfTransformerEngine(), Core()
    windowed.config.window_size = (4, 0)
    for each in (mask, None):
        for core in (engine, windowed, other):
            decode(core, each)
    assert engine.types == []
    assert windowed.types == [AttnMaskType.no_mask]  # a mask has the window
    assert other.types == [AttnMaskType.arbitrary, AttnMaskType.no_mask]


def test_masked_key_has_no_effect() -> None:
    generator = torch.Generator().manual_seed(2)
    query, key = torch.randn(1, 2, 4, 8, generator=generator), torch.randn(5, 2, 2, 8, generator=generator)
    mask = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    mask[:, ..., 2] = True
    shorter = torch.cat((key[:2], key[3:]))
    torch.testing.assert_close(
        attend_once(query, key, key, ~mask, 0.5), attend_once(query, shorter, shorter, None, 0.5)
    )


def test_positions_that_rows_cannot_have_for_themselves_are_rejected() -> None:
    model: Any = nn.Module()
    model.position_embedding_type = "mrope"
    with pytest.raises(ConfigError) as caught:
        check_positions([model])
    assert (caught.value.key, caught.value.value) == ("position_embedding_type", "mrope")
