"""Train the model of a worker: mini-batches, gradients, optimizer steps, phases with different optimizers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError, before_changes
from workers.checkpoint.background_saves import BackgroundSaves
from workers.checkpoint.state import TrainingState
from workers.config import OptimConfig
from workers.model.utilization import model_flops_utilization
from workers.train.batches import TokenBatch
from workers.train.gradients import AppliedStep, Gradients, step_metrics
from workers.train.metrics import Rule, reduce_reports
from workers.train.micro_batches import MicroBatcher, MicroBatchSize
from workers.train.mini_batches import Division, counted_sizes, mini_batches_of_update, shuffle_generator
from workers.train.optimizer import check_not_ended, gather_parameters, wrap_for_training
from workers.train.pipeline import Count, Forward, Loss
from workers.train.router_losses import RouterLosses

__all__ = ["Trainer"]

BuildOptimizer = Callable[[Sequence[Any], OptimConfig], tuple[MegatronOptimizer, OptimizerParamScheduler]]


class Trainer:
    """Trains the model of a worker, in one call or in two: ``forward_backward`` of the worker, and ``optim_step``.

    Args:
        state: the model.
        batcher: divides rows into micro-batches.
        saves: a checkpoint that is being written; it is finished after an update, if it is written.
        forward: ``ModelWorker.forward_step``.
        loss_count: ``ModelWorker.loss_count``.
        build_optimizer: ``ModelWorker.build_optimizer``, checked.
        schedule_unit: ``ModelWorker.schedule_unit``.

    Attributes:
        phases: optimizer configurations by phase of training; none if the model is not trained.

    Example:
        >>> actor.forward_backward(batch)
        >>> metrics = actor.optim_step()[0]
    """

    def __init__(
        self,
        state: TrainingState,
        batcher: MicroBatcher,
        saves: BackgroundSaves,
        *,
        forward: Forward,
        loss_count: Count,
        build_optimizer: BuildOptimizer,
        schedule_unit: str,
    ) -> None:
        self._state, self._batcher, self._saves = state, batcher, saves
        self._forward, self._loss_count, self._build_optimizer = forward, loss_count, build_optimizer
        self._schedule_unit = schedule_unit
        self.phases: dict[str, OptimConfig] = {}

    def set_up(self, phases: Mapping[str, OptimConfig], ddp: Mapping[str, Any] | None = None) -> None:
        """Wrap the model for training, and build the optimizer of the first of ``phases``; without phases do nothing.

        Args:
            phases: optimizer configurations by phase.
            ddp: further fields of Megatron's DistributedDataParallelConfig.
        """
        pg, on_gpu = self._batcher.pg, self._batcher.device.type == "cuda"
        self.phases = {phase: optim.resolved(pg.dp_cp.size(), on_gpu=on_gpu) for phase, optim in phases.items()}
        for phase, optim in list(self.phases.items())[:1]:
            self._state.models["model"] = list(wrap_for_training(self._state.model, optim, pg, ddp))
            self.use_phase(phase)

    def use_phase(self, phase: str, *, reset: bool = False) -> None:
        """Train in this phase from now on, with a new optimizer and schedule unless its settings are the same.

        Args:
            phase: one of ``phases``.
            reset: build new ones also for the same settings, if the current ones have made a step.

        Raises:
            ConfigError: the phase has ended: its optimizer was replaced by that of another.
        """
        state, counters, optim = self._state, self._state.counters, self.phases[phase]
        current, ended = counters["phase"], set(filter(None, counters.get("ended_phases", "").split(",")))
        used = state.scheduler is not None and state.scheduler.num_steps > 0
        replaced = state.optimizer is not None and optim != self.phases[current]
        if replaced:
            check_not_ended(phase, ended)
        if state.optimizer is None or replaced or (reset and used):
            if replaced and used:
                counters["ended_phases"] = ",".join(sorted({*ended, current}))
            state.optimizer, state.scheduler = self._build_optimizer(state.model, optim)
            counters["optimizer_steps"] = 0
        counters["phase"] = phase

    def train(
        self,
        method: str,
        rows: TokenBatch,
        *,
        loss: Loss,
        rules: Mapping[str, Rule],
        micro_batch_size: MicroBatchSize,
        count: Count | None = None,
        mini_batch_size: int | None = None,
        epochs: int = 1,
        shuffle_seed: int | None = None,
        mini_batches: Tensor | None = None,
    ) -> dict[str, float]:
        """Make optimizer steps over mini-batches of the rows of all data-parallel ranks, and return the metrics.

        Mini-batches are those of ``draw_mini_batches`` over the rows that have a valid token: the same for every
        data-parallel size, and for any rows without loss that pad the shards. The loss of a step is averaged over all
        valid tokens of its mini-batch on all ranks; router losses, and their metrics, over all its tokens.

        Args:
            method: the name of the called method, for error messages.
            rows: this rank's shard.
            loss: see ``ModelWorker.loss``.
            rules: see ``ModelWorker.metrics``.
            micro_batch_size: rows or tokens of a micro-batch.
            count: of ``loss``; None for ``loss_count``.
            mini_batch_size: rows of all ranks for one step; None is all.
            epochs: number of passes over the rows.
            shuffle_seed: every epoch draws its mini-batches from this and the number of updates so far; None keeps the
                order of the rows.
            mini_batches: the mini-batch of each row in each epoch, int64 ``[rows, epochs]``; None draws them.

        Raises:
            DataError: on every rank, if no row of the batch has a valid token, or ``mini_batches`` does not fit.
            NonFiniteGradient: on every rank, before the weights change, unless ``optim.on_nonfinite`` is ``skip``.
        """
        state, pg, device = self._state, self._batcher.pg, self._batcher.device
        state.check_context()
        state.gradients = None
        started = time.perf_counter()
        counted = rows.counted.nonzero().flatten()
        generator = shuffle_generator(shuffle_seed, state.counters["updates"])
        division = Division(mini_batches, mini_batch_size, epochs, generator)
        taken = mini_batches_of_update(method, rows.counted, division, pg.dp, device)
        state.weights_version += 1
        reports, steps = list[dict[str, Tensor]](), list[AppliedStep]()
        routers = RouterLosses(state.model, pg, device, count or self._loss_count)
        for index, most, total in taken:
            batches = self._divided(rows, counted[index], most, micro_batch_size)
            gradients = Gradients(method, state, self._batcher, batches, self._forward, loss, routers, total)
            steps.append(self._applied(gradients))
            reports += [] if steps[-1].grad_norm is None else gradients.reports
            del gradients  # with its micro-batches on the device
        self._end_update()
        metrics = reduce_reports(reports, rules, pg, device) | routers.means()
        lengths, seconds = rows.lengths[counted].repeat(epochs), time.perf_counter() - started  # the device is done
        metrics |= model_flops_utilization(state.model, lengths, pg, seconds)
        return metrics | step_metrics(steps)

    def compute_gradients(
        self,
        method: str,
        rows: TokenBatch,
        *,
        loss: Loss,
        rules: Mapping[str, Rule],
        micro_batch_size: MicroBatchSize,
    ) -> dict[str, float]:
        """Compute the gradients of all rows as one mini-batch for ``optim_step``, and return the metrics of the loss.

        Arguments and errors are those of ``train``. Gradients of an earlier call that were not applied are replaced.
        """
        state, pg, device = self._state, self._batcher.pg, self._batcher.device
        state.check_context()
        state.gradients = None
        counted = rows.counted.nonzero().flatten()
        sizes = counted_sizes(method, len(counted), pg.dp, device)
        batches = self._divided(rows, counted, max(sizes), micro_batch_size)
        routers = RouterLosses(state.model, pg, device, self._loss_count)
        gradients = Gradients(method, state, self._batcher, batches, self._forward, loss, routers, sum(sizes))
        state.gradients = gradients
        return reduce_reports(gradients.reports, rules, pg, device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def optim_step(self) -> dict[str, float]:
        """Make one optimizer step with the gradients of the last ``forward_backward``.

        The two calls change the weights exactly as one ``update_actor`` or ``update_critic`` that makes one step of
        the same batch. An update, an offload of ``grads`` and the loading of a checkpoint drop the gradients.

        Returns:
            ``grad_norm``, ``lr``, ``optimizer_steps``, ``skipped_steps`` and the router losses, the same on every rank.

        Raises:
            ConfigError: there are no gradients to apply.
            NonFiniteGradient: a gradient is NaN or Inf, and ``optim.on_nonfinite`` is ``raise``.
        """
        gradients, self._state.gradients = self._state.gradients, None
        if gradients is None:
            with before_changes():
                raise ConfigError("optim_step has no gradients to apply: call forward_backward first", key="optim_step")
        self._state.weights_version += 1
        step = self._applied(gradients)
        self._end_update()
        return gradients.routers.means() | step_metrics([step])

    def _divided(self, rows: TokenBatch, index: Tensor, most: int, size: MicroBatchSize) -> list[TokenBatch]:
        return [each.batch for each in self._batcher.divide(rows, index, most, size)]

    def _applied(self, gradients: Gradients) -> AppliedStep:
        skips = self.phases[self._state.counters["phase"]].on_nonfinite != "raise"
        return gradients.apply(
            advance=gradients.samples if self._schedule_unit == "samples" else 1, skips_nonfinite=skips
        )

    def _end_update(self) -> None:
        gather_parameters(self._state.model, self.phases[self._state.counters["phase"]])
        self._saves.finish_if_written()
        self._state.counters["updates"] += 1
