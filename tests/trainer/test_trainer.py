from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import ray
import torch

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError, DataError
from mcontroller.worker import Worker
from tests.trainer.toy import (
    CALLS,
    LETTERS,
    ToyActor,
    ToyCritic,
    ToyTokenizer,
    demonstrations,
    next_letter,
    problems,
    toy_config,
    toy_trainer,
)
from trainer import (
    AlgorithmConfig,
    Callback,
    Display,
    FilterGroupsConfig,
    ImportanceConfig,
    KLControlConfig,
    PPOConfig,
    Role,
    ValidationConfig,
    WarmUpConfig,
    rule_only,
)
from trainer.saving.run_record import read_record
from workers.role_worker import PolicySettings


class Records:
    """A tracker that records its metrics."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, metrics, step, phase):
        self.lines.append((step, dict(metrics)))

    def close(self):
        self.closed = True

    def of(self, name):
        return [(step, metrics[name]) for step, metrics in self.lines if name in metrics]


TOYS = {Role.ActorRolloutRef: ToyActor, Role.Critic: ToyCritic}


def started(trainer):
    trainer.init_workers()
    CALLS.clear()
    return trainer


def table(trainer, group="actor"):
    return trainer.groups[group].workers[0].table.clone()


def test_ppo_learns_the_task_and_reports_held_out_accuracy_before_and_after():
    records = Records()
    with started(toy_trainer(toy_config(30, test_freq=10), trackers=[records])) as trainer:
        trainer.fit()
    held_out = records.of("held_out/accuracy")
    assert [step for step, _ in held_out] == [0, 10, 20, 30]
    assert held_out[0][1] <= 0.2 and held_out[-1][1] == 1.0
    assert records.of("train/score")[-1][1] > 0.9 > 0.4 > records.of("train/score")[0][1]
    assert records.of("critic/explained_variance")[0][1] == 0.0


def test_a_step_calls_the_roles_in_the_order_of_the_algorithm():
    with started(toy_trainer(toy_config(1), val_dataset=None)) as trainer:
        trainer.fit()
    scored = ["generate_sequences", "compute_log_prob", "compute_ref_log_prob", "compute_values"]
    assert [*scored, "update_critic", "update_actor"] == CALLS


def test_the_policy_is_not_trained_while_the_critic_warms_up():
    with started(toy_trainer(toy_config(3, critic_warmup=2), val_dataset=None)) as trainer:
        trainer.fit()
        assert CALLS.count("update_critic") == 3 and CALLS.count("update_actor") == 1
        assert table(trainer, "critic").any()


def test_the_reference_is_the_policy_after_the_warm_up():
    config = dataclasses.replace(toy_config(5), warm_up=WarmUpConfig(steps=7, batch_size=12))
    records = Records()
    with started(toy_trainer(config, warm_up_dataset=demonstrations(12), trackers=[records])) as trainer:
        trainer.fit()
        reference = trainer.actor.workers[0].reference
    after_seven = torch.zeros(6, 6)
    after_seven[torch.arange(6), (torch.arange(6) + 1) % 6] = 7 * 2 * 0.1
    torch.testing.assert_close(reference, after_seven)
    assert [step for step, _ in records.of("sft/loss")] == [1, 2, 3, 4, 5, 6, 7]
    assert records.of("held_out/accuracy")[0] == (0, 1.0)


def test_the_kl_penalty_lowers_the_reward_by_its_weight():
    algorithm = AlgorithmConfig(kl_ctrl=KLControlConfig(kl_coef=0.5))
    records = Records()
    config = dataclasses.replace(toy_config(4), algorithm=algorithm)
    with started(toy_trainer(config, trackers=[records])) as trainer:
        trainer.fit()
    kl = [value for _, value in records.of("actor/reward_kl_penalty")]
    assert kl[0] == 0.0 and kl[-1] > 0.0
    assert {value for _, value in records.of("actor/reward_kl_penalty_coeff")} == {0.5}


def test_held_out_means_weigh_every_problem_once_for_any_batch_size():
    means = []
    for size in (0, 4, 1):
        config = toy_config(0)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, val_batch_size=size))
        with started(toy_trainer(config)) as trainer:
            trainer.actor.workers[0].table[2, 3] = 1.0
            means.append(trainer.validate()["held_out/accuracy"])
    # Of the 10 problems, letter 2 is there twice, and letter 5, whose answer is the argmax of a row of zeros, once.
    assert means == pytest.approx([0.3, 0.3, 0.3])


def test_an_estimator_without_a_critic_starts_none():
    algorithm = AlgorithmConfig(adv_estimator="reinforce_plus_plus", use_kl_in_reward=False)
    config = dataclasses.replace(toy_config(2), algorithm=algorithm)
    with started(toy_trainer(config)) as trainer:
        trainer.fit()
        assert list(trainer.groups) == ["actor"]
    assert "compute_values" not in CALLS


def test_worker_classes_may_be_given_as_ray_actors():
    with started(toy_trainer(toy_config(1), {role: ray.remote(cls) for role, cls in TOYS.items()})) as trainer:
        trainer.fit()
        assert [type(group.workers[0]) for group in trainer.groups.values()] == [ToyActor, ToyCritic]


def test_a_resumed_run_equals_one_that_did_not_stop(tmp_path):
    algorithm = AlgorithmConfig(kl_ctrl=KLControlConfig(type="adaptive", kl_coef=0.1, horizon=100))

    def trained(steps, **trainer):
        config = toy_config(steps, default_local_dir=str(tmp_path / "kept"), **trainer)
        trainer = started(toy_trainer(dataclasses.replace(config, algorithm=algorithm), val_dataset=None))
        trainer.fit()
        return trainer

    whole, _ = trained(6), trained(3, save_freq=0)
    second = trained(6, resume=True)
    assert CALLS.count("update_actor") == 3 and second.global_steps == 6
    torch.testing.assert_close(table(second), table(whole), rtol=0, atol=0)
    torch.testing.assert_close(table(second, "critic"), table(whole, "critic"), rtol=0, atol=0)
    assert second.step.kl_ctrl.value == whole.step.kl_ctrl.value != 0.1


@pytest.mark.parametrize("always", [False, True])
def test_the_last_save_of_a_run_is_reshardable_and_others_if_configured(tmp_path, always):
    saves = []

    class Actor(ToyActor):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def save_checkpoint(self, path, global_step, max_to_keep=None, asynchronous=False, reshardable=True):
            saves.append((global_step, reshardable))
            return super().save_checkpoint(path, global_step, max_to_keep)

    config = toy_config(3, save_freq=1, save_reshardable=always, default_local_dir=str(tmp_path))
    started(toy_trainer(config, {Role.ActorRolloutRef: Actor, Role.Critic: ToyCritic}, val_dataset=None)).fit()
    assert saves == [(1, always), (2, always), (3, True)]


def test_the_state_of_a_program_is_saved_and_loaded_with_the_run(tmp_path):
    class Loader:
        position = 0

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, state):
            self.position = state["position"]

    def with_loader(loader, **trainer):
        config = toy_config(1, save_freq=0, default_local_dir=str(tmp_path), **trainer)
        return started(toy_trainer(config, val_dataset=None, stateful={"loader": loader}))

    first, second = Loader(), Loader()
    first.position = 7
    with_loader(first).fit()
    with_loader(second, resume=True).fit()
    assert second.position == 7
    first.position = object()
    with pytest.raises(DataError) as caught:
        with_loader(first).save_checkpoint()
    assert caught.value.key == "loader"


def test_the_state_of_a_program_is_that_of_its_step_also_if_it_is_not_copied(tmp_path):
    """Saves become those of the run in a later step."""

    class Loader(Callback):
        def __init__(self):
            self.state = {"position": 0}

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

        def step_ended(self, trainer, metrics):
            self.state["position"] += 1

    loader = Loader()
    config = toy_config(3, save_freq=1, default_local_dir=str(tmp_path))
    started(toy_trainer(config, val_dataset=None, stateful={"loader": loader}, callbacks=[loader])).fit()
    assert [save.state.program["loader"]["position"] for save in read_record(tmp_path).saves()] == [3, 2, 1]


def test_a_reward_that_can_start_early_starts_before_the_other_stages():
    class Early:
        def start(self, batch):
            CALLS.append("reward starts")

        def __call__(self, batch):
            CALLS.append("reward")
            return next_letter(batch)

    with started(toy_trainer(toy_config(1), reward_fn=Early(), val_dataset=None)) as trainer:
        trainer.fit()
    stages = [call for call in CALLS if call in ("generate_sequences", "reward starts", "compute_log_prob", "reward")]
    assert stages[:2] == ["generate_sequences", "reward starts"] and stages[-1] == "reward"


def test_resuming_without_a_checkpoint_or_with_one_of_other_roles_is_rejected(tmp_path):
    config = toy_config(1, save_freq=0, default_local_dir=str(tmp_path))
    with pytest.raises(DataError) as caught:
        toy_trainer(toy_config(1, resume=True, default_local_dir=str(tmp_path)))
    assert caught.value.path == str(tmp_path / "trainer.json")
    started(toy_trainer(config)).fit()
    without_critic = dataclasses.replace(config, algorithm=AlgorithmConfig(adv_estimator="grpo"))
    resumed = dataclasses.replace(without_critic, trainer=dataclasses.replace(config.trainer, resume=True))
    with pytest.raises(DataError) as caught:  # before any process starts
        toy_trainer(resumed)
    assert (caught.value.saved, caught.value.groups) == (["actor", "critic"], ["actor"])


def test_leaving_the_block_ends_groups_and_trackers_after_a_failure_too():
    closed = []
    display = type("Watching", (Display,), {"close": lambda self: closed.append("display")})()
    records = Records()
    with (
        pytest.raises(ZeroDivisionError),
        toy_trainer(toy_config(1), reward_fn=lambda batch: 1 / 0, trackers=[records], display=display) as trainer,
    ):
        trainer.init_workers()
        trainer.fit()
    assert closed == ["display"] and records.closed
    with pytest.raises(Exception) as caught:
        trainer.actor.init_model()
    assert (caught.value.role, caught.value.first_cause) == ("actor", None)


@pytest.mark.parametrize(
    ("roles", "key"),
    [
        ({Role.Critic: ToyCritic}, "role_worker_mapping"),
        ({Role.ActorRolloutRef: ToyActor}, "role_worker_mapping"),
        ({Role.ActorRollout: ToyActor, Role.Critic: ToyCritic}, "role_worker_mapping"),
        (TOYS | {Role.RewardModel: ToyCritic}, "role_worker_mapping"),
    ],
)
def test_roles_that_do_not_fit_the_configuration_are_rejected_at_the_start(roles, key):
    CALLS.clear()
    with pytest.raises(ConfigError) as caught:
        toy_trainer(toy_config(), roles, combine_rewards=rule_only)
    assert caught.value.key == key
    assert CALLS == []


def test_a_configuration_that_a_class_rejects_is_rejected_at_the_start():
    class Strict(ToyCritic):
        @classmethod
        def check_init(cls, config):
            raise ConfigError(f"{config} is not a configuration", key="config")

    CALLS.clear()
    with pytest.raises(ConfigError) as caught:
        toy_trainer(toy_config(), TOYS | {Role.Critic: Strict})
    assert caught.value.key == "config"
    assert CALLS == []


def test_a_warm_up_without_demonstrations_or_data_is_rejected():
    with pytest.raises(DataError) as caught:
        toy_trainer(toy_config(1), val_dataset=[])
    assert caught.value.rows == 0
    with pytest.raises(ConfigError) as caught:
        toy_trainer(dataclasses.replace(toy_config(), warm_up=WarmUpConfig(steps=1)))
    assert caught.value.key == "warm_up"
    with pytest.raises(DataError) as caught:
        toy_trainer(toy_config(), train_dataset=problems(10))
    assert (caught.value.rows, caught.value.batch_size) == (10, 48)


def test_the_seconds_of_a_step_are_reported_by_stage_and_add_up():
    records = Records()
    with started(toy_trainer(toy_config(2), trackers=[records])) as trainer:
        trainer.fit()
    step = records.lines[-1][1]
    stages = {name: value for name, value in step.items() if name.startswith("timing_s/") and name != "timing_s/step"}
    assert {"timing_s/generate", "timing_s/update_actor", "timing_s/update_critic"} <= set(stages)
    assert 0 < sum(stages.values()) <= step["timing_s/step"]
    assert step["perf/tokens_per_s"] == pytest.approx(48 * 2 / step["timing_s/step"])


class Group(ToyActor):
    """A policy that answers three times, with a KL loss of its configuration."""

    @classmethod
    def policy_settings(cls, config):
        return PolicySettings(n=config.rollout.n, use_kl_loss=config.use_kl_loss)

    def __init__(self, config: GroupConfig, role: str) -> None:
        super().__init__(0.5, role)
        CALLS.append(f"use_kl_loss={config.use_kl_loss}")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def generate_sequences(self, prompts):
        prompts.meta_info.setdefault("n", 3)
        return super().generate_sequences(prompts)


@dataclasses.dataclass(frozen=True)
class RolloutOfGroup:
    n: int = 3


@dataclasses.dataclass(frozen=True)
class GroupConfig:
    rollout: RolloutOfGroup = RolloutOfGroup()
    use_kl_loss: bool | None = None


def group_config(name: str, actor: GroupConfig = GroupConfig(), **algorithm: Any) -> PPOConfig:
    chosen = AlgorithmConfig(adv_estimator=name, **algorithm)
    return dataclasses.replace(toy_config(1), actor_rollout_ref=actor, algorithm=chosen)


def test_without_a_critic_the_kl_is_in_the_loss_by_default():
    def options_of(role, config):
        CALLS.clear()
        with toy_trainer(config, {role: Group}, val_dataset=None) as trainer:
            trainer.init_workers()
            trainer.fit()
        return CALLS[0], "compute_ref_log_prob" in CALLS

    assert options_of(Role.ActorRolloutRef, group_config("grpo")) == ("use_kl_loss=True", True)
    assert options_of(Role.ActorRollout, group_config("grpo")) == ("use_kl_loss=False", False)
    assert options_of(Role.ActorRolloutRef, group_config("grpo", GroupConfig(use_kl_loss=False))) == (
        "use_kl_loss=False",
        False,
    )
    assert options_of(Role.ActorRolloutRef, group_config("rloo", use_kl_in_reward=True)) == ("use_kl_loss=False", True)
    with pytest.raises(ConfigError) as caught:
        toy_trainer(group_config("grpo", GroupConfig(use_kl_loss=True)), {Role.ActorRollout: Group})
    assert (caught.value.key, caught.value.value) == ("role_worker_mapping", "Role.ActorRollout")


def test_a_reference_that_nothing_reads_is_not_built():
    config = group_config("grpo", GroupConfig(use_kl_loss=False))
    with toy_trainer(config, {Role.ActorRolloutRef: Group}, val_dataset=None) as trainer:
        trainer.init_workers()
        assert trainer.reference is None
        assert [worker.init.kwargs["role"] for worker in trainer.run_groups.workers] == ["actor_rollout"]
    apart = dataclasses.replace(config, ref=0.5)
    with toy_trainer(apart, {Role.ActorRollout: Group, Role.RefPolicy: ToyActor}, val_dataset=None) as trainer:
        trainer.init_workers()
        assert list(trainer.groups) == ["actor"]
    moved = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, ref_sync_steps=1))
    with pytest.raises(ConfigError) as caught:
        toy_trainer(moved, {Role.ActorRolloutRef: Group})
    assert (caught.value.key, caught.value.value) == ("trainer.ref_sync_steps", 1)


def test_the_lengths_of_an_actor_are_checked_before_any_process_starts():
    class TooLong(Group):
        @classmethod
        def check_run(cls, config):
            raise ConfigError("prompts and responses are too long", key="rollout.response_length")

    with pytest.raises(ConfigError) as caught:
        toy_trainer(group_config("grpo"), {Role.ActorRolloutRef: TooLong})
    assert caught.value.key == "rollout.response_length"


def test_a_worker_class_that_is_no_role_worker_is_rejected():
    class Bare(Worker):
        pass

    with pytest.raises(ConfigError) as caught:
        toy_trainer(toy_config(1), TOYS | {Role.Critic: Bare})
    assert caught.value.key == "role_worker_mapping" and caught.value.value == "Bare"


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "filter_groups"])
def test_one_response_per_prompt_is_rejected_by_what_compares_them(name):
    config = group_config("remax" if name == "filter_groups" else name, GroupConfig(RolloutOfGroup(1)))
    if name == "filter_groups":
        filtered = dataclasses.replace(config.algorithm, filter_groups=FilterGroupsConfig(enable=True))
        config = dataclasses.replace(config, algorithm=filtered)
    with pytest.raises(ConfigError) as caught:
        toy_trainer(config, {Role.ActorRolloutRef: Group})
    assert (caught.value.key, caught.value.value) == ("actor_rollout_ref.rollout.n", 1)


def test_remax_learns_from_the_difference_to_the_greedy_response():
    records = Records()
    config = dataclasses.replace(toy_config(30, test_freq=-1), algorithm=AlgorithmConfig(adv_estimator="remax"))
    with started(toy_trainer(config, trackers=[records])) as trainer:
        trainer.fit()
    assert CALLS.count("generate_sequences") == 2 * 30 + 1  # and once for validation
    assert records.of("train/score")[-1][1] > 0.9


def test_a_reward_model_alone_scores_training_and_validation():
    class ToyReward(ToyCritic):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def compute_rm_score(self, data):
            CALLS.append("compute_rm_score")
            right = data.batch["responses"] == (data.batch["input_ids"][:, -2:-1] + 1) % LETTERS
            return DataProto.from_dict({"rm_scores": right.float()})

    records = Records()
    config = dataclasses.replace(toy_config(30, test_freq=-1), reward_model=0.0)
    with started(toy_trainer(config, TOYS | {Role.RewardModel: ToyReward}, reward_fn=None, trackers=[records])) as one:
        one.fit()
    assert records.of("train/score")[-1][1] > 0.9 and records.of("held_out/score")[0][1] < 0.5
    assert CALLS.count("compute_rm_score") == 31


def test_validation_with_several_samples_reports_their_mean_and_the_best():
    config = dataclasses.replace(toy_config(0), validation=ValidationConfig(n=40, do_sample=True))
    with started(toy_trainer(config)) as trainer:
        metrics = trainer.validate()
    assert metrics["held_out/best_at_40"] == 1.0 and metrics["held_out/score"] < 0.5
    with pytest.raises(ConfigError) as caught:
        ValidationConfig(n=4)
    assert (caught.value.key, caught.value.value) == ("validation.n", 4)


def test_a_resumed_run_keeps_the_configured_weight_of_a_fixed_penalty(tmp_path):
    def config(weight, steps, **trainer):
        chosen = toy_config(steps, default_local_dir=str(tmp_path), **trainer)
        return dataclasses.replace(chosen, algorithm=AlgorithmConfig(kl_ctrl=KLControlConfig(kl_coef=weight)))

    started(toy_trainer(config(0.5, 1, save_freq=0), val_dataset=None)).fit()
    second = started(toy_trainer(config(0.25, 2, resume=True), val_dataset=None))
    second.fit()
    assert second.step.kl_ctrl.value == 0.25


def test_a_run_without_save_freq_saves_when_save_minutes_are_over(tmp_path):
    def kept(minutes):
        path = tmp_path / str(minutes)
        with started(toy_trainer(toy_config(3, save_freq=0, save_minutes=minutes, default_local_dir=str(path)))) as one:
            one.fit()
        return sorted(entry.name for entry in (path / "actor").glob("global_step_*"))

    assert kept(60.0) == kept(0.0) == ["global_step_3"]
    assert kept(1e-9) == ["global_step_1", "global_step_2", "global_step_3"]


def test_a_critic_of_constant_returns_has_no_explained_variance():
    records = Records()
    config = toy_config(2, val_before_train=False)
    with started(toy_trainer(config, reward_fn=lambda batch: [1.0] * len(batch), trackers=[records])) as trainer:
        trainer.fit()
    assert records.of("critic/explained_variance") == []
    assert records.of("advantages/abs_mean")


class Grouped(ToyActor):
    """A policy that answers twice, with the log-probabilities of its samples, and that can be updated in one step."""

    @classmethod
    def updates_once(cls, config, rows, n):
        return (config, rows, n) == (0.5, 96, 2)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def generate_sequences(self, prompts):
        prompts.meta_info.setdefault("n", 2)
        batch = super().generate_sequences(prompts)
        return batch.union(DataProto.from_dict({"rollout_log_probs": self._log_probs(self.table, batch)}))


def filtered(steps: int, tmp_path: Any, **trainer: Any) -> Any:
    algorithm = AlgorithmConfig(adv_estimator="grpo", filter_groups=FilterGroupsConfig(enable=True, max_batches=4))
    config = toy_config(steps, default_local_dir=str(tmp_path), **trainer)
    records = Records()
    config = dataclasses.replace(config, algorithm=algorithm)
    run = started(toy_trainer(config, {Role.ActorRolloutRef: Grouped}, val_dataset=None, trackers=[records]))
    run.fit()
    return run, records


def test_dynamic_sampling_draws_groups_without_signal_again(tmp_path):
    _, records = filtered(2, tmp_path)
    step, later = (metrics for _, metrics in records.lines[1:])
    assert step["dynamic_sampling/batches"] in (3.0, 4.0) and step["dynamic_sampling/prompts_filled"] == 0.0
    assert step["dynamic_sampling/prompts_drawn"] == 48 * step["dynamic_sampling/batches"]
    assert 0.6 < step["train/frac_reward_zero_std"] < 0.9  # of two answers of six, one is right in 28% of the groups
    assert step["response/rows"] == 96 and step["train/prompts"] == 48 and step["train/n"] == 2
    assert step["advantages/abs_mean"] == pytest.approx(1.0, abs=1e-3)
    assert later["train/epoch"] > 2 and later["train/num_tokens"] == 2 * 96 * 2


def test_dynamic_sampling_is_bounded_and_resumes_at_the_next_batch(tmp_path):
    whole, records = filtered(8, tmp_path / "whole")
    assert records.lines[-1][1]["dynamic_sampling/batches"] == 4.0 < records.lines[-1][1]["train/epoch"]
    assert records.lines[-1][1]["dynamic_sampling/prompts_filled"] > 0
    filtered(4, tmp_path / "parts", save_freq=0)
    second, _ = filtered(8, tmp_path / "parts", resume=True)
    assert second.problems.count == whole.problems.count > 16
    torch.testing.assert_close(table(second), table(whole), rtol=0, atol=0)


@pytest.mark.parametrize(("choice", "passes"), [("auto", 0), ("policy", 2), ("rollout", 0)])
def test_the_pass_for_old_log_probabilities_is_made_if_something_reads_them(choice, passes):
    def trained(**algorithm):
        config = dataclasses.replace(toy_config(2), algorithm=AlgorithmConfig(adv_estimator="grpo", **algorithm))
        records = Records()
        run = started(toy_trainer(config, {Role.ActorRolloutRef: Grouped}, val_dataset=None, trackers=[records]))
        run.fit()
        return table(run), CALLS.count("compute_log_prob"), records.lines[-1][1]

    weights, calls, metrics = trained(old_log_probs=choice)
    assert calls == passes
    assert ("training/rollout_probs_diff_max" in metrics) == (choice == "policy")
    torch.testing.assert_close(weights, trained(old_log_probs="policy")[0], rtol=0, atol=0)
    assert trained(old_log_probs="auto", importance=ImportanceConfig(level="token"))[1] == 2
    _, calls, metrics = trained(old_log_probs="auto", importance=ImportanceConfig(off_policy_mask=0.1))
    assert calls == 2 and metrics["training/off_policy_masked_fraction"] == 0.0
    with pytest.raises(ConfigError) as caught:
        AlgorithmConfig(old_log_probs="rollout", importance=ImportanceConfig(level="token"))
    assert (caught.value.key, caught.value.value) == ("algorithm.old_log_probs", "rollout")


def test_callbacks_see_every_event_and_can_stop_the_run(tmp_path):
    events = []

    class Watch(Callback):
        def batch_ready(self, trainer, batch):
            events.append(f"batch with {'advantages' in batch.tensors()}")

        def step_ended(self, trainer, metrics):
            metrics["mine"] = 7.0
            if trainer.global_steps == 2:
                trainer.stop()

        def saved(self, trainer, directory):
            events.append(f"saved {trainer.global_steps}")

        def ended(self, trainer):
            events.append("ended")

    records = Records()
    config = toy_config(9, save_freq=0, default_local_dir=str(tmp_path))
    with started(toy_trainer(config, trackers=[records], callbacks=[Watch()])) as trainer:
        trainer.fit()
    assert events == ["batch with True", "batch with True", "saved 2", "ended"]
    assert records.of("mine") == [(1, 7.0), (2, 7.0)] and records.of("held_out/score")[-1][0] == 2


def test_the_reference_follows_the_policy_as_scheduled():
    mixes = []

    class Followed(ToyActor):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def sync_reference(self, mix=None):
            mixes.append(mix)
            self.reference = self.table.clone()

    config = toy_config(5, ref_sync_steps=2, ref_sync_mix=0.6)
    with started(toy_trainer(config, TOYS | {Role.ActorRolloutRef: Followed}, val_dataset=None)) as trainer:
        trainer.fit()
    assert mixes == [None, 0.6, 0.6]
    with pytest.raises(ConfigError) as caught:
        roles = {Role.ActorRollout: ToyActor, Role.RefPolicy: ToyActor, Role.Critic: ToyCritic}
        toy_trainer(dataclasses.replace(config, ref=0.5), roles)
    assert (caught.value.key, caught.value.value) == (
        "role_worker_mapping",
        "Role.ActorRollout, Role.RefPolicy, Role.Critic",
    )


def test_truncated_responses_are_left_out_of_the_losses():
    recorded = []

    class Masked(ToyActor):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def update_actor(self, data):
            recorded.append(data.batch["response_mask"].clone())
            return super().update_actor(data)

    class StopsAtZero(ToyTokenizer):
        eos_token_id = 0

    algorithm = AlgorithmConfig(adv_estimator="remax", mask_truncated=True)
    config = dataclasses.replace(toy_config(1), algorithm=algorithm)
    records = Records()
    others = {"val_dataset": None, "tokenizer": StopsAtZero(), "trackers": [records]}
    with started(toy_trainer(config, {Role.ActorRolloutRef: Masked}, **others)) as trainer:
        trainer.fit()
    kept = float(recorded[0].float().mean())
    assert 0 < kept < 0.5 and records.of("response/truncated") == [(1, pytest.approx(1 - kept))]
