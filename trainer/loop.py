"""RayPPOTrainer: the PPO loop, in one process that calls every role's group."""

from __future__ import annotations

import time
from collections.abc import Mapping

from mcontroller.data.batch import DataProto
from mcontroller.data.meta import united
from mcontroller.errors import ConfigError, MControllerError
from mcontroller.trace.recorder import span
from trainer.columns import tokens_of
from trainer.data.stream import BatchStream
from trainer.data.tokenizers import stop_tokens
from trainer.lifecycle import RunLifecycle
from trainer.metrics import Metrics, over_ranks
from trainer.mismatch import MISMATCH_METRICS
from trainer.rewards.reward import Reward
from trainer.saving.preemption import handling_signals
from trainer.summary import decoded_samples, experience_metrics, sample_tokens
from trainer.trackers import TRAIN, JsonlTracker
from trainer.validation import validate

WARM_UP = "warm_up"
"""The phase of the supervised steps, for trackers."""
SAMPLES_PER_STEP = 16
"""Rows of the table of samples that trackers log at every step."""


class RayPPOTrainer(RunLifecycle):
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
        rollout_fn: your program's own rollout loop, such as ``Episodes`` with tools. None: one call.
        stateful: objects of your program by name, such as a data loader of your own: their ``state_dict()`` is saved
            with every checkpoint, and passed to ``load_state_dict`` by a run that resumes.
        trackers: the trackers that log the metrics.
        callbacks: code that runs at events of the run.
        display: shows the events of the run; by default nothing is shown.

    Raises:
        ConfigError: roles, configurations and data sets do not fit together; raised before any process starts.
        DataError: a data set has fewer rows than a batch, or there is no checkpoint to resume from.
    """

    def fit(self) -> None:
        """Run the warm-up and then PPO, with validation and checkpoints as configured.

        With ``trainer.resume``, continue from the last checkpoint instead. After the failure of a process, the groups
        that broke are restarted, all roles get the state of the last checkpoint, and the run goes on: see
        ``trainer.max_restarts``.

        Raises:
            GroupError: a failure after which the run does not go on; a note of the error says why.
            Preempted: SIGTERM, SIGINT, SIGHUP, or the end of ``trainer.max_seconds`` stopped the run after a step, and
                it saved a checkpoint. It is a SystemExit with the code 75.
        """
        options = self.config.trainer
        with handling_signals(self.preemption.record):
            beginning, self._is_started = self.resume_or_begin(), False
            while True:
                try:
                    if self.global_steps == 0:
                        self.warm_up()
                        if options.val_before_train:
                            self.log(self.validate())
                    self._show_start()
                    while not self.is_last_step():
                        self.stop_if_preempted()
                        self.grow_if_possible()
                        number = self.global_steps + 1
                        with self.preemption.timing(), span("step", number):
                            with self.run_groups.profiled(number):
                                metrics = self.train_step(self._drawn())
                            self.global_steps = number
                            for callback in self.callbacks:
                                callback.step_ended(self, metrics)
                            self.show(self.display.step, metrics)
                            if self.is_due(options.test_freq):
                                metrics = united(metrics, self.validate())
                            self.log(metrics)  # before the save: a run that resumes removes lines, and adds none
                            self.step.synchronize_reference(number)
                            self.save_if_due()
                            self.save_to_memory_if_due()
                    self.checkpoints.finish()
                    self._export()
                    break
                except MControllerError as error:
                    self.recover(error, beginning)
        for callback in self.callbacks:
            callback.ended(self)

    def train_step(self, problems: DataProto) -> dict[str, float]:
        """Run one step of PPO on a batch of problems and return its metrics.

        With ``trainer.max_staleness=1``, the responses to these problems are generated during the step, which trains
        on the responses of the step before. With ``algorithm.filter_groups``, more batches of problems are drawn.
        """
        started, stages, step, prompts = time.perf_counter(), self.stages, self.step, len(problems)
        stages.drop_step()
        groups = step.empty_groups(prompts)
        while True:
            generated = step.generations.exchange(problems, self.draw)  # with the newest weights
            step.score(generated, groups)  # rewards; log-probabilities of policy and reference, and values
            if groups.is_complete:
                break
            problems = self.draw()
        batch, reward, metrics = step.choose(groups)
        with stages("advantages"):
            batch, advantage_metrics = step.advantages(batch)
            self.show_samples(reward, batch)
        metrics = united(metrics, advantage_metrics, experience_metrics(batch, stop_tokens(self.tokenizer)))
        for callback in self.callbacks:
            callback.batch_ready(self, batch)
        update_metrics = step.update(batch, self.global_steps)  # critic, then actor
        measured_before = MISMATCH_METRICS & metrics.keys()
        update_metrics = {name: value for name, value in update_metrics.items() if name not in measured_before}
        tokens = tokens_of(batch)
        self.num_tokens += tokens
        timing, progress = stages.timing(started, tokens, len(batch)), self._progress(batch, prompts)
        whole = Metrics()
        whole.add(united(metrics, update_metrics, progress, step.weights.take_metrics(), timing))
        whole.add(stages.take_memory())  # of the same groups as in generation ahead, at another time
        return whole.take()

    def _drawn(self) -> DataProto:
        """Return the next batch of problems.

        Raises:
            ConfigError: the run is to end after ``trainer.epochs``, and ``draw`` of a subclass did not read the data.
        """
        before, epochs = self.problems.count, self.config.trainer.epochs
        problems = self.draw()
        if epochs and self.problems.count == before:
            raise ConfigError(
                f"trainer.epochs is {epochs}, and {type(self).__name__}.draw returned problems without reading "
                "train_dataset, whose passes are counted: set trainer.epochs=0 and trainer.total_training_steps, or "
                "call super().draw()",
                key="trainer.epochs",
                value=epochs,
            )
        return problems

    def warm_up(self) -> None:
        """Run the supervised phase: train on demonstrations, then copy the actor to the reference."""
        warm_up = self.config.warm_up
        if warm_up.steps == 0 or self.warm_up_dataset is None:
            return
        batches = BatchStream(self.warm_up_dataset, warm_up.batch_size, self.config.data.seed, "warm_up_dataset")
        self.show(self.display.phase, "warm-up", warm_up.steps)
        for step in range(warm_up.steps):
            self.stop_if_preempted()
            with self.stages("warm-up", self.actor.update_sft):
                metrics = over_ranks(self.actor.update_sft(batches[step]).meta_info["metrics"])
            self.step.weights.changed()
            self.show(self.display.step, metrics)
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
        best, first = self.config.trainer.best_metric, not self.validated[1]
        self.validated = self.global_steps, metrics
        if self.config.trainer.keep_best and first and best not in metrics:
            text = f"trainer.best_metric is {best!r}; validation has {', '.join(metrics)}"
            raise ConfigError(text, key="trainer.best_metric", value=best)
        for callback in self.callbacks:
            callback.validated(self, metrics)
        self.show(self.display.held_out, self.global_steps, metrics)
        return metrics

    def _show_start(self) -> None:
        """Show that the steps of PPO begin, or go on; call ``Callback.started`` the first time."""
        if not self._is_started:
            self._is_started = True
            for callback in self.callbacks:
                callback.started(self)
        estimator = self.config.algorithm.adv_estimator
        name = "PPO" if estimator == "gae" else estimator.upper().replace("_", " ")
        self.show(self.display.phase, name, self.total_steps, done=self.global_steps)

    def _export(self) -> None:
        """Write the policy to ``trainer.export_hf``, if it is set."""
        if self.config.trainer.export_hf is not None:
            with self.stages("export", self.actor.export_hf):
                self.actor.export_hf(self.config.trainer.export_hf, self.tokenizer_files)

    def _progress(self, batch: DataProto, prompts: int) -> dict[str, float]:
        return {
            "train/prompts": float(prompts),
            "train/n": len(batch) / prompts,
            "train/num_tokens": float(self.num_tokens),
            "train/epoch": self.problems.rows_trained_on / len(self.train_batches.dataset),
            "train/restarts": float(len(self.recovery.failures)),
            **({"train/processes": float(self.elastic.processes)} if self.config.trainer.elastic else {}),
        }

    # ---- called by programs and callbacks ----------------------------------------------------------------------------

    def draw(self) -> DataProto:
        """Return the next batch of problems of the data set."""
        return self.problems.draw()

    def log(self, metrics: Mapping[str, float], step: int | None = None, phase: str = TRAIN) -> None:
        """Log the metrics of a step of a phase with every tracker, by default of the last one."""
        for tracker in self.trackers:
            tracker.log(metrics, self.global_steps if step is None else step, phase)

    def show_samples(self, reward: Reward, batch: DataProto) -> None:
        """Show decoded samples of a batch with advantages, and log a table of them with every tracker."""
        tokens = sample_tokens(batch, self.tokenizer, min(SAMPLES_PER_STEP, len(reward.samples) or SAMPLES_PER_STEP))
        samples = reward.samples or decoded_samples(batch, tokens)
        if not samples:
            return
        self.show(self.display.samples, samples)
        table = samples[:SAMPLES_PER_STEP]
        detailed = (
            [{**row, "tokens": row_tokens} for row, row_tokens in zip(table, tokens, strict=True)] if tokens else table
        )
        for tracker in self.trackers:  # the tables of services have texts and numbers alone
            tracker.log_samples(detailed if isinstance(tracker, JsonlTracker) else table, self.global_steps + 1)
