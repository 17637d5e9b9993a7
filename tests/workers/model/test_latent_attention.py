"""A model with multi-latent attention, from a user-defined build_model: trained and scored as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

from mcontroller.errors import ConfigError
from tests.ranks import run_ranks
from tests.workers.roles import VOCAB, actor, experience, largest_difference, own_shard, weights
from workers import ActorRolloutRefWorker
from workers.model.build import build_model
from workers.model.initialize import initialize_weights
from workers.model.local_attention import TEDotProductAttention
from workers.model.local_modules import TENorm

pytestmark = pytest.mark.simulated

ROWS = 8


class LatentAttentionActor(ActorRolloutRefWorker):
    """A policy with compressed queries, keys and values, as DeepSeek-V3's attention has them."""

    divides_down_projections = False

    def build_model(self) -> list[torch.nn.Module]:
        model, parallel, context = self.config.model, self.config.parallel, self.context
        config = MLATransformerConfig(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            ffn_hidden_size=model.ffn_hidden_size,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_head_dim=8,
            qk_pos_emb_head_dim=4,
            v_head_dim=8,
            rope_type="rope",
            normalization="RMSNorm",
            init_method_std=model.init_method_std,
            add_bias_linear=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            sequence_parallel=parallel.sequence_parallel,
            pipeline_dtype=torch.float32,
            gradient_accumulation_fusion=False,
        )

        def provider(pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
            spec = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
            layer, attention = spec.submodules, spec.submodules.self_attention.submodules
            # Megatron's own local attention has one width for keys and values, and its norms no sequence parallelism.
            attention.core_attention = TEDotProductAttention
            layer.input_layernorm = layer.pre_mlp_layernorm = attention.q_layernorm = attention.kv_layernorm = TENorm
            if (
                not self.divides_down_projections and parallel.sequence_parallel
            ):  # as in Megatron's spec for Transformer Engine
                attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
            rows = -(-VOCAB // parallel.tp) * parallel.tp
            length = model.max_sequence_length
            return GPTModel(
                config,
                TransformerBlockSubmodules([spec] * (model.num_layers // parallel.pp), TENorm),
                rows,
                length,
                pre_process,
                post_process,
                position_embedding_type="rope",
                pg_collection=context.pg,
                vp_stage=vp_stage,
            )

        chunks = build_model(model, parallel, context, model_provider=provider)
        initialize_weights(chunks, context, seed=8)
        return chunks


class DividedActor(LatentAttentionActor):
    divides_down_projections = True


def trained(
    parallel: dict[str, Any], worker_class: type[LatentAttentionActor] = LatentAttentionActor
) -> dict[str, Any]:
    """Return the scores before and after an update, and the weights after it."""
    worker = actor(parallel, "actor", worker_class, ppo_mini_batch_size=ROWS)
    batch = experience(ROWS)
    scores = [worker.compute_log_prob(own_shard(batch, worker))]
    metrics = worker.update_actor(own_shard(batch, worker))
    scores.append(worker.compute_log_prob(own_shard(batch, worker)))
    log_probs = {str(i): score.batch["old_log_probs"] for i, score in enumerate(scores) if score is not None}
    return {"scores": log_probs, "weights": weights(worker), "metrics": metrics}


@pytest.fixture(scope="module")
def on_one_process() -> dict[str, Any]:
    return run_ranks(trained, 1, {})[0]


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [(2, {"tp": 2, "sequence_parallel": True}), (2, {"pp": 2}), (2, {})],
    ids=["tp2-sp", "pp2", "dp2"],
)
def test_latent_attention_has_the_scores_and_weights_of_one_process(
    world_size: int, parallel: dict[str, Any], on_one_process: dict[str, Any]
) -> None:
    expected = on_one_process
    assert (expected["scores"]["0"] - expected["scores"]["1"]).abs().max() > 0.01  # the update has an effect
    ranks = run_ranks(trained, world_size, parallel)
    scores = [rank["scores"] for rank in ranks if rank["scores"]]
    scores = scores if not parallel else scores[:1]
    for name, score in expected["scores"].items():
        actual = torch.cat([part[name] for part in scores])
        torch.testing.assert_close(actual, score, rtol=0, atol=2e-5)
    assert largest_difference(ranks[0]["weights"], expected["weights"]) < 2e-5


def scored(parallel: dict[str, Any]) -> torch.Tensor:
    worker = actor(parallel, "ref", LatentAttentionActor)
    log_probs: torch.Tensor = worker.compute_ref_log_prob(experience(ROWS)).batch["ref_log_prob"]
    return log_probs


def rejection(parallel: dict[str, Any]) -> tuple[str, int]:
    with pytest.raises(ConfigError) as caught:
        trained(parallel, DividedActor)
    return caught.value.key, caught.value.value


@pytest.mark.parametrize("changes", [{}, {"sequence_parallel": True}], ids=["tp", "sp"])
def test_training_that_would_leave_out_gradients_is_rejected(changes: dict[str, Any]) -> None:
    assert run_ranks(rejection, 2, {"tp": 2} | changes) == [("parallel.tp", 2)] * 2


def test_scores_need_no_sequence_parallelism() -> None:
    torch.testing.assert_close(run_ranks(scored, 2, {"tp": 2})[0], run_ranks(scored, 1, {})[0], rtol=0, atol=2e-5)
