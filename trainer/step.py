"""The algorithm of a step of PPO: responses, their scores, advantages, updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mcontroller.data.batch import DataProto
from mcontroller.data.meta import united
from trainer.columns import FAILED, TOKENS, columns, with_tokens, without
from trainer.config import PPOConfig
from trainer.data.tokenizers import Tokenizer, special_tokens, stop_tokens
from trainer.estimators.clips import clipped_advantages, clipped_scores
from trainer.estimators.registry import ADVANTAGE_ESTIMATORS, compute_advantage
from trainer.groups import RunGroups, TokenBalance
from trainer.kl import KL_CONTROLLERS, apply_kl_penalty
from trainer.metrics import over_ranks
from trainer.mismatch import TOKEN_VERSIONS, importance_weights, mismatch_metrics, version_metrics
from trainer.rewards.reward import Reward, RewardSources, Scores
from trainer.roles import response_limit
from trainer.rollout.asynchronous import AsynchronousGenerations
from trainer.rollout.generation import (
    GeneratedBatch,
    Generations,
    RolloutFunction,
    RolloutWeights,
    responses_to,
    staleness_metrics,
)
from trainer.selection import GroupFilter, penalized, trained_on, truncated_rows
from trainer.stages import OverlappingStages, StageCall, Stages
from trainer.summary import group_metrics, reward_metrics, signal_metrics
from workers.columns import ROUTED_EXPERTS


class PPOStep:
    """The parts of a step, in their order: ``score``, ``choose``, ``advantages``, ``update``.

    Args:
        config: the configuration of the run.
        tokenizer: its special tokens are passed to generation.
        groups: the groups of the run, which may start later.
        stages: the stages that run.
        rewards: the scores of responses.
        rollout_fn: the program's own rollout loop; None: one call.

    Attributes:
        weights: the weights of the group that generates.
        generations: the responses that are being generated.
        kl_ctrl: the weight of the KL penalty in the reward.
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Tokenizer,
        groups: RunGroups,
        stages: Stages,
        rewards: RewardSources,
        rollout_fn: RolloutFunction | None,
    ) -> None:
        self.config, self.tokenizer, self.groups, self.stages = config, tokenizer, groups, stages
        self.rewards, self.rollout_fn = rewards, rollout_fn
        self.kl_ctrl = KL_CONTROLLERS[config.algorithm.kl_ctrl.type](config.algorithm.kl_ctrl)
        self.balance = TokenBalance(groups, config.trainer.balance_tokens)
        self.weights = RolloutWeights(stages, config.trainer)
        ahead = config.trainer.max_staleness
        self.generations = (
            AsynchronousGenerations(config, stages, self.weights)
            if ahead > 1 or (ahead and rollout_fn is not None)
            else Generations(ahead, stages, self.weights)
        )

    def connect(self) -> None:
        """Generate with the groups that have started."""
        self.weights.connect(self.groups.actor, self.groups.rollout)
        self.generations.connect(self.groups.rollout, special_tokens(self.tokenizer), self.rollout_fn)

    def empty_groups(self, prompts: int) -> GroupFilter:
        """Return the responses of a step to so many prompts, which have not been generated yet."""
        pad = None if self.rollout_fn is None else self.tokenizer.pad_token_id
        return GroupFilter(self.config.algorithm.filter_groups, prompts, pad)

    def score(self, generated: GeneratedBatch, groups: GroupFilter) -> None:
        """Add responses with their scores to those of the step.

        Without ``algorithm.filter_groups``, they get log-probabilities and values at the same time, as far as they are
        needed; ``choose`` adds them otherwise. The tensors stay on the workers until they are read.
        """
        rule, batch, problem_columns = self.config.algorithm, generated.responses, generated.problem_columns
        started = self.rewards.start(batch, problem_columns)
        groups.metrics.add(generated.memory)
        groups.metrics.add(over_ranks(batch.meta_info.pop("metrics", {})), weight=len(batch))
        batch = with_tokens(batch, problem_columns)
        with self.stages.overlapping() as start:
            policies = [] if rule.filter_groups.enable else self.score_policies(batch, start)
            scores, reward = self.call_rewards(batch, problem_columns, start, started=started)
        batch = trained_on(self.with_results(batch, policies).union(scores), ~reward.row_scores().isnan())
        if ADVANTAGE_ESTIMATORS[rule.adv_estimator].needs_greedy:
            batch = self.with_greedy_scores(batch, generated.problems)
        groups.add(batch.union(problem_columns), reward)

    def choose(self, groups: GroupFilter) -> tuple[DataProto, Reward, dict[str, float]]:
        """Return the responses to train on, the reward of all that were generated, and metrics.

        With ``algorithm.filter_groups``, groups without a signal are replaced by groups of other problems first. The
        batch has the columns of its problems too.
        """
        rule = self.config.algorithm
        batch, choice_metrics = groups.batch()
        if rule.filter_groups.enable:
            with self.stages.overlapping() as start:
                policies = self.score_policies(batch, start)
            batch = self.with_results(batch, policies)
        metrics = united(groups.metrics.take(), self.generations.take_metrics(), choice_metrics, group_metrics(groups))
        if "old_log_probs" in batch.tensor_names and rule.old_log_probs != "rollout":
            metrics = united(metrics, mismatch_metrics(batch))
        if self.config.trainer.max_staleness:
            metrics = united(metrics, staleness_metrics(batch, self.weights.version))
            if TOKEN_VERSIONS in batch.tensor_names:
                metrics = united(metrics, version_metrics(batch, self.weights.version))
        reward = groups.reward()
        return batch, reward, united(metrics, reward_metrics("train", reward))

    def score_policies(self, batch: DataProto, start: OverlappingStages) -> list[StageCall]:
        """Start to compute log-probabilities of policy and reference and the critic's values, as far as needed."""
        rows, old, calls = batch.select(non_tensor_batch_keys=[]), self.config.algorithm.old_log_probs, []
        others = without(rows, [ROUTED_EXPERTS])
        once = self.groups.updates_once(len(rows), rows.meta_info.get("n", 1))
        if old == "policy" or (old == "auto" and not once):
            calls.append(start("old log-probs", self.balance.split(self.groups.actor.compute_log_prob), rows))
        if self.groups.reference is not None:
            calls.append(start("reference", self.balance.split(self.groups.reference.compute_ref_log_prob), others))
        if self.groups.critic is not None:
            calls.append(start("values", self.balance.split(self.groups.critic.compute_values), others))
        return calls

    def with_results(self, batch: DataProto, calls: Sequence[StageCall]) -> DataProto:
        """Return the batch with the results of ``score_policies``, and ``old_log_probs`` if they are the rollout's."""
        if self.config.algorithm.old_log_probs == "rollout":
            batch = batch.with_tensors({"old_log_probs": columns(batch, "rollout_log_probs")[0]})
        for call in calls:
            batch = batch.union(call.get())
        return batch

    def advantages(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Return the batch with rewards, ``advantages``, ``returns`` and importance weights, and their metrics."""
        rule = self.config.algorithm
        batch, clipped = clipped_scores(batch, rule.reward_clip)
        controller = self.kl_ctrl if rule.kl_in_reward else None
        batch, metrics = apply_kl_penalty(batch, controller, rule.kl_penalty, rule.kl_clip)
        batch = compute_advantage(batch, rule.adv_estimator, rule.gamma, rule.lam, rule.options())
        batch, limited = clipped_advantages(batch, rule.advantage_clip)
        metrics = united(metrics, clipped, limited, signal_metrics(batch))
        if rule.importance.is_on:
            weights, of_weights = importance_weights(batch, rule.importance)
            batch, metrics = batch.with_tensors({"importance_weights": weights}), united(metrics, of_weights)
        return batch, metrics

    def update(self, batch: DataProto, step: int) -> dict[str, float]:
        """Train critic and actor on the batch, and return their metrics.

        Args:
            batch: with ``advantages`` and ``returns``.
            step: number of steps before this one.
        """
        trainer = self.config.trainer
        batch = batch.select(non_tensor_batch_keys=[])
        if self.config.algorithm.mask_truncated:
            batch = trained_on(batch, ~truncated_rows(batch, stop_tokens(self.tokenizer)))
        if not bool(columns(batch, "response_mask")[0].any()):
            return {"actor/skipped_steps": 1.0}
        calls: list[StageCall] = []
        with self.stages.overlapping() as start:
            if self.groups.critic is not None:
                rows = without(batch, self.groups.columns_unread(self.groups.critic))
                update_critic = self.balance.split_update(self.groups.critic.update_critic, rows, step)
                calls.append(start("update critic", *update_critic))
            if step >= trainer.critic_warmup:
                rows = without(batch, self.groups.columns_unread(self.groups.actor))
                number = self.config.warm_up.steps + step - trainer.critic_warmup
                update_actor = self.balance.split_update(self.groups.actor.update_actor, rows, number)
                calls.append(start("update actor", *update_actor))
                self.weights.changed()
        return united(*(over_ranks(call.get().meta_info["metrics"]) for call in calls))

    def synchronize_reference(self, step: int) -> None:
        """Move the reference towards the policy if ``trainer.ref_sync_steps`` say so.

        Args:
            step: number of steps so far.
        """
        trainer, reference = self.config.trainer, self.groups.reference
        if trainer.ref_sync_steps and step % trainer.ref_sync_steps == 0 and reference is not None:
            with self.stages("reference", reference.sync_reference):
                reference.sync_reference(trainer.ref_sync_mix)

    def generate(self, problems: DataProto, **sampling: Any) -> GeneratedBatch:
        """Return the responses to the problems.

        Args:
            problems: rows of ``input_ids`` and ``attention_mask`` ``[prompt]``.
            sampling: fields of the rollout's configuration for this call.
        """
        sampling = special_tokens(self.tokenizer) | sampling
        return GeneratedBatch(problems, responses_to(problems, self.groups.rollout, sampling, self.rollout_fn))

    def call_rewards(
        self,
        batch: DataProto,
        problems: DataProto,
        start: OverlappingStages,
        *,
        held_out: bool = False,
        started: Callable[[], Scores] | None = None,
    ) -> tuple[DataProto, Reward]:
        """Return ``token_level_scores``, with the scores of the reward model, and the reward that they are from.

        Args:
            batch: responses.
            problems: the other columns of their problems, in the same order.
            start: starts the reward model; the reward function is called while the other stages run.
            held_out: whether the problems are held out: ``val_reward_fn`` scores them.
            started: the scores of the reward function, if it has been started.
        """
        scores = DataProto()
        if self.groups.reward_model is not None:
            stage, rows = "held-out" if held_out else "reward model", without(batch, [ROUTED_EXPERTS])
            score = self.groups.reward_model.compute_rm_score
            call = start(stage, self.balance.split(score) if TOKENS in rows.tensor_names else score, rows)
            scores = call.get()
        start.start_all()
        with self.stages("held-out" if held_out else "reward"):
            visible = self.rewards.visible(batch, held_out=held_out)
            reward = self.rewards.score(visible.union(problems).union(scores), held_out=held_out, started=started)
            if FAILED in batch.tensor_names:
                without_score = columns(batch, FAILED)[0] | reward.row_scores().isnan()
                reward = replace(reward, scored=(~without_score).tolist())
            if (overlong := self.config.algorithm.overlong).buffer and not held_out:
                (mask,) = columns(visible, "response_mask")
                reward = penalized(reward, mask, overlong, response_limit(self.config, self.groups.mapping))
        return scores.union(DataProto.from_dict({"token_level_scores": reward.token_level_scores})), reward

    def with_greedy_scores(self, batch: DataProto, problems: DataProto) -> DataProto:
        """Return the batch with ``greedy_scores``, the score of the greedy response to the problem of each row."""
        with self.stages("generate", self.groups.rollout.generate_sequences):
            greedy = self.generate(problems, do_sample=False, n=1)
            problem_columns = greedy.problem_columns
        with self.stages.overlapping() as start:
            _, reward = self.call_rewards(greedy.responses, problem_columns, start)
        scores = reward.row_scores().repeat_interleave(len(batch) // len(problems))
        return trained_on(batch.union(DataProto.from_dict({"greedy_scores": scores.nan_to_num()})), ~scores.isnan())
