"""Multi-latent attention generates with the keys and values of all heads in its cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor

from tests.ranks import run_ranks
from tests.workers.roles import MODEL, SAMPLED, actor, own_shard, prompts
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config
from workers.dry_run import RoleCall
from workers.generate import decoding
from workers.lora.adapters import adapters_of
from workers.memory.planned import estimated
from workers.verify.roles import ModelRole

pytestmark = pytest.mark.simulated

LATENT: dict[str, Any] = {
    "qk_layernorm": True,
    "num_query_groups": 4,
    "kv_channels": 12,
    "transformer": {
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
        "rope_type": "rope",
    },
}

ROWS = 12
SIZES, COMPRESSED = MODEL | LATENT, LATENT["transformer"]
YARN = COMPRESSED | {"q_lora_rank": None, "rope_type": "yarn", "rotary_scaling_factor": 4.0, "mscale_all_dim": 0.7}
RECOMPUTED = COMPRESSED | {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
MODELS: dict[str, dict[str, Any]] = {
    "compressed queries": SIZES,
    "yarn": SIZES | {"transformer": YARN},
    "recomputed": SIZES | {"transformer": RECOMPUTED},
    "adapters": SIZES | {"family": "deepseek_v3", "lora": {"rank": 4, "alpha": 8.0, "targets": ["linear_kv_up_proj"]}},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
}


def generated(parallel: dict[str, Any], model: dict[str, Any]) -> list[Tensor]:
    """Return sampled log-probabilities, tokens, and on one rank the scores; nothing if the rank has no samples."""
    worker = actor(parallel, "actor_rollout", model=model)
    for adapters in adapters_of(worker.model):
        with torch.no_grad():
            for name, parameter in adapters.named_parameters():
                if ".B_" in name:
                    generator = torch.Generator().manual_seed(int(name.split(".")[1]))
                    whole = torch.randn(4 * (8 + 6), 4, generator=generator)  # of all heads
                    parameter.copy_(whole.chunk(worker.context.pg.tp.size())[worker.context.pg.tp.rank()])
    samples = worker.generate_sequences(own_shard(prompts(ROWS, SAMPLED), worker))
    if samples is None:
        return []
    scores = [] if parallel else [worker.compute_log_prob(samples).batch["old_log_probs"]]
    return [samples.batch["rollout_log_probs"], samples.batch["responses"], *scores]


@pytest.mark.parametrize("model", MODELS)
def test_log_probs_of_samples_equal_those_of_scoring_and_of_one_process(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[StaticInferenceContext] = []

    class Kept(StaticInferenceContext):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            caches.append(self)

    monkeypatch.setattr(decoding, "StaticInferenceContext", Kept)
    found = {}
    for name, (ranks, parallel) in LAYOUTS.items():
        results = run_ranks(generated, ranks, parallel, MODELS[model])
        found[name] = next(columns for columns in results if columns)
    of_layers = [tensor for cache in caches for tensors in cache.key_value_memory_dict.values() for tensor in tensors]
    assert len(of_layers) == 2 * MODEL["num_layers"] * (1 + 2 + 1)
    bytes_of_one = sum(tensor.nbytes for tensor in of_layers[: 2 * MODEL["num_layers"]])
    config = load_config(ActorConfig, {"model": MODELS[model] | {"transformer_impl": "local"}})
    length = caches[0].max_sequence_length
    role = ModelRole.of(ActorRolloutRefWorker, config, "rollout", 1)
    call = RoleCall(role, "generate_sequences", 1, 2, micro_batches=1, row_count=20 * ROWS)
    two, three = (estimated(replace(call, response=tokens)).peak for tokens in (2, 3))
    samples = 20 * 20 * ROWS * length  # bytes: of each token its id, mask and log-probability
    assert length * (three - two) == pytest.approx(20 * bytes_of_one + samples, rel=0.002)
    sampled, tokens, scored = found["one"]
    assert sampled.abs().max() > 1
    for columns in found.values():
        torch.testing.assert_close(columns[0], sampled, atol=1e-5, rtol=0)
        assert torch.equal(columns[1], tokens)
    torch.testing.assert_close(sampled, scored, atol=1e-5, rtol=0)
