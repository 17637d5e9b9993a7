"""The trainer fetches the columns that it reads; the others stay on the workers, until another group reads them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import DataError
from tests.trainer.toy import ToyActor, ToyCritic, experience, next_letter, toy_config, toy_trainer
from trainer import AlgorithmConfig, Callback, Role
from trainer.columns import columns
from trainer.estimators.registry import register_advantage_estimator
from workers.columns import ROUTED_EXPERTS

RECEIVED: dict[str, DataProto] = {}
"""The batch that each update got last."""


class Actor(ToyActor):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        log_probs = self._log_probs(self.table, data)
        return DataProto.from_dict({"old_log_probs": log_probs, "entropys": log_probs.abs()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        RECEIVED["actor"] = data
        return DataProto(meta_info={"metrics": {"actor/lr": self.lr}})


class Critic(ToyCritic):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        RECEIVED["critic"] = data
        return DataProto(meta_info={"metrics": {"critic/vf_loss": 0.0}})


def trainer_of(config: Any = None, **others: Any) -> Any:
    RECEIVED.clear()
    config = config or dataclasses.replace(toy_config(1), algorithm=AlgorithmConfig(use_kl_in_reward=False))
    roles = {Role.ActorRolloutRef: Actor, Role.Critic: Critic}
    trainer = toy_trainer(config, roles, val_dataset=None, **others)
    trainer.init_workers()
    return trainer


def reading(*names: str) -> Any:
    def score(batch: DataProto) -> Any:
        score.columns = set(batch.tensors())
        return next_letter(batch)

    score.reads = names
    return score


def test_the_controller_has_columns_of_advantages_and_the_updates_get_all():
    with trainer_of(reward_fn=reading("responses")) as trainer:
        batch, _, _ = experience(trainer)
        local = {"responses", "response_mask", "sequence_tokens", "prompt_numbers", "token_level_scores"}
        away = {"input_ids", "attention_mask", "old_log_probs", "entropys", "values"}
        assert set(batch.local_tensors()) == local and set(batch.tensor_names) == local | away
        batch, _ = trainer.step.advantages(batch)
        computed = {"token_level_rewards", "advantages", "returns"}
        assert set(batch.local_tensors()) == local | computed | {"values"}
        trainer.train_step(trainer.draw())
    assert set(RECEIVED["actor"].tensors()) == set(RECEIVED["critic"].tensors()) == local | away | computed
    received = RECEIVED["actor"].batch
    assert torch.equal(received["entropys"], received["old_log_probs"].abs())


def reads(*names: str) -> Any:
    """Return the ``columns_read`` of a worker class whose update reads these columns of the stages."""
    return classmethod(lambda cls, config: names)


def test_an_update_gets_no_column_that_its_worker_class_does_not_read():
    class Reading(Actor):
        columns_read = reads("advantages", "old_log_probs")

    roles = {Role.ActorRolloutRef: Reading, Role.Critic: Critic}
    config = dataclasses.replace(toy_config(1), algorithm=AlgorithmConfig(use_kl_in_reward=False))
    RECEIVED.clear()
    with toy_trainer(config, roles, val_dataset=None, reward_fn=reading("responses")) as trainer:
        trainer.init_workers()
        trainer.fit()
    of_actor, of_critic = (RECEIVED[name].tensors() for name in ("actor", "critic"))
    not_read = {"entropys", "values", "token_level_scores", "token_level_rewards", "returns"}
    assert of_critic.keys() - of_actor.keys() == not_read
    assert all(torch.equal(column, of_critic[name]) for name, column in of_actor.items())


def test_the_experts_of_tokens_go_to_the_actor_alone():
    """The largest column of a mixture of experts is sent to the calls that replay them, and not to the controller."""
    recorded: dict[str, set[str]] = {}

    class Routed(Actor):
        columns_read = reads("advantages", "old_log_probs", ROUTED_EXPERTS)

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
        def generate_sequences(self, prompts: DataProto) -> DataProto:
            generated = super().generate_sequences(prompts)
            shape = (*generated.batch["input_ids"].shape, 3, 2)
            return generated.with_tensors({ROUTED_EXPERTS: torch.zeros(shape, dtype=torch.int8)})

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def compute_log_prob(self, data: DataProto) -> DataProto:
            recorded["log-probs"] = set(data.tensors())
            return super().compute_log_prob(data)

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def compute_ref_log_prob(self, data: DataProto) -> DataProto:
            recorded["reference"] = set(data.tensors())
            return super().compute_ref_log_prob(data)

    class ReadingCritic(Critic):
        columns_read = reads("values", "returns")

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def compute_values(self, data: DataProto) -> DataProto:
            recorded["values"] = set(data.tensors())
            return super().compute_values(data)

    every = reading()
    del every.reads
    roles = {Role.ActorRolloutRef: Routed, Role.Critic: ReadingCritic}
    RECEIVED.clear()
    with toy_trainer(toy_config(1), roles, val_dataset=None, reward_fn=every) as trainer:
        trainer.init_workers()
        batch, _, _ = experience(trainer)
        trainer.fit()
    assert ROUTED_EXPERTS in batch.tensor_names and ROUTED_EXPERTS not in batch.local_tensors()
    assert ROUTED_EXPERTS in recorded["log-probs"] and ROUTED_EXPERTS in RECEIVED["actor"].tensors()
    others = (recorded["reference"], recorded["values"], set(RECEIVED["critic"].tensors()), every.columns)
    assert all("responses" in columns and ROUTED_EXPERTS not in columns for columns in others)


def test_a_reward_function_sees_the_columns_that_it_names_or_all():
    named = reading("responses")
    with trainer_of(reward_fn=named) as trainer:
        trainer.fit()
    assert {"responses", "response_mask"} <= named.columns and "input_ids" not in named.columns
    every = reading()
    del every.reads
    with trainer_of(reward_fn=every) as trainer:
        trainer.fit()
    assert {"responses", "response_mask", "input_ids", "attention_mask"} <= every.columns


@pytest.mark.parametrize("whole", [True, False], ids=["all", "named"])
def test_an_estimator_reads_any_column_and_fetches_those_that_it_reads(whole):
    name = f"entropy_of_{whole}_for_this_test"

    @register_advantage_estimator(name, needs_critic=True)
    def of_entropy(data: DataProto, *, gamma: float, lam: float) -> tuple[torch.Tensor, torch.Tensor]:
        column = data.batch["entropys"] if whole else columns(data, "entropys")[0]
        of_entropy.fetched = set(data.local_tensors())
        return column, column

    rule = AlgorithmConfig(adv_estimator=name, use_kl_in_reward=False)
    with trainer_of(dataclasses.replace(toy_config(1), algorithm=rule)) as trainer:
        trainer.fit()
    assert ("input_ids" in of_entropy.fetched) is whole
    assert torch.equal(RECEIVED["actor"].batch["advantages"], RECEIVED["actor"].batch["entropys"])


def test_a_callback_sees_all_columns_and_its_changes_are_trained_on():
    class Doubles(Callback):
        def batch_ready(self, trainer: Any, batch: DataProto) -> None:
            assert {"input_ids", "old_log_probs", "advantages"} <= set(batch.tensors())
            batch.batch["old_log_probs"] = torch.full_like(batch.batch["old_log_probs"], 7.0)

    with trainer_of(callbacks=[Doubles()]) as trainer:
        trainer.fit()
    assert (RECEIVED["actor"].batch["old_log_probs"] == 7.0).all()


def test_responses_without_an_attention_mask_are_rejected():
    class Without(Actor):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
        def generate_sequences(self, prompts: DataProto) -> DataProto:
            ones = torch.ones(len(prompts), 1, dtype=torch.long)
            return DataProto.from_dict({"responses": ones, "response_mask": ones})

    roles = {Role.ActorRolloutRef: Without, Role.Critic: Critic}
    with toy_trainer(toy_config(1), roles, val_dataset=None, reward_fn=reading("responses")) as trainer:
        trainer.init_workers()
        with pytest.raises(DataError) as caught:
            trainer.fit()
        assert caught.value.columns == ["attention_mask"]
