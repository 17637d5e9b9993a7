"""What cannot be recorded or replayed is rejected by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from mcontroller.errors import ConfigError, DataError
from tests.ranks import run_ranks
from tests.workers.roles import MODEL
from tests.workers.router_replay.setup import EXPERTS, MIXTURE, batch_with_experts, policy
from trainer import AlgorithmConfig, PPOConfig, Role
from trainer.roles import check_roles
from workers import ROLLOUT_ENGINES, ActorRolloutRefWorker, RolloutEngine
from workers.config import ActorConfig, load_config

ROLLOUT = {"prompt_length": 8, "response_length": 8}


def config_of(mode: str, **changes: Any) -> Any:
    return load_config(ActorConfig, {"model": MIXTURE, "router_replay": mode, "rollout": ROLLOUT} | changes)


@pytest.mark.parametrize(
    ("mode", "changes", "key", "value"),
    [
        ("always", {}, "router_replay", "always"),
        ("rollout", {"model": MODEL}, "router_replay", "rollout"),
        (
            "old_log_probs",
            {"model": MIXTURE | {"transformer": {"moe_router_fusion": True}}},
            "model.transformer.moe_router_fusion",
            True,
        ),
    ],
)
def test_configurations_that_cannot_be_replayed_are_rejected(
    mode: str, changes: dict[str, Any], key: str, value: Any
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(mode, **changes)
    assert (caught.value.key, caught.value.value) == (key, value)


def test_engine_that_returns_no_experts_is_rejected_before_any_process_starts() -> None:
    ROLLOUT_ENGINES.add("plain_for_router_replay", RolloutEngine(lambda config: None, lambda worker: None))
    chosen = {"rollout": ROLLOUT | {"engine": "plain_for_router_replay"}}
    for mode in ("none", "old_log_probs"):
        ActorRolloutRefWorker.check_init(config_of(mode, **chosen), role="actor_rollout")
    with pytest.raises(ConfigError) as caught:
        ActorRolloutRefWorker.check_init(config_of("rollout", **chosen), role="actor_rollout")
    assert (caught.value.key, caught.value.value) == ("router_replay", "rollout")


def test_groups_of_their_own_must_agree_on_what_the_rollout_records() -> None:
    check = ActorRolloutRefWorker.check_transfer
    for actor, rollout in (("rollout", "rollout"), ("old_log_probs", "none"), ("none", "none")):
        check(config_of(actor), config_of(rollout))
    for actor, rollout in (("rollout", "none"), ("none", "rollout"), ("old_log_probs", "rollout")):
        with pytest.raises(ConfigError) as caught:
            check(config_of(actor), config_of(rollout))
        assert caught.value.key == "rollout.router_replay"
        assert caught.value.key == "rollout.router_replay"


def test_replay_of_a_pass_that_is_never_made_is_rejected() -> None:
    def run_of(mode: str, old_log_probs: str) -> PPOConfig:
        rule = AlgorithmConfig(adv_estimator="grpo", old_log_probs=old_log_probs)
        actor = dataclasses.replace(config_of(mode), rollout=dataclasses.replace(config_of(mode).rollout, n=4))
        return PPOConfig(actor_rollout_ref=actor, algorithm=rule)

    mapping = {Role.ActorRolloutRef: ActorRolloutRefWorker}
    check_roles(run_of("rollout", "rollout"), mapping)
    check_roles(run_of("old_log_probs", "auto"), mapping)
    with pytest.raises(ConfigError) as caught:
        check_roles(run_of("old_log_probs", "rollout"), mapping)
    assert (caught.value.key, caught.value.value) == ("actor_rollout_ref.router_replay", "old_log_probs")
    assert caught.value.key == "actor_rollout_ref.router_replay"


def rejected_columns() -> list[dict[str, Any]]:
    worker = policy({}, "rollout")
    batch = batch_with_experts()
    good = batch.batch["routed_experts"]
    valid = (good != -1).all(-1).nonzero()[0].tolist()
    outside, twice, half = good.clone(), good.clone(), good.clone()
    outside[*valid, 0] = EXPERTS
    twice[*valid, 0] = twice[*valid, 1]
    half[*valid, 0] = -1
    errors = []
    for column in (None, good[:, 1:], good[:, :, 1:], good.float(), outside, twice, half):
        wrong = batch.select([name for name in batch.tensors() if name != "routed_experts"])
        wrong = wrong if column is None else wrong.with_tensors({"routed_experts": column})
        for call in (worker.compute_log_prob, worker.update_actor, worker.forward_backward):
            with pytest.raises(DataError) as caught:
                call(wrong)
            errors.append(caught.value.fields)
    return errors


@pytest.mark.simulated
def test_experts_that_do_not_fit_are_rejected() -> None:
    errors = run_ranks(rejected_columns, 1)[0]
    methods = ("compute_log_prob", "update_actor", "forward_backward")
    assert [error["method"] for error in errors] == [*methods] * 7
    assert all(error["missing"] == ["routed_experts"] for error in errors[:3])
    assert all(error["column"] == "routed_experts" for error in errors[3:])


def needs_of_old_log_probs() -> list[str]:
    worker = policy({}, "old_log_probs", ppo_epochs=1, ppo_mini_batch_size=64)
    batch = batch_with_experts()
    names = set(batch.tensors()) - {"routed_experts"}
    with pytest.raises(DataError) as caught:
        worker.update_actor(batch.select(sorted(names)))
    worker.update_actor(batch.select(sorted(names - {"old_log_probs"})))  # one step, with its own log-probabilities
    return caught.value.missing


@pytest.mark.simulated
def test_update_without_the_pass_of_old_log_probs_needs_no_experts() -> None:
    assert run_ranks(needs_of_old_log_probs, 1) == [["routed_experts"]]


class OwnRouter(TopKRouter):
    """A router that chooses without asking."""

    def routing(self, logits: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.flatten(0, 1)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(self.topk).indices, True)
        return logits.masked_fill(~chosen, -torch.inf).softmax(-1), chosen


class WithOwnRouter(ActorRolloutRefWorker):
    def build_model(self) -> list[Any]:
        chunks = super().build_model()
        for module in chunks[0].modules():
            if isinstance(module, TopKRouter):
                module.__class__ = OwnRouter
        return chunks


def router_that_does_not_ask(mode: str, method: str) -> str:
    worker = policy({}, mode, worker_class=WithOwnRouter)
    with pytest.raises(ConfigError) as caught:
        getattr(worker, method)(batch_with_experts())
    return str(caught.value)


@pytest.mark.simulated
@pytest.mark.parametrize(("mode", "method"), [("old_log_probs", "compute_log_prob"), ("rollout", "update_actor")])
def test_router_that_does_not_ask_is_named(mode: str, method: str) -> None:
    message = run_ranks(router_that_does_not_ask, 1, mode, method)[0]
    assert "decoder.layers.0.mlp.router, a OwnRouter of megatron-core" in message
