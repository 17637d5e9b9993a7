"""The gradients of one mini-batch, from their computation to the optimizer step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workers.checkpoint.state import TrainingState, random_state, set_random_state
from workers.train.batches import TokenBatch
from workers.train.forward import loss_of_own_targets
from workers.train.metrics import LOSS_COUNT
from workers.train.micro_batches import MicroBatcher
from workers.train.nonfinite import all_finite, first_nonfinite_gradient, raise_nonfinite
from workers.train.optimizer import guarded_step
from workers.train.pipeline import Forward, Loss, run_for_gradients
from workers.train.router_losses import RouterLosses

__all__ = ["AppliedStep", "Gradients", "step_metrics"]


class AppliedStep(NamedTuple):
    """An optimizer step.

    Attributes:
        lr: its learning rate.
        grad_norm: the norm of the gradients; None if the step was skipped.
    """

    lr: float
    grad_norm: float | None


def step_metrics(steps: Sequence[AppliedStep]) -> dict[str, float]:
    """Return the learning rate of the last step, the mean gradient norm, and how many steps were made and skipped."""
    norms = [step.grad_norm for step in steps if step.grad_norm is not None]
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

    Attributes:
        reports: the reports of ``loss``, one for each micro-batch; none off the last stage.
        routers: as passed.
        samples: as passed.
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
    ) -> None:
        pg = self._pg = batcher.pg
        own_loss = functools.partial(loss_of_own_targets, loss, pg)
        self._compute = functools.partial(run_for_gradients, state.model, forward=forward, loss=own_loss, pg=pg)
        self._method, self._state, self.routers, self.samples = method, state, routers, samples
        self._batches = batcher.on_device(state.model, batches)
        self._random = random_state()
        routers.begin(batches)
        self.reports, count = self._computed()
        if routers.begin_again(count):
            set_random_state(self._random)
            self.reports, count = self._computed()
        for chunk in state.model:
            chunk.scale_gradients(1.0 / count.float())

    def _computed(self) -> tuple[list[dict[str, Tensor]], Tensor]:
        """Return the reports of the loss, and what it counts on all ranks of the model, or 1 if that is nothing."""
        assert self._state.optimizer is not None
        for chunk in self._state.model:
            chunk.zero_grad_buffer()
        self._state.optimizer.zero_grad()
        reports: list[dict[str, Tensor]] = self._compute(self._batches)
        count = torch.zeros((), dtype=torch.float64, device=self._batches[0].tokens.device)
        for report in reports:
            count += report[LOSS_COUNT].double()
        if self._pg.pp.size() > 1:
            dist.broadcast(count, dist.get_process_group_ranks(self._pg.pp)[-1], group=self._pg.pp)
        if self._pg.dp_cp.size() > 1:
            dist.all_reduce(count, group=self._pg.dp_cp)
        return reports, torch.where(count == 0, 1.0, count)

    def apply(self, *, advance: int, skips_nonfinite: bool) -> AppliedStep:
        """Make one optimizer step, or skip it.

        Args:
            advance: by how much the learning-rate schedule advances if the step is made.
            skips_nonfinite: whether gradients that are not finite skip the step.

        Raises:
            NonFiniteGradient: a gradient is NaN or Inf, and such steps are not skipped.
        """
        state, optimizer, scheduler = self._state, self._state.optimizer, self._state.scheduler
        assert optimizer is not None and scheduler is not None
        lr = float(scheduler.get_lr({}))
        step = guarded_step(optimizer)
        if step.overflow and not all_finite(self.reports, self._batches[0].tokens.device):
            step = step._replace(overflow=False)  # a smaller scale of the loss would not help
        self.routers.end(step.made)
        if step.made:
            scheduler.step(advance)
            state.counters["optimizer_steps"] += 1
            return AppliedStep(lr, step.grad_norm)
        if not step.overflow and not skips_nonfinite:
            set_random_state(self._random)
            found = first_nonfinite_gradient(state.model, self._batches, self._compute, self._pg)
            steps, rank = state.counters["optimizer_steps"], str(state.context.rank_info())
            raise_nonfinite(self._method, steps, step.grad_norm, self.reports, found, rank)
        return AppliedStep(lr, None)
