"""A vocabulary that tp does not divide: the entries that pad it have probability 0."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from tests.ranks import run_ranks
from tests.training import SMALL_GPT, device, new_context
from tests.workers.full_state import full_state_dict
from workers.config import ParallelConfig
from workers.model.build import build_model
from workers.model.local_spec import block_spec
from workers.model.transformer_config import transformer_config

pytestmark = pytest.mark.simulated

VOCABULARY = 125  # padded to 128 over tp 4: the last rank holds 29 entries and 3 of padding


def logits(tp: int, gathered: bool, tied: bool) -> torch.Tensor:
    parallel = ParallelConfig(tp=tp)
    context = new_context(parallel)
    model = dataclasses.replace(SMALL_GPT, vocab_size=VOCABULARY, tie_embeddings=tied)
    [chunk] = build_model(model, parallel, context)
    tokens = torch.arange(VOCABULARY, device=device())[None]
    with context.activate():
        output = chunk(tokens, torch.zeros_like(tokens), None, runtime_gather_output=gathered)
        output.logsumexp(-1).sum().backward()
    assert torch.isfinite(output).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in chunk.parameters())
    return output.detach()


@pytest.mark.parametrize("tied", [False, True], ids=["own output weights", "tied"])
@pytest.mark.parametrize("gathered", [False, True], ids=["divided", "gathered"])
def test_padding_has_no_probability_at_any_temperature(gathered: bool, tied: bool) -> None:
    parts = run_ranks(logits, 4, 4, gathered, tied)
    whole = parts[0] if gathered else torch.cat(parts, -1)
    assert whole.size(-1) == 128
    for temperature in (0.1, 1.0, 20.0):
        probabilities = (whole / temperature).softmax(-1)
        assert probabilities[..., VOCABULARY:].abs().max() == 0.0
        entropy = -(probabilities * (whole / temperature).log_softmax(-1)).sum(-1)
        assert torch.isfinite(entropy).all()
    [alone] = run_ranks(logits, 1, 1, gathered, tied)
    torch.testing.assert_close(whole[..., :VOCABULARY], alone, rtol=0, atol=1e-5)


def of_a_provider(tp: int) -> tuple[int, float]:
    """Rows of the saved output layer, and the largest probability of a padding entry, of a chunk from a provider."""
    parallel = ParallelConfig(tp=tp)
    context = new_context(parallel)
    model = dataclasses.replace(SMALL_GPT, vocab_size=VOCABULARY)
    config = transformer_config(model, parallel)

    def provider(pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
        return GPTModel(config, block_spec(config, "local", 0, None), 128, 64, pg_collection=context.pg)

    [chunk] = build_model(model, parallel, context, model_provider=provider)
    tokens = torch.arange(VOCABULARY, device=device())[None]
    with context.activate(), torch.no_grad():
        output = chunk(tokens, torch.zeros_like(tokens), None, runtime_gather_output=True)
        saved = full_state_dict([chunk], context)["output_layer.weight"]
    return len(saved), float(output.softmax(-1)[..., VOCABULARY:].max())


@pytest.mark.parametrize("tp", [1, 4])
def test_the_padding_of_a_model_from_a_provider_is_masked_and_not_saved(tp: int) -> None:
    assert run_ranks(of_a_provider, tp, tp) == [(VOCABULARY, 0.0)] * tp
