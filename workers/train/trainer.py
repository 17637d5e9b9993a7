"""Train the model of a worker: mini-batches, gradients, optimizer steps, phases with different optimizers."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from mcontroller.data.meta import united
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError, before_changes
from mcontroller.trace.recorder import span
from workers.config import OptimConfig
from workers.config.roles import MicroBatchSize
from workers.model.utilization import model_flops_utilization
from workers.train.batches import TokenBatch
from workers.train.metrics import LOSS_COUNT, LOSS_SIZE, Rule, reduce_reports
from workers.train.micro_batches import MicroBatcher
from workers.train.mini_batches import Division, counted_sizes, mini_batches_of_update
from workers.train.nonfinite import (
    GradientFinding,
    all_finite,
    check_counts,
    first_nonfinite_gradient,
    raise_nonfinite,
)
from workers.train.optimizer import Step, check_not_ended, gather_parameters, guarded_step, wrap_for_training
from workers.train.pipeline import Count, Forward, Loss, run_for_gradients
from workers.train.router_losses import RouterLosses, move_expert_bias, reset_token_counts
from workers.train.state import TrainingState, random_state, set_random_state

BuildOptimizer = Callable[[Sequence[Any], OptimConfig], tuple[MegatronOptimizer, OptimizerParamScheduler]]


def step_metrics(steps: Sequence[Step]) -> dict[str, float]:
    """Return the learning rate of the last step, the mean gradient norm, and how many steps were made and skipped."""
    norms = [step.grad_norm for step in steps if step.made]
    grad_norm = {"grad_norm": sum(norms) / len(norms)} if norms else {}
    counts = {"skipped_steps": float(len(steps) - len(norms)), "optimizer_steps": float(len(norms))}
    return {"lr": steps[-1].lr} | grad_norm | counts


class Gradients:
    """Compute the gradients of a mini-batch; they are in the buffers of the model until they are applied.

    They are divided by what the loss counts on all ranks. The weight of router losses has to be known before the first
    backward pass: if the count is not the one that ``routers`` expected, the gradients are computed again.

    Args:
        method: the name of the called method, for error messages.
        state: the model and its optimizer; earlier gradients are cleared.
        batcher: moves micro-batches to the device.
        batches: the micro-batches of this rank.
        forward: ``ModelWorker.forward_step``.
        loss: see ``ModelWorker.loss``.
        routers: the router losses of the update.
        samples: the rows of the mini-batch on all data-parallel ranks.
        earlier: gradients in the buffers, which these are added to; None replaces what is there. A second copy of the
            buffers exists meanwhile.

    Attributes:
        reports: the reports of ``loss``, one for each micro-batch; none off the last stage.
        routers: as passed.
        samples: as passed, and those of ``earlier``.
    """

    def __init__(
        self,
        method: str,
        state: TrainingState,
        batcher: MicroBatcher,
        batches: Sequence[TokenBatch],
        forward: Forward,
        loss: Loss,
        routers: RouterLosses,
        samples: int,
        earlier: Gradients | None = None,
    ) -> None:
        pg = self._pg = batcher.pg
        self._compute = functools.partial(run_for_gradients, state.model, forward=forward, loss=loss, pg=pg)
        self._method, self._state, self.routers = method, state, routers
        self.samples: int = samples + (earlier.samples if earlier else 0)
        self._earlier: list[Gradients] = earlier.parts if earlier else []
        kept = [buffer.grad_data.clone() for buffer in self._buffers()] if earlier else []
        self._batches = batcher.on_device(state.model, batches)
        self._random = random_state()
        if earlier is None:
            reset_token_counts(state.model)
        routers.begin(batches)
        self.reports, count = self._computed()
        if routers.begin_again(count):
            set_random_state(self._random)
            self.reports, count = self._computed()
        for chunk in state.model:
            chunk.scale_gradients(1.0 / count.float())
        for buffer, before in zip(self._buffers() if earlier else (), kept, strict=True):
            buffer.grad_data += before

    @property
    def parts(self) -> list[Gradients]:
        """These gradients, and all that they were added to."""
        return [self, *self._earlier]

    def _buffers(self) -> list[Any]:
        return [buffer for chunk in self._state.model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def _computed(self) -> tuple[list[dict[str, Tensor]], Tensor]:
        """Return the reports of the loss, and what it counts on all ranks of the model.

        If it counts nothing, that is 1 if the loss is 0, and else NaN, as for a negative count: gradients become NaN,
        so that only then the host reads the counts.
        """
        assert self._state.optimizer is not None
        for chunk in self._state.model:
            chunk.zero_grad_buffer()
        self._state.optimizer.zero_grad()
        reports: list[dict[str, Tensor]] = self._compute(self._batches)
        sums = torch.zeros(2, dtype=torch.float64, device=self._batches[0].tokens.device)
        for report in reports:
            count = torch.where(report[LOSS_COUNT] < 0, math.nan, report[LOSS_COUNT].double())
            sums += torch.stack((count, report[LOSS_SIZE].double()))
        if self._pg.pp.size() > 1:
            dist.broadcast(sums, dist.get_process_group_ranks(self._pg.pp)[-1], group=self._pg.pp)
        if self._pg.dp_cp.size() > 1:
            dist.all_reduce(sums, group=self._pg.dp_cp)
        count, size = sums
        return reports, torch.where(count == 0, torch.where(size == 0, 1.0, math.nan), count)

    def apply(self, *, advance: int, skips_nonfinite: bool) -> Step:
        """Make one optimizer step, or skip it.

        Args:
            advance: by how much the learning-rate schedule advances if the step is made.
            skips_nonfinite: whether gradients that are not finite skip the step.

        Raises:
            ConfigError: the loss returned a negative count, or one of 0 for all of a mini-batch and is not 0.
            NonFiniteGradient: a gradient is NaN or Inf, and such steps are not skipped.
        """
        state, optimizer, scheduler = self._state, self._state.optimizer, self._state.scheduler
        assert optimizer is not None and scheduler is not None
        lr = float(scheduler.get_lr({}))
        with span("optimizer"):
            step = guarded_step(optimizer)._replace(lr=lr)
        reports = [report for part in self.parts for report in part.reports]
        for part in () if step.made else self.parts:
            check_counts(self._method, part.reports)
        if step.overflow and not all_finite(reports, self._batches[0].tokens.device):
            step = step._replace(overflow=False)  # a smaller scale of the loss would not help
        self.routers.end(step.made)
        if step.made:
            move_expert_bias(state.model)
            scheduler.step(advance)
            state.counters["optimizer_steps"] += 1
        elif not step.overflow and not skips_nonfinite:
            steps, layout = state.counters["optimizer_steps"], state.context.layout
            raise_nonfinite(self._method, steps, step.grad_norm, reports, self._first_nonfinite(), layout)
        return step

    def _first_nonfinite(self) -> GradientFinding | None:
        findings, random = [], random_state()
        for part in self.parts:
            set_random_state(part._random)
            findings.append(first_nonfinite_gradient(self._state.model, part._batches, part._compute, self._pg))
        set_random_state(random)
        return next((result for result in findings if result is not None), None)


class Trainer:
    """Trains the model of a worker, in one call or in two: ``forward_backward`` of the worker, and ``optim_step``.

    Args:
        state: the model.
        batcher: divides rows into micro-batches.
        forward: ``ModelWorker.forward_step``.
        loss_count: ``ModelWorker.loss_count``.
        build_optimizer: ``ModelWorker.build_optimizer``, checked.
        schedule_unit: ``ModelWorker.schedule_unit``.
        after_update: called at the end of an update.

    Attributes:
        phases: optimizer configurations by phase of training; none if the model is not trained.

    Examples:
        >>> actor.forward_backward(batch)
        >>> metrics = actor.optim_step()[0]
    """

    def __init__(
        self,
        state: TrainingState,
        batcher: MicroBatcher,
        *,
        forward: Forward,
        loss_count: Count,
        build_optimizer: BuildOptimizer,
        schedule_unit: str,
        after_update: Callable[[], None],
    ) -> None:
        self._state, self._batcher = state, batcher
        self._forward, self._loss_count, self._build_optimizer = forward, loss_count, build_optimizer
        self._schedule_unit, self._after_update = schedule_unit, after_update
        self.phases: dict[str, OptimConfig] = {}

    def set_up(self, phases: Mapping[str, OptimConfig], ddp: Mapping[str, Any] | None = None) -> None:
        """Wrap the model for training, and build the optimizer of the first of ``phases``; without phases do nothing.

        Args:
            phases: optimizer configurations by phase.
            ddp: other fields of Megatron's DistributedDataParallelConfig.
        """
        pg, on_gpu = self._batcher.pg, self._batcher.device.type == "cuda"
        self.phases = {phase: optim.resolved(pg.dp_cp.size(), on_gpu=on_gpu) for phase, optim in phases.items()}
        for phase, optim in list(self.phases.items())[:1]:
            self._state.models["model"] = list(wrap_for_training(self._state.model, optim, pg, ddp))
            self.use_phase(phase)

    def use_phase(self, phase: str | None, *, reset: bool = False) -> None:
        """Train in this phase from now on, with a new optimizer and schedule unless its settings are the same.

        Args:
            phase: one of ``phases``; None: the current one.
            reset: build new ones also for the same settings, if the current ones have made a step.

        Raises:
            ConfigError: the phase has ended: its optimizer was replaced by another phase's.
        """
        state, counters, current = self._state, self._state.counters, self._state.counters["phase"]
        phase = phase or current
        optim, ended = self.phases[phase], set(filter(None, counters.get("ended_phases", "").split(",")))
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
        phase: str | None = None,
        count: Count | None = None,
        division: Division | None = None,
    ) -> dict[str, float]:
        """Make optimizer steps over mini-batches of the rows of all data-parallel ranks, and return the metrics.

        ``draw_mini_batches`` draws the mini-batches from the rows that have a valid token: the same for every
        data-parallel size, and for any rows without loss that pad the shards. The loss of a step is averaged over all
        valid tokens of its mini-batch on all ranks; router losses, and their metrics, over all its tokens.

        Args:
            method: the name of the called method, for error messages.
            rows: this rank's shard.
            loss: see ``ModelWorker.loss``.
            rules: see ``ModelWorker.metrics``.
            micro_batch_size: rows or tokens of a micro-batch.
            phase: of training, see ``use_phase``; None: the current one.
            count: of ``loss``; None for ``loss_count``.
            division: of the rows into mini-batches; None: one of all rows.

        Raises:
            DataError: on every rank, if no row of the batch has a valid token, or the given mini-batches do not fit.
            NonFiniteGradient: on every rank, before the weights change, unless ``optim.on_nonfinite`` is ``skip``.
        """
        state, pg, device = self._state, self._batcher.pg, self._batcher.device
        state.check_context()
        division = division or Division()
        started = time.perf_counter()
        counted = rows.counted.nonzero().flatten()
        division_of_rank = mini_batches_of_update(method, rows, division, state.counters["updates"], pg.dp, device)
        self.use_phase(phase)
        state.gradients = None
        state.weights_version += 1
        reports, steps = list[dict[str, Tensor]](), list[Step]()
        routers = RouterLosses(state.model, pg, device, count or self._loss_count)
        for index, most, total in division_of_rank:
            batches = self._divided(rows, counted[index], most, micro_batch_size)
            gradients = Gradients(method, state, self._batcher, batches, self._forward, loss, routers, total)
            steps.append(self._applied(gradients))
            reports += gradients.reports if steps[-1].made else []
            del gradients  # with its micro-batches on the device
        self._end_update()
        metrics = united(reduce_reports(reports, rules, pg, device), routers.means())
        seconds = time.perf_counter() - started  # the device is done
        mfu = model_flops_utilization(state.model, rows.lengths[counted].repeat(division.epochs), pg, seconds)
        return united(metrics, mfu, step_metrics(steps))

    def compute_gradients(
        self,
        method: str,
        rows: TokenBatch,
        *,
        loss: Loss,
        rules: Mapping[str, Rule],
        micro_batch_size: MicroBatchSize,
        accumulate: bool,
        phase: str | None = None,
    ) -> dict[str, float]:
        """Compute the gradients of all rows as one mini-batch for ``optim_step``, and return the metrics of the loss.

        It has the arguments and errors of ``train``. Gradients of an earlier call that were not applied are added if
        ``accumulate``, and replaced otherwise; an error of the batch leaves them as they are.
        """
        state, pg, device = self._state, self._batcher.pg, self._batcher.device
        state.check_context()
        counted = rows.counted.nonzero().flatten()
        sizes = counted_sizes(method, len(counted), pg.dp, device)
        batches = self._divided(rows, counted, max(sizes), micro_batch_size)
        self.use_phase(phase)
        earlier, state.gradients = state.gradients if accumulate else None, None
        routers = earlier.routers if earlier else RouterLosses(state.model, pg, device, self._loss_count)
        gradients = Gradients(method, state, self._batcher, batches, self._forward, loss, routers, sum(sizes), earlier)
        state.gradients = gradients
        return reduce_reports(gradients.reports, rules, pg, device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def optim_step(self) -> dict[str, float]:
        """Make one optimizer step with the gradients of the last ``forward_backward``, and of those it was added to.

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
        return united(gradients.routers.means(), step_metrics([step]))

    def _divided(self, rows: TokenBatch, index: Tensor, most: int, size: MicroBatchSize) -> list[TokenBatch]:
        return [divided.batch for divided in self._batcher.divide(rows, index, most, size)]

    def _applied(self, gradients: Gradients) -> Step:
        skips = self.phases[self._state.counters["phase"]].on_nonfinite != "raise"
        return gradients.apply(
            advance=gradients.samples if self._schedule_unit == "samples" else 1, skips_nonfinite=skips
        )

    def _end_update(self) -> None:
        gather_parameters(self._state.model, self.phases[self._state.counters["phase"]])
        self._after_update()
        self._state.counters["updates"] += 1
