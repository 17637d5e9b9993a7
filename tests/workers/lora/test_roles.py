"""The reference of an actor with adapters is the actor, whatever the groups of the run."""

from __future__ import annotations

from typing import Any

import pytest

from mcontroller.errors import ConfigError
from tests.workers.roles import MODEL
from trainer.roles import Role, check_roles, role_workers
from trainer.run.config import RunConfig
from trainer.run.parts import roles_of
from workers.actor import ActorRolloutRefWorker
from workers.config import load_config

LORA = {"rank": 4, "alpha": 8.0}
DATA = {"train": {"path": "train.jsonl"}}


def config_of(**changes: Any) -> RunConfig:
    rollout = {"prompt_length": 8, "response_length": 8, "n": 2}
    defaults = {
        "data": DATA,
        "algorithm": {"adv_estimator": "rloo"},
        "actor_rollout_ref": {"model": MODEL | {"lora": LORA}, "rollout": rollout},
    }
    return load_config(RunConfig, defaults, changes)


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({}, {"actor": "actor_rollout_ref"}),
        ({"ref": {"model": MODEL}}, {"actor": "actor_rollout_ref"}),
        ({"ref": {"model": MODEL | {"seed": 5}}}, {"actor": "actor_rollout", "ref": "ref"}),
        ({"rollout": {"model": MODEL}}, {"actor": "actor_ref", "rollout": "rollout"}),
    ],
    ids=["alone", "a reference of the same model", "a reference of another model", "a separate rollout"],
)
def test_no_second_model_is_built_for_the_reference(changes: dict[str, Any], groups: dict[str, str]) -> None:
    config = config_of(**changes)
    actual = {worker.name: worker.init.kwargs["role"] for worker in role_workers(config, roles_of(config))}
    assert actual == groups


BIASED = {
    "num_moe_experts": 4,
    "qk_layernorm": True,
    "transformer": {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
}
STILL = BIASED | {"transformer": BIASED["transformer"] | {"moe_router_bias_update_rate": 0.0}}  # type: ignore[operator]


@pytest.mark.parametrize(
    ("base", "policy", "group"),
    [
        (MODEL, {"train_only": ["*norm*weight"]}, "ref"),
        (MODEL | BIASED, {}, "ref"),
        (MODEL | STILL, {}, "actor"),
    ],
    ids=["norms are trained", "biases of routers move", "biases of routers stay"],
)
def test_section_of_the_base_is_a_group_if_updates_change_the_base(
    base: dict[str, Any], policy: dict[str, Any], group: str
) -> None:
    config = config_of(actor_rollout_ref={"model": base | {"lora": LORA} | policy}, ref={"model": base})
    actual = {worker.name: worker.init.kwargs["role"] for worker in role_workers(config, roles_of(config))}
    assert actual == ({"actor": "actor_rollout", "ref": "ref"} if group == "ref" else {"actor": "actor_rollout_ref"})


@pytest.mark.parametrize("changes", [{"warm_up": {"steps": 2}}, {"trainer": {"ref_sync_steps": 2}}])
def test_reference_that_would_move_is_rejected(changes: dict[str, Any]) -> None:
    config, mapping = config_of(**changes), {Role.ActorRolloutRef: ActorRolloutRefWorker}
    with pytest.raises(ConfigError) as caught:
        check_roles(config, mapping)
    assert caught.value.value == 2
