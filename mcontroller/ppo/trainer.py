"""RayPPOTrainer: the PPO loop, in one process that calls every role's group."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from mcontroller.closing import close_all
from mcontroller.data.protocol import DataProto
from mcontroller.errors import ConfigError
from mcontroller.group import WorkerGroup
from mcontroller.ppo.config import PPOConfig
from mcontroller.ppo.data import (
    ROUTED_EXPERTS,
    TOKENS,
    BatchStream,
    Dataset,
    Tokenizer,
    check_rows,
    columns,
    in_order,
    special_tokens,
    stop_tokens,
    tokens_of,
    with_tokens,
    without,
)
from mcontroller.ppo.display import Callback, Display
from mcontroller.ppo.estimators.registry import ADVANTAGE_ESTIMATORS, compute_advantage
from mcontroller.ppo.generation import DRAWN, Generations, RolloutFunction, generate_responses, staleness_metrics
from mcontroller.ppo.kl import apply_kl_penalty, make_kl_controller
from mcontroller.ppo.mismatch import MISMATCH, importance_weights, mismatch_metrics
from mcontroller.ppo.rewards.reward import CombineRewards, Reward, RewardFunction, RewardSources, Scores, joined
from mcontroller.ppo.roles import (
    Role,
    RoleWorker,
    check_generates_alone,
    check_reference_sync,
    check_roles,
    reads_reference,
    response_limit,
    role_workers,
    unread_by_update,
    updates_once,
)
from mcontroller.ppo.rollout_weights import RolloutWeights
from mcontroller.ppo.saving.checkpoints import RunCheckpoints, RunState, Stateful
from mcontroller.ppo.saving.preemption import Preempted, Preemption
from mcontroller.ppo.saving.run_record import read_record
from mcontroller.ppo.selection import GroupFilter, penalized, trained_on, truncated_rows
from mcontroller.ppo.stages import OverlappingStages, SharedDevices, StageCall, Stages
from mcontroller.ppo.summary import (
    experience_metrics,
    group_metrics,
    mean_of_parts,
    reward_metrics,
    signal_metrics,
    validation_metrics,
)
from mcontroller.ppo.token_balance import TokenBalance
from mcontroller.ray.resource_pool import RayResourcePool, ResourcePoolManager
from mcontroller.ray.worker_group import MegatronRayWorkerGroup
from mcontroller.trackers import Tracker

__all__ = ["RayPPOTrainer"]

SAMPLES_PER_STEP = 16
"""Rows of the table of samples that trackers log at every step."""


class RayPPOTrainer:
    """PPO over groups of workers, from one process.

    Args:
        config: the configuration of the run; those of the workers are passed to them.
        tokenizer: its ``eos_token_id`` and ``pad_token_id`` are passed to generation.
        role_worker_mapping: the worker class of every role: ``ActorRolloutRef``; or ``ActorRollout`` and
            ``RefPolicy``; or ``Actor`` and ``Rollout`` in groups of their own, and ``RefPolicy``. ``Critic`` if the
            advantage estimator needs one; ``RewardModel`` if there is one.
        resource_pool_manager: the pools, and the pool of each role.
        ray_worker_group_cls: called with ``(pool, class with arguments, name_prefix=...)`` to start a group.
        reward_fn: the reward of the responses to train on. None: the scores of the reward model.
        val_reward_fn: the reward of the responses to held-out problems; ``reward_fn`` by default.
        train_dataset: problems; a row has ``input_ids`` and ``attention_mask`` ``[prompt]``, padded on the left, and
            any further columns, which are passed to ``reward_fn``.
        val_dataset: held-out problems, in the same form. None: no validation.
        warm_up_dataset: demonstrations for the supervised phase: rows of ``input_ids``, ``attention_mask`` and
            ``loss_mask`` ``[seq]``.
        combine_rewards: makes one score of those of ``reward_fn`` and of the reward model, if there are both, such as
            ``weighted_sum(rule=1.0, model=0.5)``; ``rule_only`` for a ``reward_fn`` that reads ``rm_scores`` itself.
        rollout_fn: your program's own rollout loop, such as ``MultiTurnRollout`` with tools. None: one call.
        stateful: objects of your program by name, such as a data loader of your own: their ``state_dict()`` is saved
            with every checkpoint, and passed to ``load_state_dict`` by a run that resumes.
        trackers: the trackers that log the metrics.
        callbacks: code that runs at events of the run.
        display: shows the events of the run; by default nothing is shown.

    Raises:
        ConfigError: roles, configurations and data sets do not fit together; raised before any process starts.
        DataError: a data set has fewer rows than a batch, or there is no checkpoint to resume from.
    """

    actor: WorkerGroup
    rollout: WorkerGroup
    critic: WorkerGroup | None
    reference: WorkerGroup | None
    reward_model: WorkerGroup | None

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Tokenizer,
        role_worker_mapping: Mapping[Role, Any],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: Callable[..., WorkerGroup] = MegatronRayWorkerGroup,
        reward_fn: RewardFunction | None = None,
        val_reward_fn: RewardFunction | None = None,
        train_dataset: Dataset | None = None,
        val_dataset: Dataset | None = None,
        *,
        warm_up_dataset: Dataset | None = None,
        combine_rewards: CombineRewards | None = None,
        rollout_fn: RolloutFunction | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        trackers: Sequence[Tracker] = (),
        callbacks: Sequence[Callback] = (),
        display: Display | None = None,
    ) -> None:
        check_roles(config, role_worker_mapping, resource_pool_manager)
        check_reference_sync(config, role_worker_mapping)
        check_generates_alone(config, role_worker_mapping, resource_pool_manager, rollout_fn is not None)
        if train_dataset is None:
            raise ConfigError("RayPPOTrainer needs a train_dataset", key="train_dataset")
        self.rewards = RewardSources(reward_fn, val_reward_fn, Role.RewardModel in role_worker_mapping, combine_rewards)
        if config.warm_up.steps and warm_up_dataset is None:
            raise ConfigError(f"warm_up.steps is {config.warm_up.steps}, but warm_up_dataset is None", key="warm_up")
        if config.trainer.resume:
            read_record(Path(config.trainer.default_local_dir))
        check_rows(train_dataset=train_dataset, val_dataset=val_dataset)
        self.config = config
        self.tokenizer = tokenizer
        self.role_worker_mapping = role_worker_mapping
        self.role_workers = role_workers(config, role_worker_mapping)
        self.resource_pool_manager = resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls
        self.val_dataset = val_dataset
        self.warm_up_dataset = warm_up_dataset
        self.rollout_fn = rollout_fn
        self.stateful = dict(stateful or {})
        self.trackers = trackers
        self.callbacks = callbacks
        self.display = display or Display()
        self.train_batches = BatchStream(train_dataset, config.data.train_batch_size, config.data.seed)
        self.kl_ctrl = make_kl_controller(config.algorithm.kl_ctrl)
        self.stages = Stages(SharedDevices(config.trainer.offload, config.trainer.offload_communicators))
        self.groups: dict[str, WorkerGroup] = {}
        workers = {each.name: each.init for each in self.role_workers}
        self.balance = TokenBalance(workers, self.groups, config.trainer.balance_tokens)
        self.rollout_weights = RolloutWeights(self.stages, config.trainer)
        self.generations = Generations(config.trainer.max_staleness, self.stages, self.rollout_weights)
        directory, keep = config.trainer.default_local_dir, config.trainer.max_to_keep
        self.checkpoints = RunCheckpoints(directory, keep, self.stages.devices)
        self.preemption = Preemption(config.trainer.max_seconds)
        self.global_steps = self.drawn_batches = self.num_tokens = 0
        self._stopping = False
        self._saved_at = time.monotonic()

    # ---- start -----------------------------------------------------------------------------------------------------

    def init_workers(self) -> None:
        """Start the group of every role in its pool, and build the models of all workers.

        Raises:
            ResourceError: the cluster does not have the resources of the pools; raised before any process starts.
        """
        self.resource_pool_manager.create_resource_pool()
        for worker in self.role_workers:
            pool = self.resource_pool_manager.get_resource_pool(worker.role)
            self.groups[worker.name] = self.start_group(worker, pool)
        for group in self.groups.values():
            with self.stages("start", group.init_model):
                group.init_model()
        self.actor = self.groups["actor"]
        self.rollout = self.groups.get("rollout", self.actor)
        self.rollout_weights.connect(self.actor, self.rollout)
        self.generations.connect(self.rollout, special_tokens(self.tokenizer), self.rollout_fn)
        self.critic = self.groups.get("critic")
        in_actor = Role.ActorRolloutRef in self.role_worker_mapping
        read = reads_reference(self.config, self.role_worker_mapping)
        self.reference = self.actor if in_actor and read else self.groups.get("ref")
        self.reward_model = self.groups.get("reward")
        self.display.groups(self.groups)

    def start_group(self, worker: RoleWorker, pool: RayResourcePool) -> WorkerGroup:
        """Start the processes of a role; ``init_model`` is not called."""
        axes = self.config.trainer.axes_across_nodes  # a custom class without this argument needs none
        further: dict[str, Any] = {"axes_across_nodes": axes} if axes else {}
        with self.stages("start"):
            self.display.starting(f"starting {worker.name}: {worker.init.cls.__name__}")
            group = self.ray_worker_group_cls(pool, worker.init, name_prefix=worker.name, **further)
            self.stages.devices.add(group, pool)
        return group

    # ---- training --------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Run the warm-up and then PPO, with validation and checkpoints as configured.

        With ``trainer.resume``, continue from the last checkpoint instead.

        Raises:
            Preempted: SIGTERM, SIGINT, or the end of ``trainer.max_seconds`` stopped the run after a step, and it saved
                a checkpoint. It is a SystemExit with the code 75.
        """
        with self.preemption.handling_signals():
            self._fit()

    def _fit(self) -> None:
        total = self.config.trainer.total_training_steps
        if self.config.trainer.resume:
            self.load_checkpoint()
        if self.global_steps == 0:
            self.warm_up()
            if self.config.trainer.val_before_train:
                self.log(self.validate())
        for callback in self.callbacks:
            callback.started(self)
        self.display.phase("PPO", total, done=self.global_steps)
        while self.global_steps < total and not self._stopping:
            self._stop_if_preempted()
            with self.preemption.timing():
                metrics = self.train_step(self.draw())
                self.global_steps += 1
                for callback in self.callbacks:
                    callback.step_ended(self, metrics)
                self.display.step(metrics)
                if self._is_due(self.config.trainer.test_freq):
                    metrics |= self.validate()
                self._synchronize_reference()
                if self._is_save_due():
                    last = self._stopping or self.global_steps == total
                    self.save_checkpoint(wait=last, reshardable=last)
                else:
                    self.checkpoints.finish_if_written()
                self.log(metrics)
        self.checkpoints.finish()
        if self.config.trainer.export_hf is not None:
            with self.stages("export", self.actor.export_hf):
                self.actor.export_hf(self.config.trainer.export_hf)
        for callback in self.callbacks:
            callback.ended(self)

    def stop(self) -> None:
        """End training after the current step, which is then validated and saved as the last one."""
        self._stopping = True

    def draw(self) -> DataProto:
        """Return the next batch of problems of the data set."""
        problems = self.train_batches[self.drawn_batches]
        problems.meta_info[DRAWN] = self.drawn_batches
        self.drawn_batches += 1
        return problems

    def _stop_if_preempted(self) -> None:
        """Save a checkpoint and raise Preempted if the run is to stop; without a step there is nothing to save."""
        reason = self.preemption.reason(saving=self.checkpoints.longest)
        if reason is None:
            return
        self.checkpoints.finish()
        if self.global_steps and self.checkpoints.saved_step != self.global_steps:
            self.save_checkpoint(reshardable=False)
        raise Preempted(reason, self.checkpoints.saved_step)

    def train_step(self, problems: DataProto) -> dict[str, float]:
        """Run one step of PPO on a batch of problems and return its metrics.

        With ``trainer.max_staleness=1``, the responses to these problems are generated during the step, which trains
        on those of the step before. With ``algorithm.filter_groups``, further batches of problems are drawn.
        """
        started, stage = time.perf_counter(), self.stages
        stage.drop_step()
        batch, metrics = self.experience(problems)
        with stage("advantages"):
            batch, of_advantages = self.advantages(batch)
        metrics |= of_advantages | experience_metrics(batch, stop_tokens(self.tokenizer))
        for callback in self.callbacks:
            callback.batch_ready(self, batch)
        metrics = self.update(batch) | metrics  # the mismatch before the update, if it is known
        self.num_tokens += tokens_of(batch)
        metrics |= self._progress(batch, len(problems)) | self.rollout_weights.take_metrics()
        return metrics | stage.timing(started, tokens_of(batch), len(batch)) | stage.take_memory()

    def experience(self, problems: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Return responses to as many problems with scores, log-probabilities and values, and metrics of all drawn.

        With ``algorithm.filter_groups``, groups without a signal are replaced by those of further problems first. The
        batch has the columns of its problems too. Its tensors stay on the workers until they are read.
        """
        rule = self.config.algorithm
        groups = GroupFilter(rule.filter_groups, len(problems))
        metrics: dict[str, float] = {}
        while True:
            problems, batch, asked, of_generation = self.generations.exchange(problems, self.draw)
            started = self.rewards.start(batch, asked)
            metrics |= of_generation
            metrics |= mean_of_parts(batch) if "metrics" in batch.meta_info else {}
            batch.meta_info.pop("metrics", None)
            batch = with_tokens(batch, asked)
            with self.stages.overlapping() as start:
                policies = [] if rule.filter_groups.enable else self.score_policies(batch, start)
                scores, reward = self.scored(batch, asked, start, started=started)
            batch = trained_on(self.with_results(batch, policies).union(scores), ~reward.row_scores().isnan())
            if ADVANTAGE_ESTIMATORS[rule.adv_estimator].needs_greedy:
                batch = self.with_greedy_scores(batch, problems)
            groups.add(batch.union(asked), reward)
            if groups.is_complete:
                break
            problems = self.draw()
        batch, drawn = groups.batch()
        if rule.filter_groups.enable:
            with self.stages.overlapping() as start:
                policies = self.score_policies(batch, start)
            batch = self.with_results(batch, policies)
        if "old_log_probs" in batch.tensor_names and rule.old_log_probs != "rollout":
            metrics |= mismatch_metrics(batch)
        if self.config.trainer.max_staleness:
            metrics |= staleness_metrics(batch, self.rollout_weights.version)
        reward = groups.reward()
        self.show_samples(reward)
        return batch, metrics | drawn | reward_metrics("train", reward) | group_metrics(groups)

    def score_policies(self, batch: DataProto, start: OverlappingStages) -> list[StageCall]:
        """Start to compute log-probabilities of policy and reference and the critic's values, as far as needed."""
        rows, old, calls = batch.select(non_tensor_batch_keys=[]), self.config.algorithm.old_log_probs, []
        others = without(rows, [ROUTED_EXPERTS])
        once = updates_once(self.config, self.role_workers[0], len(rows), rows.meta_info.get("n", 1))
        if old == "policy" or (old == "auto" and not once):
            calls.append(start("old log-probs", self.balance.of(self.actor.compute_log_prob), rows))
        if self.reference is not None:
            calls.append(start("reference", self.balance.of(self.reference.compute_ref_log_prob), others))
        if self.critic is not None:
            calls.append(start("values", self.balance.of(self.critic.compute_values), others))
        return calls

    def with_results(self, batch: DataProto, calls: Sequence[StageCall]) -> DataProto:
        """Return the batch with the results of ``score_policies``, and ``old_log_probs`` if they are the rollout's."""
        if self.config.algorithm.old_log_probs == "rollout":
            batch = batch.with_tensors({"old_log_probs": columns(batch, "rollout_log_probs")[0]})
        for call in calls:
            batch = batch.union(call.get())
        return batch

    def update(self, batch: DataProto) -> dict[str, float]:
        """Train critic and actor on the batch, and return their metrics."""
        metrics, trainer, step = dict[str, float](), self.config.trainer, self.global_steps
        batch = batch.select(non_tensor_batch_keys=[])
        if self.config.algorithm.mask_truncated:
            batch = trained_on(batch, ~truncated_rows(batch, stop_tokens(self.tokenizer)))
        if not bool(columns(batch, "response_mask")[0].any()):
            return {"actor/skipped_steps": 1.0}
        calls: list[StageCall] = []
        unread = {name: unread_by_update(self.role_workers, name) for name in self._trained_groups()}
        with self.stages.overlapping() as start:
            if self.critic is not None:
                rows = without(batch, unread["critic"])
                calls.append(start("update critic", *self.balance.update(self.critic.update_critic, rows, step)))
            if step >= trainer.critic_warmup:
                rows, update = without(batch, unread["actor"]), self.config.warm_up.steps + step - trainer.critic_warmup
                calls.append(start("update actor", *self.balance.update(self.actor.update_actor, rows, update)))
                self.rollout_weights.changed()
        for call in calls:
            metrics |= mean_of_parts(call.get())
        for name in MISMATCH:
            if f"actor/{name}" in metrics:
                metrics[f"training/{name}"] = metrics.pop(f"actor/{name}")
        return metrics

    def generate(self, problems: DataProto, **sampling: Any) -> tuple[DataProto, DataProto]:
        """Return the responses to the problems, and the problems' other columns, repeated for each response.

        Args:
            problems: rows of ``input_ids`` and ``attention_mask`` ``[prompt]``.
            sampling: fields of the rollout's configuration for this call.
        """
        sampling = special_tokens(self.tokenizer) | sampling
        return generate_responses(self.rollout, problems, sampling, self.rollout_fn)

    def scored(
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
            problems: the further columns of their problems, in the same order.
            start: starts the reward model; the reward function is called while the other stages run.
            held_out: whether the problems are held out: ``val_reward_fn`` scores them.
            started: the scores of the reward function, if it has been started.
        """
        scores = DataProto()
        if self.reward_model is not None:
            stage, rows = "held-out" if held_out else "reward model", without(batch, [ROUTED_EXPERTS])
            score = self.reward_model.compute_rm_score
            call = start(stage, self.balance.of(score) if TOKENS in rows.tensor_names else score, rows)
            scores = call.get()
        start.start_all()
        with self.stages("held-out" if held_out else "reward"):
            seen = self.rewards.seen(batch, held_out=held_out)
            reward = self.rewards.of(seen.union(problems).union(scores), held_out=held_out, started=started)
            if (overlong := self.config.algorithm.overlong).buffer and not held_out:
                reward = penalized(reward, columns(seen, "response_mask")[0], overlong, response_limit(self.config))
        return scores.union(DataProto.from_dict({"token_level_scores": reward.token_level_scores})), reward

    def with_greedy_scores(self, batch: DataProto, problems: DataProto) -> DataProto:
        """Return the batch with ``greedy_scores``, the score of the greedy response to the problem of each row."""
        with self.stages("generate", self.rollout.generate_sequences):
            greedy, asked = self.generate(problems, do_sample=False, n=1)
        with self.stages.overlapping() as start:
            scores = self.scored(greedy, asked, start)[1].row_scores().repeat_interleave(len(batch) // len(problems))
        return trained_on(batch.union(DataProto.from_dict({"greedy_scores": scores.nan_to_num()})), ~scores.isnan())

    def advantages(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Return the batch with rewards, ``advantages``, ``returns`` and importance weights, and their metrics."""
        rule = self.config.algorithm
        batch, metrics = apply_kl_penalty(batch, self.kl_ctrl if rule.kl_in_reward else None, rule.kl_penalty)
        batch = compute_advantage(batch, rule.adv_estimator, rule.gamma, rule.lam, rule.options())
        metrics |= signal_metrics(batch)
        if rule.importance.level != "none":
            weights, limited = importance_weights(batch, rule.importance)
            batch, metrics = batch.with_tensors({"importance_weights": weights}), metrics | limited
        return batch, metrics

    def warm_up(self) -> None:
        """Run the supervised phase: train on demonstrations, then copy the actor to the reference."""
        warm_up = self.config.warm_up
        if warm_up.steps == 0 or self.warm_up_dataset is None:
            return
        batches = BatchStream(self.warm_up_dataset, warm_up.batch_size, self.config.data.seed, "warm_up_dataset")
        self.display.phase("warm-up", warm_up.steps)
        for step in range(warm_up.steps):
            self._stop_if_preempted()
            with self.stages("warm-up", self.actor.update_sft):
                metrics = mean_of_parts(self.actor.update_sft(batches[step]))
            self.rollout_weights.changed()
            metrics = {f"warm_up/{name.removeprefix('sft/')}": value for name, value in metrics.items()}
            self.display.step(metrics)
            self.log(metrics, step + 1)
        if self.reference is not None:
            self.reference.sync_reference()

    def validate(self) -> dict[str, float]:
        """Return the statistics of scores and further columns of responses to the held-out problems.

        See ``validation_metrics``.
        """
        if self.val_dataset is None:
            return {}
        validation, rewards = self.config.validation, []
        for problems in in_order(self.val_dataset, self.config.data.val_batch_size):
            self.rollout_weights.update()
            with self.stages("held-out", self.rollout.generate_sequences):
                responses, asked = self.generate(problems, **validation.sampling())
            with self.stages.overlapping() as start:
                rewards.append(self.scored(responses, asked, start, held_out=True)[1])
        metrics = validation_metrics(joined(rewards), validation.n)
        for callback in self.callbacks:
            callback.validated(self, metrics)
        self.display.held_out(self.global_steps, metrics)
        return metrics

    # ---- metrics and checkpoints -----------------------------------------------------------------------------------

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log the metrics of a step with every tracker, by default of the last one."""
        for tracker in self.trackers:
            tracker.log(metrics, self.global_steps if step is None else step)

    def show_samples(self, reward: Reward) -> None:
        """Show decoded samples of this step, and log a table of them with every tracker."""
        if not reward.samples:
            return
        self.display.samples(reward.samples)
        for tracker in self.trackers:
            tracker.log_samples(reward.samples[:SAMPLES_PER_STEP], self.global_steps + 1)

    def save_checkpoint(self, *, wait: bool = True, reshardable: bool = True) -> None:
        """Save the state of every trained role and of this trainer under ``trainer.default_local_dir``.

        Args:
            wait: until it is the checkpoint of the run. False: it is after a later step, the next save, or the end.
            reshardable: save distributed optimizers for any layout; ``trainer.save_reshardable`` always does.
        """
        self._saved_at, reshardable = time.monotonic(), reshardable or self.config.trainer.save_reshardable
        with self.stages("checkpoint"):
            self.checkpoints.begin(self._trained_groups(), self._state(), reshardable=reshardable)
            if wait:
                self.checkpoints.finish()
        for callback in self.callbacks:
            callback.saved(self, self.config.trainer.default_local_dir)

    def _state(self) -> RunState:
        program = {name: each.state_dict() for name, each in self.stateful.items()}
        in_flight, rollout = self.generations.state()
        drawn = self.drawn_batches - len(self.generations) + len(in_flight)
        counts = self.global_steps, self.kl_ctrl.value, drawn, self.num_tokens
        position = self.train_batches.position(drawn - len(in_flight)), self.train_batches.batch_size
        return RunState(*counts, program, rollout, in_flight, *position)

    def load_checkpoint(self) -> int:
        """Load the last checkpoint under ``trainer.default_local_dir`` and return the step at which it was saved.

        Raises:
            DataError: there is none, or it is of other roles.
        """
        groups = self._trained_groups()
        state = self.checkpoints.load(groups)
        self.rollout_weights.changed()
        self.global_steps = state.global_steps
        in_flight = state.resume_batches(self.train_batches)
        kept = self.generations.restore(in_flight, state.rollout, self.train_batches.__getitem__)
        self.drawn_batches, self.num_tokens = state.drawn_batches - len(state.in_flight) + kept, state.num_tokens
        self.kl_ctrl.resume(state.kl_coef)
        for name, each in self.stateful.items():
            if name in state.program:
                each.load_state_dict(state.program[name])
        return self.global_steps

    def _trained_groups(self) -> dict[str, WorkerGroup]:
        return {name: group for name, group in self.groups.items() if name in ("actor", "critic")}

    def _is_due(self, every: int) -> bool:
        last = self._stopping or self.global_steps == self.config.trainer.total_training_steps
        return every >= 0 and (last or (every > 0 and self.global_steps % every == 0))

    def _is_save_due(self) -> bool:
        trainer = self.config.trainer
        late = trainer.save_minutes > 0 and time.monotonic() - self._saved_at >= 60.0 * trainer.save_minutes
        return self._is_due(trainer.save_freq) or (trainer.save_freq == 0 and late)

    def _synchronize_reference(self) -> None:
        """Move the reference towards the policy if ``trainer.ref_sync_steps`` say so."""
        trainer = self.config.trainer
        if trainer.ref_sync_steps and self.global_steps % trainer.ref_sync_steps == 0 and self.reference is not None:
            with self.stages("reference", self.reference.sync_reference):
                self.reference.sync_reference(trainer.ref_sync_mix)

    def _progress(self, batch: DataProto, prompts: int) -> dict[str, float]:
        return {
            "train/prompts": float(prompts),
            "train/n": len(batch) / prompts,
            "train/num_tokens": float(self.num_tokens),
            "train/epoch": self.train_batches.passes(self.drawn_batches - len(self.generations)),
        }

    # ---- end -------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End every process and release the pools, all of them even if one fails; a second call does nothing.

        Raises:
            ShutdownError: several of them failed. The error of only one is raised as it is.
        """
        close_all(
            "the trainer",
            [
                ("display", self.display.close),
                ("checkpoints", self.checkpoints.close),
                ("weights", self.rollout_weights.close),
                *((f"group {role}", group.shutdown) for role, group in self.groups.items()),
                ("pools", self.resource_pool_manager.shutdown),
                *((f"tracker {type(tracker).__name__}", tracker.close) for tracker in self.trackers),
            ],
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
