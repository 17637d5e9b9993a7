"""RunLifecycle: what happens to a run around its steps: parts, start, saves, recovery, pools of other sizes, end.

``RayPPOTrainer`` derives from it. Nothing in this file belongs to the algorithm.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, Self

from mcontroller.data.batch import DataProto
from mcontroller.errors import CallRejected, ConfigError, GroupError, MControllerError, close_all
from mcontroller.group import WorkerGroup
from mcontroller.ray.resource_pool import ResourcePoolManager
from mcontroller.ray.worker_group import MegatronRayWorkerGroup
from mcontroller.trace.recorder import recorder, span
from trainer.config import PPOConfig
from trainer.data.stream import BatchStream, Dataset, check_rows
from trainer.data.tokenizers import Tokenizer
from trainer.display import Display
from trainer.elastic import ElasticPools, PoolSizes, pools_text
from trainer.groups import TRAINED, RunGroups
from trainer.rewards.reward import CombineRewards, RewardFunction, RewardSources
from trainer.roles import Role, check_generates_alone, check_roles
from trainer.rollout.generation import ProblemStream, RolloutFunction
from trainer.saving.checkpoints import CLOSE_TIMEOUT_S, RunCheckpoints, Stateful
from trainer.saving.memory import MemoryCheckpoints
from trainer.saving.preemption import Preempted, Preemption
from trainer.saving.recovery import Failure, Recovery
from trainer.saving.run_record import BatchInFlight, RunState
from trainer.stages import SharedDevices, Stages
from trainer.step import PPOStep
from trainer.trackers import Tracker, rewind
from trainer.validation import Evaluation, check_validation, evaluations_by_prefix

P = ParamSpec("P")
_logger = logging.getLogger(__name__)


class Callback:
    """Override the methods of the events to react to. They are called in the trainer's thread, in this order."""

    def started(self, trainer: RunLifecycle) -> None:
        """Run before the first step, after the warm-up or after a checkpoint was loaded."""

    def batch_ready(self, trainer: RunLifecycle, batch: DataProto) -> None:
        """Run before the updates of a step.

        Args:
            trainer: the trainer.
            batch: responses with ``token_level_scores``, ``advantages`` and ``returns``. Changes are trained on.
        """

    def step_ended(self, trainer: RunLifecycle, metrics: dict[str, float]) -> None:
        """Run after the updates of a step; additions to ``metrics`` are logged."""

    def validated(self, trainer: RunLifecycle, metrics: dict[str, float]) -> None:
        """Run after validation; additions to ``metrics`` are logged."""

    def restarted(self, trainer: RunLifecycle, failure: Failure) -> None:
        """Run after a failure, when the groups have the state of ``trainer.global_steps`` and the run goes on.

        With ``trainer.elastic``, also when pools have grown again: ``failure.kind`` is then ``PoolsResized``. After a
        change of size, the groups are other objects.
        """

    def saved(self, trainer: RunLifecycle, directory: str) -> None:
        """Run after a save under ``directory`` has started, which the groups may complete in the background."""

    def ended(self, trainer: RunLifecycle) -> None:
        """Run after the last step; not after an error."""


class RunLifecycle:
    """A run that is checked, started, saved, and restored: after a failure, in other pools, or in another process.

    Args: see ``RayPPOTrainer``.

    Attributes:
        run_groups, groups: the groups of the run.
        stages: the stages of a step, with their seconds.
        step: the algorithm of a step.
        problems: the position of the run in its data.
        checkpoints, memory: the states that the run can go on from, on the disk and in memory.
        elastic: chooses the sizes of the pools.
        preemption: says when the run is to stop early.
        recovery: says after which failures the run goes on.
        global_steps: steps done.
        num_tokens: tokens trained on.
        validated: the step of the last validation, and its metrics.
        is_stopping: whether the current step is to be the last one.
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
        check_generates_alone(config, role_worker_mapping, resource_pool_manager, rollout_fn)
        if train_dataset is None:
            raise ConfigError("RayPPOTrainer needs a train_dataset", key="train_dataset")
        has_model, has_episodes = Role.RewardModel in role_worker_mapping, rollout_fn is not None
        rewards = RewardSources(reward_fn, val_reward_fn, has_model, combine_rewards, has_episodes)
        if config.warm_up.steps and warm_up_dataset is None:
            raise ConfigError(f"warm_up.steps is {config.warm_up.steps}, but warm_up_dataset is None", key="warm_up")
        check_rows(train_dataset=train_dataset)
        check_validation(config, is_validated=val_dataset is not None or bool(evaluations))
        self.config, self.tokenizer = config, tokenizer
        self.role_worker_mapping, self.resource_pool_manager = role_worker_mapping, resource_pool_manager
        self.evaluations = evaluations_by_prefix(val_dataset, evaluations or {}, config.validation)
        self.warm_up_dataset = warm_up_dataset
        self.tokenizer_files: str | None = None  # the directory for an export; None: the one of model.hf_path
        self.stateful, self.trackers, self.callbacks = dict(stateful or {}), trackers, callbacks
        self.display, self._is_shown = display or Display(), True
        self.train_batches = BatchStream(train_dataset, config.data.train_batch_size, config.data.seed)
        options = config.trainer
        devices = SharedDevices(options.offload, options.offload_communicators)
        self.stages = Stages(devices, options.patience, options.patience_factor)
        self.run_groups = RunGroups(
            config, role_worker_mapping, resource_pool_manager, ray_worker_group_cls, self.stages, self._show_starting
        )
        self.groups = self.run_groups.by_name
        self.step = PPOStep(config, tokenizer, self.run_groups, self.stages, rewards, rollout_fn)
        self.problems = ProblemStream(self.train_batches, self.step.generations)
        self.checkpoints = RunCheckpoints(options, devices)
        if options.resume:
            self.checkpoints.check({spec.name for spec in self.run_groups.workers} & {*TRAINED})
        self.memory = MemoryCheckpoints(devices, self.run_groups.lost_nodes)
        self.elastic = ElasticPools(resource_pool_manager, self.run_groups.workers)
        self.preemption = Preemption(options.max_seconds)
        self.recovery = Recovery(options, logs=resource_pool_manager.logs)
        self.global_steps = self.num_tokens = 0
        self.validated: tuple[int, Mapping[str, float]] = (-1, {})
        self.is_stopping = False
        self._is_preempted = False
        self._saved_at = time.monotonic()

    # ---- start and end -----------------------------------------------------------------------------------------------

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
        self.show(self.display.groups, self.groups)
        if self.config.trainer.memory_save_freq:
            self.memory.check(self.run_groups.trained())
        self.step.connect()
        groups = self.run_groups
        self.actor, self.rollout, self.critic = groups.actor, groups.rollout, groups.critic
        self.reference, self.reward_model = groups.reference, groups.reward_model
        if self.config.trainer.profile.memory:
            for name, group in groups.trained().items():
                group.record_memory(str(Path(self.config.trainer.default_local_dir, "profiles", name)))

    def shutdown(self) -> None:
        """End every process and release the pools, all of them even if one fails; a second call does nothing.

        Raises:
            ShutdownError: several of them failed. The error of only one is raised as it is.
        """
        close_all(
            "the trainer",
            [
                ("display", self._close_display),
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

    # ---- shown -------------------------------------------------------------------------------------------------------

    def show(self, event: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Show an event with a method of the display, unless the display has failed: a run does not end with it."""
        if not self._is_shown:
            return
        try:
            event(*args, **kwargs)
        except (Exception, SystemExit) as error:  # rich exits the program if its output is closed
            self._is_shown = False
            _logger.warning("the display has failed, and shows nothing more: %s: %s", type(error).__name__, error)

    def _close_display(self) -> None:
        self._is_shown = True  # a display that has failed is closed too
        self.show(self.display.close)

    def _show_starting(self, what: str) -> None:
        self.show(self.display.starting, what)

    # ---- where the run is --------------------------------------------------------------------------------------------

    @property
    def total_steps(self) -> int:
        """The most steps of the run; with ``trainer.epochs`` and dynamic sampling it may need fewer."""
        trainer = self.config.trainer
        return self.train_batches.batches_of(trainer.epochs) if trainer.epochs else trainer.total_training_steps

    def is_last_step(self) -> bool:
        """Return whether the run ends after the steps so far: with epochs, if no batch of the last pass is left."""
        if epochs := self.config.trainer.epochs:
            return self.is_stopping or not self.problems.are_left(epochs)
        return self.is_stopping or self.global_steps >= self.total_steps

    def is_due(self, every: int) -> bool:
        """Return whether what comes every so many steps is due: also after the last one, and never if it is below 0."""
        return every >= 0 and (self.is_last_step() or (every > 0 and self.global_steps % every == 0))

    def stop(self) -> None:
        """End training after the current step, which is then validated and saved as the last one."""
        self.is_stopping = True

    # ---- save --------------------------------------------------------------------------------------------------------

    def save_if_due(self) -> None:
        """Save a checkpoint if the configuration says so; else complete the one in flight, if it is written."""
        options, last = self.config.trainer, self.is_last_step()
        late = options.save_minutes > 0 and time.monotonic() - self._saved_at >= 60.0 * options.save_minutes
        if self.is_due(options.save_freq) or (options.save_freq == 0 and late):
            self.save_checkpoint(wait=last, reshardable=last)
        else:
            self.checkpoints.finish_if_written()

    def save_checkpoint(self, *, wait: bool = True, reshardable: bool = True) -> None:
        """Save the state of every trained role and of this trainer under ``trainer.default_local_dir``.

        Args:
            wait: until it is the checkpoint of the run. False: it is after a later step, the next save, or the end.
            reshardable: save distributed optimizers for any layout; ``trainer.save_reshardable`` always does.
        """
        self._saved_at = time.monotonic()
        reshardable = reshardable or self.config.trainer.save_reshardable or self.config.trainer.elastic
        with self.stages("checkpoint"):
            self.checkpoints.begin(self.run_groups.trained(), self._state(), reshardable=reshardable)
            if wait:
                self.checkpoints.finish()
        for callback in self.callbacks:
            callback.saved(self, self.config.trainer.default_local_dir)

    def save_to_memory_if_due(self) -> None:
        """Copy the state of every trained role to memory, if it is due and the run goes on."""
        frequency = self.config.trainer.memory_save_freq
        if frequency and self.global_steps % frequency == 0 and not self.is_last_step():
            with self.stages("memory"):
                self.memory.save(self.run_groups.trained(), self._state())

    def stop_if_preempted(self) -> None:
        """Save a checkpoint and raise Preempted if the run is to stop; without a step there is nothing to save."""
        reason = self.preemption.reason(saving=self.checkpoints.longest)
        if reason is None:
            return
        self._is_preempted = True
        self.checkpoints.finish()
        if self.global_steps and self.checkpoints.saved_step != self.global_steps:
            self.save_checkpoint(reshardable=False)
        raise Preempted(reason, self.checkpoints.saved_step)

    def _state(self) -> RunState:
        in_flight: Sequence[BatchInFlight] = ()
        rollout: Mapping[str, Any] = {}
        try:
            in_flight, rollout = self.step.generations.state()
        except GroupError as error:
            if not self._is_preempted and self.recovery.is_admitted(error, self.global_steps + 1):
                raise  # the run goes back to a checkpoint that has everything
            _logger.warning("the checkpoint is saved without the responses in flight: %s", error)
        return self._state_with(in_flight, rollout)

    def _state_with(self, in_flight: Sequence[BatchInFlight], rollout: Mapping[str, Any]) -> RunState:
        program = {name: copy.deepcopy(part.state_dict()) for name, part in self.stateful.items()}
        step, metrics = self.validated
        best = self.config.trainer.best_metric
        return RunState(
            global_steps=self.global_steps,
            kl_coef=self.step.kl_ctrl.value,
            num_tokens=self.num_tokens,
            program=program,
            rollout=rollout,
            value=metrics.get(best) if step == self.global_steps else None,
            best_metric=best,
            **self.problems.state(in_flight),
        )

    # ---- go on -------------------------------------------------------------------------------------------------------

    def resume_or_begin(self) -> RunState:
        """Load the last checkpoint if the run resumes; return the state to go back to if nothing is saved."""
        if self.config.trainer.resume:
            self.load_checkpoint()
        return self._state_with((), {})

    def load_checkpoint(self) -> int:
        """Load the last whole checkpoint under ``trainer.default_local_dir``, and return the step that it was saved at.

        Raises:
            DataError: there is none, or it is of other roles.
        """
        self._continue_from(self.checkpoints.load(self.run_groups.trained()))
        for step, damage in self.checkpoints.damaged.items():
            text = f"going on from step {self.global_steps}, without later metrics and samples"
            self._show_starting(f"the checkpoint of step {step} is damaged ({damage}): {text}")
        return self.global_steps

    def _continue_from(self, state: RunState) -> None:
        """Set this trainer to a state, which the groups have already, and trackers to its step."""
        self.step.weights.changed()
        self.step.weights.take_metrics()  # of a step that failed
        self.global_steps = state.global_steps
        self.problems.continue_from(state)
        self.num_tokens = state.num_tokens
        self.step.kl_ctrl.resume(state.kl_coef)
        for name, part in self.stateful.items():
            if name in state.program:
                part.load_state_dict(copy.deepcopy(state.program[name]))  # it may be loaded again
        rewind(self.trackers, self.global_steps or -1)  # a warm-up has steps too, before step 0

    def recover(self, error: MControllerError, beginning: RunState) -> None:
        """Restart the groups that broke and go back to the last checkpoint; raise the error if the run is to end.

        A run goes on after a process or an engine that died or is out of reach, and after a late call. It ends after an
        exception of a worker whose type ``trainer.restart_on`` does not have, after ``trainer.max_restarts`` of one
        cause in an hour, and if a step fails three times for one cause. ``Recovery`` decides this, and writes
        ``failures.jsonl``.
        All groups then have the newest state: in memory, or of the last checkpoint, or of the beginning.

        Args:
            error: what ended the step.
            beginning: the state to go back to if nothing has been saved.
        """
        done = self.global_steps
        while (failure := self.recovery.admit(error, self.global_steps + 1)) is not None:
            self._show_starting(f"step {failure.step} failed: {failure.message}")
            if (trace := recorder()) is not None:
                trace.mark(f"failure {failure.message:.200}", failure.step)
            try:
                with span("failure restart", failure.step):
                    self._restore(beginning)
            except MControllerError as another:
                error = another
                continue
            text = f"going on from step {self.global_steps} after {failure.kind} in step {failure.step}"
            self._show_starting(f"{text}; completed steps to repeat: {done - self.global_steps}")
            for callback in self.callbacks:
                callback.restarted(self, failure)
            return
        raise error

    def _restore(self, beginning: RunState) -> None:
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
            self._continue_from(beginning)

    def _from_memory(self) -> RunState | None:
        """Load the state in memory into all groups, and return this trainer's; None if that cannot be."""
        try:
            return self.memory.load(self.run_groups.trained())
        except CallRejected as error:
            _logger.warning("the state in memory is not loaded: %s", error.cause)
            return None

    # ---- pools of other sizes ----------------------------------------------------------------------------------------

    def grow_if_possible(self) -> None:
        """Go on in larger pools if a node has come back, from a checkpoint of this step."""
        if not self.global_steps or not self.elastic.is_reduced:
            return
        if (sizes := self.elastic.after_growth()) == self.elastic.sizes:
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
        self._show_starting(text)
        return self.recovery.resized(self.global_steps + 1, text, before=before, after=sizes)
