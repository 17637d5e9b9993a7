"""The head of a critic: one number for each token instead of logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from mcontroller.errors import ConfigError
from tests.ranks import run_ranks
from tests.training import SMALL_GPT, device, new_context
from workers.config import ParallelConfig
from workers.model.build import build_model
from workers.model.local_spec import block_spec
from workers.model.transformer_config import transformer_config
from workers.model.value_head import put_value_head

pytestmark = pytest.mark.simulated


def test_values_are_unrounded_float32_for_each_token_in_every_dtype() -> None:
    def described(dtype: str, sequence_parallel: bool) -> tuple[Any, ...]:
        parallel = ParallelConfig(tp=2, sequence_parallel=sequence_parallel)
        context = new_context(parallel)
        model = dataclasses.replace(SMALL_GPT, dtype=dtype, tie_embeddings=True)
        [critic] = build_model(model, parallel, context, value_head=True)
        tokens = torch.arange(16, device=device()).view(2, 8)
        with context.activate():
            values = critic(tokens, tokens, None)
        rounded = torch.equal(values, values.bfloat16().float())
        return tuple(values.shape), values.dtype, critic.get_parameter("output_layer.weight").dtype, rounded

    assert run_ranks(described, 2, "bfloat16", True) == [((2, 8, 1), torch.float32, torch.bfloat16, False)] * 2
    assert run_ranks(described, 2, "float32", False) == [((2, 8, 1), torch.float32, torch.float32, False)] * 2


def test_a_model_without_an_output_layer_of_its_own_is_rejected() -> None:
    def rejected() -> list[str]:
        parallel = ParallelConfig()
        context, keys = new_context(parallel), []
        config = transformer_config(SMALL_GPT, parallel)
        with context.activate():
            tied = GPTModel(
                config, block_spec(config, "local", 0, None), 40, 16, share_embeddings_and_output_weights=True
            )
            for chunk in (torch.nn.Linear(2, 2), tied):
                with pytest.raises(ConfigError) as caught:
                    put_value_head(chunk, context.pg.tp)
                keys.append(caught.value.key)
        return keys

    assert run_ranks(rejected, 1) == [["value_head"] * 2]
