"""Real Ray: groups in slots of one pool, and fused roles of one process, hand over their memory around stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mcontroller import MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool, create_colocated_worker_cls_fused
from tests.ranks import run_ranks
from tests.workers.roles import GREEDY, MODEL, OPTIM, PROMPT, RESPONSE, actor, critic, experience, prompts
from trainer.stages import SharedDevices, Stages
from workers import ActorRolloutRefWorker, CriticWorker
from workers.config import ActorConfig, CriticConfig, load_config

TRAINING = {"model": MODEL, "optim": OPTIM, "ppo_mini_batch_size": 8, "ppo_micro_batch_size": 2, "ppo_epochs": 1}
ROLLOUT = {"rollout": {"prompt_length": PROMPT, "response_length": RESPONSE, "seed": 3}}
CLASSES = {
    "actor": RayClassWithInitArgs(
        ActorRolloutRefWorker, load_config(ActorConfig, TRAINING | ROLLOUT), "actor_rollout_ref"
    ),
    "critic": RayClassWithInitArgs(CriticWorker, load_config(CriticConfig, TRAINING)),
}
Results = dict[str, torch.Tensor]


@contextmanager
def started(fused: bool, pool: RayResourcePool) -> Iterator[dict[str, Any]]:
    if fused:
        with MegatronRayWorkerGroup(pool, create_colocated_worker_cls_fused(CLASSES), name_prefix="all") as group:
            yield group.spawn(CLASSES)
    else:
        with (
            MegatronRayWorkerGroup(pool, CLASSES["actor"], name_prefix="actor") as one,
            MegatronRayWorkerGroup(pool, CLASSES["critic"], name_prefix="critic") as other,
        ):
            yield {"actor": one, "critic": other}


def step(roles: dict[str, Any], stage: Any) -> Results:
    """Responses before a step of both roles, and scores and values after it."""
    policy, values = roles["actor"], roles["critic"]
    with stage("generate", policy.generate_sequences):
        responses = policy.generate_sequences(prompts(8, GREEDY)).batch["responses"]
    with stage("update_critic", values.update_critic):
        values.update_critic(experience(8))
    with stage("update_actor", policy.update_actor):
        policy.update_actor(experience(8))
    with stage("reference", policy.compute_ref_log_prob):
        reference = policy.compute_ref_log_prob(experience(8)).batch["ref_log_prob"]
    with stage("values", values.compute_values):
        new_values = values.compute_values(experience(8)).batch["values"]
    with stage("log-probs", policy.compute_log_prob):
        scores = policy.compute_log_prob(experience(8)).batch["old_log_probs"]
    return {"responses": responses, "reference": reference, "values": new_values, "scores": scores}


@contextmanager
def no_stage(name: str, method: Any) -> Iterator[None]:
    yield


def without_offload() -> Results:
    return step({"actor": actor({}, **TRAINING), "critic": critic({}, **TRAINING)}, no_stage)


@pytest.fixture(scope="module")
def expected() -> Results:
    return run_ranks(without_offload, 1)[0]


@pytest.mark.parametrize("fused", [False, True], ids=["groups", "fused"])
def test_roles_hand_over_their_memory_and_compute_the_same(fused: bool, expected: Results, ray_cluster: None) -> None:
    stage = Stages(SharedDevices("always"))
    with (
        RayResourcePool([1], use_gpu=False, name_prefix="offload", max_colocate_count=2) as pool,
        started(fused, pool) as roles,
    ):
        for group in roles.values():
            group.init_model()
            stage.devices.add(group, pool)
        actual = step(roles, stage)
        assert roles["critic"].offload() == [0]  # the last stage is the actor's, so the critic has left
        freed = roles["actor"].offload(["optimizer"]), roles["actor"].offload(["params"])
        memory = stage.take_memory()
        names = {role: group.name for role, group in roles.items()}
    for name, values in expected.items():
        torch.testing.assert_close(actual[name], values, atol=1e-6, rtol=0)
    assert freed[0] == [0] and freed[1][0] > 0  # scoring needs the weights only
    stages = {"actor": ("generate", "update_actor", "reference", "log-probs"), "critic": ("update_critic", "values")}
    metrics = {f"memory/{names[role]}/{of}/resident_gb" for role, several in stages.items() for of in several}
    assert {name.replace(" ", "_") for name in memory} == metrics and min(memory.values()) > 0
