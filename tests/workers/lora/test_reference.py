"""The reference of a policy with adapters stays what it is, whatever an update changes beside the adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcontroller.errors import ConfigError
from tests.ranks import run_ranks
from tests.workers.lora.test_training import EXPERTS, LORA
from tests.workers.roles import MODEL, actor, experience, own_shard
from workers.actor import ActorRolloutRefWorker

pytestmark = pytest.mark.simulated

ROWS = 8
BIASED = {
    **{"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    **{"moe_router_load_balancing_type": "none", "moe_router_bias_update_rate": 0.03},
}


class _Running(nn.Module):
    """Adds a running mean of its inputs to them, as a module of a program may."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(hidden.detach().mean((0, 1)), 0.5)
        return hidden + self.mean


class WithRunningMean(ActorRolloutRefWorker):
    """A policy with a buffer that moves in training."""

    def build_model(self) -> list[nn.Module]:
        chunks: list[Any] = super().build_model()
        for chunk in chunks:
            chunk.running = _Running(self.config.model.hidden_size).to(self.device)
            chunk.decoder.register_forward_hook(lambda _, inputs, output, running=chunk.running: running(output))
        return chunks


# By what an update changes: the model, the worker, and whether the reference needs a copy.
CASES: dict[str, tuple[dict[str, Any], type[ActorRolloutRefWorker], bool]] = {
    "adapters": ({}, ActorRolloutRefWorker, False),
    "norms": ({"train_only": ["*norm*weight"]}, ActorRolloutRefWorker, True),
    "embedding": ({"train_only": ["embed_tokens.weight"], "tie_embeddings": True}, ActorRolloutRefWorker, True),
    "expert bias": (EXPERTS | {"transformer": BIASED}, ActorRolloutRefWorker, True),
    "bias that stays": (
        EXPERTS | {"transformer": BIASED | {"moe_router_bias_update_rate": 0.0}},
        ActorRolloutRefWorker,
        False,
    ),
    "running mean": ({}, WithRunningMean, True),
}


def moved(case: str, parallel: dict[str, Any], path: str) -> dict[str, Any]:
    """Log-probabilities of the reference and of the policy before and after updates, and in a worker that resumes."""
    model, worker_class, _ = CASES[case]

    def built(role: str) -> Any:
        return actor(parallel, role, worker_class, model=MODEL | {"lora": LORA} | model)

    worker = built("actor_ref")
    shard = own_shard(experience(ROWS), worker)

    def scores(scored: Any) -> Tensor | None:
        result = scored.compute_ref_log_prob(shard)
        return None if result is None else result.batch["ref_log_prob"]

    policy, reference = worker.compute_log_prob(shard), [scores(worker)]
    for _ in range(2):
        worker.update_actor(shard)
        reference.append(scores(worker))
    updated = worker.compute_log_prob(shard)
    worker.save_checkpoint(path)
    copied = "reference" in worker.state.models
    worker = built("actor_ref")
    worker.load_checkpoint(path)
    reference.append(scores(worker))
    resumed = worker.compute_log_prob(shard)
    return {
        "copied": copied,
        "reference": reference,
        "policy": [None if batch is None else batch.batch["old_log_probs"] for batch in (policy, updated, resumed)],
    }


def check(ranks: list[dict[str, Any]], copied: bool) -> None:
    for rank in ranks:
        if rank["reference"][0] is not None:
            before, after, resumed = rank["policy"]
            assert [float((reference - before).abs().max()) for reference in rank["reference"]] == [0.0] * 4
            assert float((after - before).abs().max()) > 0.05
            assert torch.equal(after, resumed)
        assert rank["copied"] is copied


@pytest.mark.parametrize("case", [case for case in CASES if case != "embedding"])
def test_reference_of_adapters_does_not_move(case: str, tmp_path: Path) -> None:
    check(run_ranks(moved, 1, case, {}, str(tmp_path)), CASES[case][2])


def test_reference_does_not_move_if_one_stage_alone_is_trained(tmp_path: Path) -> None:
    check(run_ranks(moved, 2, "embedding", {"pp": 2}, str(tmp_path)), True)


def loaded(path: str) -> float:
    """Load what an actor without a reference has saved, and return how far the reference is from the base."""
    model = MODEL | {"lora": LORA, "train_only": ["*norm*weight"]}
    alone = actor({}, "actor", model=model)
    before = alone.compute_log_prob(experience(ROWS)).batch["old_log_probs"]
    alone.update_actor(experience(ROWS))
    alone.save_checkpoint(path)
    worker = actor({}, "actor_ref", model=model)
    worker.load_checkpoint(path)
    reference = worker.compute_ref_log_prob(experience(ROWS)).batch["ref_log_prob"]
    return float((reference - before).abs().max())


def test_reference_stays_the_base_as_a_checkpoint_without_it_is_loaded(tmp_path: Path) -> None:
    assert run_ranks(loaded, 1, str(tmp_path)) == [0.0]


def not_exported(path: str) -> str:
    model = MODEL | EXPERTS | {"lora": LORA, "transformer": BIASED}
    with pytest.raises(ConfigError) as caught:
        actor({}, "actor", model=model).export_adapter(path)
    return str(caught.value)


def test_adapter_alone_is_not_exported_if_biases_of_routers_move_too(tmp_path: Path) -> None:
    (message,) = run_ranks(not_exported, 1, str(tmp_path / "adapter"))
    assert "decoder.layers.0.mlp.router.expert_bias" in message
    assert not (tmp_path / "adapter").exists()
