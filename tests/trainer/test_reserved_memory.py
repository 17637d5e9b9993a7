"""With ``trainer.offload=never``, an engine leaves the memory that other roles on its GPUs will take."""

from __future__ import annotations

from typing import Any

import pytest

from mcontroller import RayClassWithInitArgs
from mcontroller.ray import ResourcePoolManager
from trainer import Role
from trainer.reserved_memory import reserved_for_others
from trainer.roles import GroupSpec
from workers import ActorConfig, ActorRolloutRefWorker, CriticConfig, CriticWorker, load_config

MODEL = {"vocab_size": 128, "max_sequence_length": 64, "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
ROLLOUT = {"engine": "vllm", "prompt_length": 16, "response_length": 16}


def groups(**vllm: Any) -> list[GroupSpec]:
    rollout = ROLLOUT | {"vllm": {"python": "/opt/vllm/bin/python", **vllm}}
    actor = load_config(ActorConfig, {"model": MODEL, "rollout": rollout})
    critic = load_config(CriticConfig, {"model": MODEL})
    return [
        GroupSpec(
            "actor", Role.ActorRollout, RayClassWithInitArgs(ActorRolloutRefWorker, config=actor, role="actor_rollout")
        ),
        GroupSpec("critic", Role.Critic, RayClassWithInitArgs(CriticWorker, config=critic)),
    ]


def reserved(specs: list[GroupSpec], offload: str, *pools: str) -> int:
    spec = {name: [2] for name in pools}
    manager = ResourcePoolManager(spec, dict(zip((Role.ActorRollout, Role.Critic), pools, strict=True)), use_gpu=True)
    changed = reserved_for_others(specs, manager, offload)
    assert [spec.name for spec in changed] == ["actor", "critic"] and changed[1] is specs[1]
    return changed[0].config.rollout.vllm.reserved_bytes


@pytest.mark.simulated
def test_a_critic_that_stays_on_the_gpu_is_counted_with_its_largest_call() -> None:
    embedding, layer, value_head = 128 * 64, 4 * 64**2 + 3 * 64 * 4 * 64 + 2 * 64, 64
    weights = embedding + 2 * layer + 64 + value_head
    per_weight = 2 + 4 + 12 / 2  # in bfloat16; gradients and, over two ranks, the optimizer in float32
    assert reserved(groups(), "never", "pool", "pool") > per_weight * weights


@pytest.mark.parametrize(
    ("offload", "pools"), [("auto", ("pool", "pool")), ("never", ("one", "other"))], ids=["in-turns", "other-gpus"]
)
def test_nothing_is_reserved_for_roles_that_are_not_there(offload: str, pools: tuple[str, str]) -> None:
    assert reserved(groups(), offload, *pools) == 0


def test_a_size_of_the_configuration_stays() -> None:
    assert reserved(groups(reserved_bytes=7), "never", "pool", "pool") == 7
