"""After a transfer, a rollout group of another layout generates what the actor itself would, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcontroller.data.protocol import DataProto
from mcontroller.errors import CallRejected, ConfigError, DataError
from mcontroller.testing import simulated_worker_group
from tests.workers.roles import MODEL, OPTIM, PROMPT, RESPONSE, SAMPLED, experience, prompts
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config
from workers.weights.transfer.weight_transfer import WeightTransfer

TIED = {"tie_embeddings": True}
EXPERTS = {"num_layers": 2, "num_moe_experts": 4, "moe_ffn_hidden_size": 32}


def group(role: str, ranks: int, parallel: dict[str, Any], model: dict[str, Any], **changes: Any) -> Any:
    defaults = {
        "model": MODEL | model,
        "parallel": parallel,
        "optim": OPTIM,
        "rollout": {"prompt_length": PROMPT, "response_length": RESPONSE, "seed": 3},
        "ppo_mini_batch_size": 8,
        "ppo_micro_batch_size": 2,
        "ppo_epochs": 1,
    }
    config = load_config(ActorConfig, defaults, changes)
    made = simulated_worker_group(ActorRolloutRefWorker, ranks, config, role, name=role)
    made.init_model()
    return made


def generated(of: Any) -> DataProto:
    return of.generate_sequences(prompts(8, SAMPLED))


@pytest.mark.parametrize(
    ("model", "ranks", "here", "to_ranks", "there"),
    [
        ({}, 2, {"tp": 2}, 1, {}),
        ({}, 4, {"tp": 2, "pp": 2}, 2, {}),
        (TIED, 2, {"pp": 2}, 2, {"tp": 2}),
        (EXPERTS, 2, {"ep": 2}, 1, {}),
    ],
    ids=["tp2", "tp2-pp2", "tied-pp2-tp2", "ep2"],
)
def test_tokens_and_log_probs_equal_those_of_a_rollout_with_the_actors_weights(
    model: dict[str, Any], ranks: int, here: dict[str, Any], to_ranks: int, there: dict[str, Any]
) -> None:
    """The vocabulary of 61 is padded by tp2. The reference is the actor's whole state on the rollout's layout."""
    actor, rollout = group("actor_rollout", ranks, here, model), group("rollout", to_ranks, there, model, model={"seed": 7})
    before = generated(rollout)
    actor.update_actor(experience(8))
    with WeightTransfer(actor, rollout) as transfer:
        report = transfer.run()
    after, own = generated(rollout), generated(actor)
    assert report.bytes_sent == report.least_bytes > 0
    assert report.policy_version == 1
    assert after.batch["policy_version"].tolist() == own.batch["policy_version"].tolist() == [1] * 8
    assert before.batch["policy_version"].tolist() == [0] * 8
    for column in ("responses", "rollout_log_probs"):
        print(column, (after.batch[column] - own.batch[column]).abs().max(), (before.batch[column] - own.batch[column]).abs().max())
