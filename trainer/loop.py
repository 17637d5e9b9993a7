"""RayPPOTrainer: the PPO loop, in one process that calls every role's group."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from mcontroller.data.batch import DataProto
from mcontroller.data.meta import united
from mcontroller.errors import CallRejected, ConfigError, GroupError, MControllerError, close_all
from mcontroller.group import WorkerGroup
from mcontroller.ray.resource_pool import ResourcePoolManager
from mcontroller.ray.worker_group import MegatronRayWorkerGroup
from mcontroller.trace.recorder import recorder, span
from trainer.columns import tokens_of
from trainer.config import PPOConfig
from trainer.data.stream import BatchStream, Dataset, check_rows
from trainer.data.tokenizers import Tokenizer, stop_tokens
from trainer.display import Callback, Display, FailSafeDisplay
from trainer.elastic import ElasticPools, PoolSizes, pools_text
from trainer.groups import RunGroups
from trainer.metrics import Metrics, of_ranks
from trainer.mismatch import MISMATCH_METRICS
from trainer.rewards.reward import CombineRewards, Reward, RewardFunction, RewardSources
from trainer.roles import Role, check_generates_alone, check_reference_sync, check_roles
from trainer.rollout.generation import DrawnProblems, RolloutFunction
from trainer.saving.checkpoints import CLOSE_TIMEOUT_S, RunCheckpoints, RunState, Stateful
from trainer.saving.memory import MemoryCheckpoints
from trainer.saving.preemption import Preempted, Preemption
from trainer.saving.recovery import Failure, Recovery
from trainer.saving.run_record import BatchInFlight, read_record
from trainer.stages import SharedDevices, Stages
from trainer.step import PPOStep
from trainer.summary import experience_metrics, sample_tokens
from trainer.trackers import TRAIN, JsonlTracker, Tracker, rewind
from trainer.validation import Evaluation, check_validation, evaluations_by_prefix, validate

_logger = logging.getLogger(__name__)

WARM_UP = "warm_up"
"""The phase of the supervised steps, for trackers."""
SAMPLES_PER_STEP = 16
"""Rows of the table of samples that trackers log at every step."""


class RayPPOTrainer:
    """PPO over groups of workers, from one process.

    Args:
        config: the configuration of the run; the sections of the workers are passed to them.
        tokenizer: its ``eos_token_id`` and ``pad_token_id`` are passed to generation.
        role_worker_mapping: the worker class of every role: ``ActorRolloutRef``; or ``ActorRollout`` and
            ``RefPolicy``; or ``Actor`` and ``Rollout`` in separate groups, and ``RefPolicy``. ``Critic`` if the
            advantage estimator needs one; ``RewardModel`` if there is one.
        resource_pool_manager: the pools, and the pool of each role.
        ray_worker_group_cls: called with ``(pool, class with arguments, name_prefix=...)`` to start a group.
        reward_fn: the reward of the responses to train on. None: the scores of the reward model.
        val_reward_fn: the reward of the responses to held-out problems; ``reward_fn`` by default.
        train_dataset: problems; a row has ``input_ids`` and ``attention_mask`` ``[prompt]``, padded on the left, and
            any other columns, which are passed to ``reward_fn``.
        val_dataset: held-out problems, in the same form. None: those of ``evaluations`` alone.
        evaluations: other held-out problems by name, with a sampling of their own; metrics ``held_out/<name>/score``.
        warm_up_dataset: demonstrations for the supervised phase: rows of ``input_ids``, ``attention_mask`` and
            ``loss_mask`` ``[seq]``.
        combine_rewards: makes one score of that of ``reward_fn`` and that of the reward model, if there are both, such
            as ``weighted_sum(rule=1.0, model=0.5)``; ``rule_only`` for a ``reward_fn`` that reads ``rm_scores`` itself.
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
        evaluations: Mapping[str, Evaluation] | None = None,
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
        check_generates_alone(config, role_worker_mapping, resource_pool_manager, rollout_fn)
        if train_dataset is None:
            raise ConfigError("RayPPOTrainer needs a train_dataset", key="train_dataset")
        rewards = RewardSources(reward_fn, val_reward_fn, Role.RewardModel in role_worker_mapping, combine_rewards)
        if config.warm_up.steps and warm_up_dataset is None:
            raise ConfigError(f"warm_up.steps is {config.warm_up.steps}, but warm_up_dataset is None", key="warm_up")
        if config.trainer.resume:
            read_record(Path(config.trainer.default_local_dir))
        check_rows(train_dataset=train_dataset)
        check_validation(config, is_validated=val_dataset is not None or bool(evaluations))
        self.config = config
        self.tokenizer = tokenizer
        self.tokenizer_files: str | None = None  # the directory for an export; None: the one of model.hf_path
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.evaluations = evaluations_by_prefix(val_dataset, evaluations or {}, config.validation)
        self.warm_up_dataset = warm_up_dataset
        self.stateful = dict(stateful or {})
        self.trackers = trackers
        self.callbacks = callbacks
        self.display: Display = FailSafeDisplay(display or Display())
        self.train_batches = BatchStream(train_dataset, config.data.train_batch_size, config.data.seed)
        options = config.trainer
        devices = SharedDevices(options.offload, options.offload_communicators)
        self.stages = Stages(devices, options.patience, options.patience_factor)
        self.run_groups = RunGroups(
            *(config, role_worker_mapping, resource_pool_manager, ray_worker_group_cls, self.stages, self.display)
        )
        self.groups = self.run_groups.by_name
        self.step = PPOStep(config, tokenizer, self.run_groups, self.stages, rewards, rollout_fn)
        self.problems = DrawnProblems(self.train_batches, self.step.generations)
        self.checkpoints = RunCheckpoints(options, devices)
        self.memory = MemoryCheckpoints(devices, self.run_groups.lost_nodes)
        self.elastic = ElasticPools(resource_pool_manager, self.run_groups.workers)
        self.preemption = Preemption(options.max_seconds)
        self.recovery = Recovery(options, logs=resource_pool_manager.logs)
        self.global_steps = self.num_tokens = 0
        self._stopping = self._preempted = False
        self._validated: tuple[int, Mapping[str, float]] = (-1, {})
        self._saved_at = time.monotonic()

    # ---- start -----------------------------------------------------------------------------------------------------

    def init_workers(self) -> None:
        """Start the group of every role in its pool, and build the models of all workers.

        Raises:
            ResourceError: the cluster does not have the resources of the pools; raised before any process starts.
        """
        if self.config.trainer.elastic and self.config.trainer.resume:
            self._set_sizes(self.elastic.after_loss(()) or self.elastic.sizes)
        self._start_groups()

    def _start_groups(self) -> None:
        self.run_groups.start()
        if self.config.trainer.memory_save_freq:
            self.memory.check(self.run_groups.trained())
        self.step.connect()
        groups = self.run_groups
        self.actor, self.rollout, self.critic = groups.actor, groups.rollout, groups.critic
        self.reference, self.reward_model = groups.reference, groups.reward_model
        if self.config.trainer.profile.memory:
            for name, group in groups.trained().items():
                group.record_memory(str(Path(self.config.trainer.default_local_dir, "profiles", name)))

    # ---- training --------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Run the warm-up and then PPO, with validation and checkpoints as configured.

        With ``trainer.resume``, continue from the last checkpoint instead. After the failure of a process, the groups
        that broke are restarted, all roles get the state of the last checkpoint, and the run goes on: see
        ``trainer.max_restarts``.

        Raises:
            GroupError: a failure after which the run does not go on; a note of the error says why.
            Preempted: SIGTERM, SIGINT, or the end of ``trainer.max_seconds`` stopped the run after a step, and it saved
                a checkpoint. It is a SystemExit with the code 75.
        """
        with self.preemption.handling_signals():
            self._fit()

    def _fit(self) -> None:
        if self.config.trainer.resume:
            self.load_checkpoint()
        begin, started = self._state_with((), {}), False
        while True:
            try:
                if self.global_steps == 0:
                    self.warm_up()
                    if self.config.trainer.val_before_train:
                        self.log(self.validate())
                if not started:
                    started = True
                    for callback in self.callbacks:
                        callback.started(self)
                self._train()
                break
            except MControllerError as error:
                self._recover(error, begin)
        for callback in self.callbacks:
            callback.ended(self)

    def _recover(self, error: MControllerError, begin: RunState) -> None:
        """Restart the groups that broke and go back to the last checkpoint; raise the error if the run is to end.

        Args:
            error: what ended the step.
            begin: the state to go back to if nothing has been saved.
        """
        done = self.global_steps
        while (failure := self.recovery.admit(error, self.global_steps + 1)) is not None:
            self.display.starting(f"step {failure.step} failed: {failure.message}")
            if (trace := recorder()) is not None:
                trace.mark(f"failure {failure.message:.200}", failure.step)
            try:
                with span("failure restart", failure.step):
                    self._restore(begin)
            except MControllerError as another:
                error = another
                continue
            text = f"going on from step {self.global_steps} after {failure.kind} in step {failure.step}"
            self.display.starting(f"{text}; completed steps to repeat: {done - self.global_steps}")
            for callback in self.callbacks:
                callback.restarted(self, failure)
            return
        raise error

    def _restore(self, begin: RunState) -> None:
        """Give every group and this trainer the newest state, in memory or on the disk, or that of the beginning."""
        groups = self.run_groups
        broken = groups.broken()
        self.checkpoints.abandon(broken)
        on_disk = self.checkpoints.saved_step is not None or self.config.trainer.resume
        in_memory = self.memory.step is not None and self.memory.step >= (self.checkpoints.saved_step or 0)
        saved = on_disk or in_memory
        if not self._resize_after_loss():
            if groups.rollout is not groups.actor and {"actor", "rollout"} & {*(broken if saved else self.groups)}:
                with contextlib.suppress(GroupError):  # of connections that have ended with their processes
                    self.step.weights.close()
                self.step.weights.connect(groups.actor, groups.rollout)
            groups.restart(broken if saved else self.groups)
        if in_memory and (state := self._from_memory()) is not None:
            self._continue_from(state)
        elif on_disk:
            self.load_checkpoint()
        else:
            if in_memory:  # and damaged, or not for these sizes
                groups.restart(self.groups)
            self._continue_from(begin)

    def _from_memory(self) -> RunState | None:
        """Load the state in memory into all groups, and return this trainer's; None if that cannot be."""
        try:
            return self.memory.load(self.run_groups.trained())
        except CallRejected as error:
            _logger.warning("the state in memory is not loaded: %s", error.cause)
            return None

    def _resize_after_loss(self) -> bool:
        """Start all groups again, without state, if their pools are to have other sizes; return whether they have."""
        if not self.config.trainer.elastic:
            return False
        groups = self.run_groups
        sizes = self.elastic.after_loss(groups.lost_nodes()) or self.elastic.sizes
        if len(groups.by_name) == len(groups.workers) and sizes == self.elastic.sizes:
            return False
        self._resize(sizes)
        return True

    def _resize(self, sizes: PoolSizes) -> Failure | None:
        """End all groups, and start them again in pools of these sizes; they have no weights of the run yet.

        Returns:
            The recorded event; None if the sizes are the present ones.
        """
        groups = self.run_groups
        with contextlib.suppress(GroupError):
            self.step.weights.close()
        groups.end(groups.by_name.values())
        for group in groups.by_name.values():
            with contextlib.suppress(GroupError):
                group.shutdown(CLOSE_TIMEOUT_S)
        groups.by_name.clear()
        self.resource_pool_manager.shutdown()
        event = self._set_sizes(sizes)
        self._start_groups()
        return event

    def _set_sizes(self, sizes: PoolSizes) -> Failure | None:
        """Set the sizes of the pools that start next; if they change, show, record and return that."""
        before = self.elastic.sizes
        if sizes == before:
            return None
        self.resource_pool_manager.resource_pool_spec = sizes
        declared = f"configured: {pools_text(self.elastic.declared)}"
        text = f"the pools have {pools_text(sizes)} processes, before {pools_text(before)} ({declared})"
        _logger.warning("from step %d on, %s", self.global_steps + 1, text)
        self.display.starting(text)
        return self.recovery.resized(self.global_steps + 1, text, before=before, after=sizes)

    def _grow_if_possible(self) -> None:
        """Go on in larger pools if a node has come back, from a checkpoint of this step."""
        if not self.elastic.is_reduced or (sizes := self.elastic.after_growth()) == self.elastic.sizes:
            return
        self.checkpoints.finish()
        if self.checkpoints.saved_step != self.global_steps:
            self.save_checkpoint()
        self.memory.close()  # each replica goes on from the checkpoint
        event = self._resize(sizes)
        self.load_checkpoint()
        for callback in self.callbacks:
            if event is not None:
                callback.restarted(self, event)

    def _train(self) -> None:
        """Run the steps of PPO, and export the policy."""
        total = self.total_steps
        estimator = self.config.algorithm.adv_estimator
        name = "PPO" if estimator == "gae" else estimator.upper().replace("_", " ")
        self.display.phase(name, total, done=self.global_steps)
        while not self._is_last_step():
            self._stop_if_preempted()
            if self.global_steps:
                self._grow_if_possible()
            with self.preemption.timing(), span("step", self.global_steps + 1):
                with self.run_groups.profiled(self.global_steps + 1):
                    metrics = self.train_step(self.draw())
                self.global_steps += 1
                for callback in self.callbacks:
                    callback.step_ended(self, metrics)
                self.display.step(metrics)
                if self._is_due(self.config.trainer.test_freq):
                    metrics = united(metrics, self.validate())
                self.step.synchronize_reference(self.global_steps)
                if self._is_save_due():
                    last = self._is_last_step()
                    self.save_checkpoint(wait=last, reshardable=last)
                else:
                    self.checkpoints.finish_if_written()
                self.log(metrics)
                self._save_to_memory()
        self.checkpoints.finish()
        if self.config.trainer.export_hf is not None:
            with self.stages("export", self.actor.export_hf):
                self.actor.export_hf(self.config.trainer.export_hf, self.tokenizer_files)

    def stop(self) -> None:
        """End training after the current step, which is then validated and saved as the last one."""
        self._stopping = True

    def draw(self) -> DataProto:
        """Return the next batch of problems of the data set."""
        return self.problems.draw()

    @property
    def drawn_batches(self) -> int:
        """The number of batches that were drawn from the data set."""
        return self.problems.count

    def _stop_if_preempted(self) -> None:
        """Save a checkpoint and raise Preempted if the run is to stop; without a step there is nothing to save."""
        reason = self.preemption.reason(saving=self.checkpoints.longest)
        if reason is None:
            return
        self._preempted = True
        self.checkpoints.finish()
        if self.global_steps and self.checkpoints.saved_step != self.global_steps:
            self.save_checkpoint(reshardable=False)
        raise Preempted(reason, self.checkpoints.saved_step)

    def train_step(self, problems: DataProto) -> dict[str, float]:
        """Run one step of PPO on a batch of problems and return its metrics.

        With ``trainer.max_staleness=1``, the responses to these problems are generated during the step, which trains
        on the responses of the step before. With ``algorithm.filter_groups``, more batches of problems are drawn.
        """
        started, stages, step = time.perf_counter(), self.stages, self.step
        stages.drop_step()
        batch, reward, metrics = step.experience(problems, self.draw)
        with stages("advantages"):
            batch, of_advantages = step.advantages(batch)
            self.show_samples(reward, batch)
        metrics = united(metrics, of_advantages, experience_metrics(batch, stop_tokens(self.tokenizer)))
        for callback in self.callbacks:
            callback.batch_ready(self, batch)
        of_update = step.update(batch, self.global_steps)
        measured_before = MISMATCH_METRICS & metrics.keys()
        of_update = {name: value for name, value in of_update.items() if name not in measured_before}
        self.num_tokens += tokens_of(batch)
        others = self._progress(batch, len(problems)), step.weights.take_metrics()
        whole = Metrics()
        whole.add(united(metrics, of_update, *others, stages.timing(started, tokens_of(batch), len(batch))))
        whole.add(stages.take_memory())  # of the same groups as in generation ahead, at another time
        return whole.take()

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
                metrics = of_ranks(self.actor.update_sft(batches[step]).meta_info["metrics"])
            self.step.weights.changed()
            self.display.step(metrics)
            self.log(metrics, step + 1, WARM_UP)
        if self.reference is not None:
            self.reference.sync_reference()

    def validate(self) -> dict[str, float]:
        """Return the statistics of scores and other columns of responses to the held-out problems.

        See ``validation_metrics``.

        Raises:
            ConfigError: they do not have ``trainer.best_metric``, which ``keep_best`` compares.
        """
        if not self.evaluations:
            return {}
        metrics = validate(self.step, self.evaluations)
        best, first = self.config.trainer.best_metric, not self._validated[1]
        self._validated = self.global_steps, metrics
        if self.config.trainer.keep_best and first and best not in metrics:
            text = f"trainer.best_metric is {best!r}; validation has {', '.join(metrics)}"
            raise ConfigError(text, key="trainer.best_metric", value=best)
        for callback in self.callbacks:
            callback.validated(self, metrics)
        self.display.held_out(self.global_steps, metrics)
        return metrics

    # ---- metrics and checkpoints -----------------------------------------------------------------------------------

    def log(self, metrics: Mapping[str, float], step: int | None = None, phase: str = TRAIN) -> None:
        """Log the metrics of a step of a phase with every tracker, by default of the last one."""
        for tracker in self.trackers:
            tracker.log(metrics, self.global_steps if step is None else step, phase)

    def show_samples(self, reward: Reward, batch: DataProto) -> None:
        """Show decoded samples of a batch with advantages, and log a table of them with every tracker."""
        if not reward.samples:
            return
        self.display.samples(reward.samples)
        table = reward.samples[:SAMPLES_PER_STEP]
        tokens = sample_tokens(batch, self.tokenizer, len(table))
        detailed = [{**row, "tokens": each} for row, each in zip(table, tokens, strict=True)] if tokens else table
        for tracker in self.trackers:  # the tables of services have texts and numbers alone
            tracker.log_samples(detailed if isinstance(tracker, JsonlTracker) else table, self.global_steps + 1)

    def save_checkpoint(self, *, wait: bool = True, reshardable: bool = True) -> None:
        """Save the state of every trained role and of this trainer under ``trainer.default_local_dir``.

        Args:
            wait: until it is the checkpoint of the run. False: it is after a later step, the next save, or the end.
            reshardable: save distributed optimizers for any layout; ``trainer.save_reshardable`` always does.
        """
        self._saved_at, reshardable = time.monotonic(), reshardable or self.config.trainer.save_reshardable
        reshardable = reshardable or self.config.trainer.elastic
        with self.stages("checkpoint"):
            self.checkpoints.begin(self.run_groups.trained(), self._state(), reshardable=reshardable)
            if wait:
                self.checkpoints.finish()
        for callback in self.callbacks:
            callback.saved(self, self.config.trainer.default_local_dir)

    def _save_to_memory(self) -> None:
        """Copy the state of every trained role to memory, if it is due and the run goes on."""
        every = self.config.trainer.memory_save_freq
        if every and self.global_steps % every == 0 and not self._is_last_step():
            with self.stages("memory"):
                self.memory.save(self.run_groups.trained(), self._state())

    def _state(self) -> RunState:
        in_flight: Sequence[BatchInFlight] = ()
        rollout: Mapping[str, Any] = {}
        try:
            in_flight, rollout = self.step.generations.state()
        except GroupError as error:
            if not self._preempted and self.recovery.is_admitted(error, self.global_steps + 1):
                raise  # the run goes back to a checkpoint that has everything
            _logger.warning("the checkpoint is saved without the responses in flight: %s", error)
        return self._state_with(in_flight, rollout)

    def _state_with(self, in_flight: Sequence[BatchInFlight], rollout: Mapping[str, Any]) -> RunState:
        program = {name: each.state_dict() for name, each in self.stateful.items()}
        step, metrics = self._validated
        return RunState(
            self.global_steps,
            self.step.kl_ctrl.value,
            num_tokens=self.num_tokens,
            program=program,
            rollout=rollout,
            value=metrics.get(self.config.trainer.best_metric) if step == self.global_steps else None,
            **self.problems.state(in_flight),
        )

    def load_checkpoint(self) -> int:
        """Load the last whole checkpoint under ``trainer.default_local_dir``, and return the step that it was saved at.

        Raises:
            DataError: there is none, or it is of other roles.
        """
        self._continue_from(self.checkpoints.load(self.run_groups.trained()))
        for text in self.checkpoints.fallbacks():
            self.display.starting(f"{text}: going on from step {self.global_steps}, without later metrics and samples")
        return self.global_steps

    def _continue_from(self, state: RunState) -> None:
        """Set this trainer to a state, which the groups have already, and trackers to its step."""
        self.step.weights.changed()
        self.step.weights.take_metrics()  # of a step that failed
        self.global_steps = state.global_steps
        self.problems.continue_from(state)
        self.num_tokens = state.num_tokens
        self.step.kl_ctrl.resume(state.kl_coef)
        for name, each in self.stateful.items():
            if name in state.program:
                each.load_state_dict(state.program[name])
        rewind(self.trackers, self.global_steps or -1)  # a warm-up has steps too, before step 0

    def _is_due(self, every: int) -> bool:
        return every >= 0 and (self._is_last_step() or (every > 0 and self.global_steps % every == 0))

    @property
    def total_steps(self) -> int:
        """The most steps of the run; with ``trainer.epochs`` and dynamic sampling it may need fewer."""
        trainer = self.config.trainer
        return self.train_batches.batches_of(trainer.epochs) if trainer.epochs else trainer.total_training_steps

    def _is_last_step(self) -> bool:
        """Return whether the run ends after the steps so far: with epochs, if no batch of the last pass is left."""
        if epochs := self.config.trainer.epochs:
            return self._stopping or not self.problems.are_left(epochs)
        return self._stopping or self.global_steps >= self.total_steps

    def _is_save_due(self) -> bool:
        trainer = self.config.trainer
        late = trainer.save_minutes > 0 and time.monotonic() - self._saved_at >= 60.0 * trainer.save_minutes
        return self._is_due(trainer.save_freq) or (trainer.save_freq == 0 and late)

    def _progress(self, batch: DataProto, prompts: int) -> dict[str, float]:
        return {
            "train/prompts": float(prompts),
            "train/n": len(batch) / prompts,
            "train/num_tokens": float(self.num_tokens),
            "train/epoch": self.problems.rows_trained_on / len(self.train_batches.dataset),
            "train/restarts": float(len(self.recovery.failures)),
            **({"train/processes": float(self.elastic.processes)} if self.config.trainer.elastic else {}),
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
                ("memory", self.memory.close),
                ("weights", self.step.weights.close),
                ("generations", self.step.generations.close),
                *((f"group {role}", group.shutdown) for role, group in self.groups.items()),
                ("pools", self.resource_pool_manager.shutdown),
                *((f"tracker {type(tracker).__name__}", tracker.close) for tracker in self.trackers),
            ],
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
