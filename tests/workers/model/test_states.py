"""Models with Mamba layers compute in parallel what transformers computes, and train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller.errors import ConfigError
from parallel_state.releases import language_models
from tests.ranks import run_ranks
from tests.workers.roles import GREEDY, MODEL, actor, experience, own_shard, prompts, weights
from tests.workers.weights.hf_models import LETTERS, NEMOTRON, ROWS, Reference
from workers.config import ModelConfig, ParallelConfig
from workers.config.fit import check_packing
from workers.model.transformer_config import transformer_config

MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_state_dim": 8, "mamba_num_groups": 4}
FIELDS: dict[str, Any] = MODEL | {
    "num_layers": len(LETTERS),
    "hybrid_layer_pattern": LETTERS,
    "position_embedding_type": "none",
    "transformer": MAMBA,
}
SP = {"tp": 2, "sequence_parallel": True}
with_hybrid = pytest.mark.skipif(len(language_models()) == 1, reason="this megatron-core has no HybridModel")


@with_hybrid
@pytest.mark.simulated
def test_scores_gradients_tokens_and_files_are_those_of_transformers(tmp_path: Path) -> None:
    reference = Reference(NEMOTRON, tmp_path)
    for axes in ({}, SP | {"pp": 2}, {"cp": 2}):
        differences = reference.differences(axes, packed=False)
        assert differences.pop("load") == differences.pop("export") == differences.pop("generation", 0.0) == 0.0
        assert max(differences.values()) < 2e-5, differences


def saved(parallel: dict[str, Any], path: str) -> dict[str, torch.Tensor]:
    worker = actor(parallel, model=FIELDS, ppo_epochs=1)
    batch = own_shard(experience(ROWS), worker)
    worker.update_actor(batch)
    worker.save_checkpoint(path, global_step=1)
    worker.update_actor(batch)
    return weights(worker)


def continued(parallel: dict[str, Any], path: str) -> tuple[dict[str, torch.Tensor], Any]:
    worker = actor(parallel, model=FIELDS | {"seed": 99}, ppo_epochs=1)
    worker.load_checkpoint(path)
    generated = worker.generate_sequences(own_shard(prompts(ROWS, GREEDY), worker))
    worker.update_actor(own_shard(experience(ROWS), worker))
    return weights(worker), None if generated is None else generated.batch["responses"]


@with_hybrid
@pytest.mark.simulated
def test_a_checkpoint_is_continued_in_another_layout(tmp_path: Path) -> None:
    expected = run_ranks(saved, 1, {}, str(tmp_path))[0]
    for rank, _ in run_ranks(continued, 8, SP | {"pp": 2}, str(tmp_path)):
        assert rank.keys() == expected.keys()
        assert max(float((rank[name] - expected[name]).abs().max()) for name in rank) < 2e-5


@pytest.mark.parametrize(
    ("key", "changes", "parallel"),
    [
        ("model.hybrid_layer_pattern", {"num_layers": 3}, {}),
        ("model.hybrid_layer_pattern", {"num_moe_experts": 4}, {}),
        ("model.transformer.mamba_num_heads", {"transformer": {}}, {}),
        ("model.transformer.mamba_num_groups", {"transformer": MAMBA | {"mamba_num_groups": 1}}, {"tp": 2}),
    ],
)
def test_what_cannot_be_built_is_rejected(key: str, changes: dict[str, Any], parallel: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        transformer_config(ModelConfig(**FIELDS | changes), ParallelConfig(**parallel))
    assert raised.value.key == key


def test_packed_rows_are_rejected() -> None:
    with pytest.raises(ConfigError) as raised:
        check_packing(ModelConfig(**FIELDS))
    assert raised.value.key == "model.hybrid_layer_pattern"
