"""The base class of actor and critic: an update in two calls, for asynchronous and custom programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError, before_changes
from workers.config import ActorConfig, CriticConfig
from workers.mini_batch_gradients import step_metrics
from workers.model_worker import ModelWorker
from workers.train.batches import TokenBatch
from workers.train.metrics import Rule, reduce_reports
from workers.train.micro_batches import MicroBatchSize
from workers.train.mini_batches import counted_sizes, draw_mini_batches, shuffle_generator
from workers.train.optimizer import gather_parameters
from workers.train.pipeline import Count, Loss
from workers.train.router_losses import RouterLosses

__all__ = ["TrainedWorker"]


class TrainedWorker(ModelWorker):
    """A model that is trained, in one call or in two: ``forward_backward``, which a role defines, and ``optim_step``.

    Example:
        >>> actor.forward_backward(batch)
        >>> metrics = actor.optim_step()[0]
    """

    parts_needed: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **ModelWorker.parts_needed,
        "forward_backward": ("params", "grads", "optimizer"),
        "optim_step": ("params", "grads", "optimizer"),
    }

    @classmethod
    def mini_batches(cls, config: ActorConfig | CriticConfig, rows: int, n: int, update: int) -> Tensor:
        """Return the mini-batch of each row of a batch in each epoch of an update, int64 ``[rows, epochs]``.

        A program that passes them as the column ``mini_batches`` of the update can order the rows as it likes, such as
        ``RayPPOTrainer``, which balances the tokens of every mini-batch over the data-parallel ranks.

        Args:
            config: the configuration of the worker.
            rows: rows of the batch that have a valid token.
            n: responses to each prompt.
            update: number of the update, from 0.
        """
        size = config.ppo_mini_batch_prompts * n or config.ppo_mini_batch_size
        generator = shuffle_generator(config.seed if config.shuffle else None, update)
        return draw_mini_batches(rows, size, config.ppo_epochs, generator)

    def compute_gradients(
        self,
        method: str,
        rows: TokenBatch,
        *,
        loss: Loss,
        rules: Mapping[str, Rule],
        micro_batch_size: MicroBatchSize,
        count: Count | None = None,
    ) -> dict[str, float]:
        """Compute the gradients of all rows as one mini-batch for ``optim_step``, and return the metrics of the loss.

        Arguments and errors are those of ``train``. Gradients of an earlier call that were not applied are replaced.
        """
        self.check_call_context()
        self.gradients = None
        counted = rows.counted.nonzero().flatten()
        sizes = counted_sizes(method, len(counted), self.context.pg.dp, self.device)
        batches = self._micro_batches(rows, counted, max(sizes), micro_batch_size)
        routers = RouterLosses(self.model, self.context.pg, self.device, count or self.loss_count)
        self.gradients = self._computed(method, batches, loss, routers, sum(sizes))
        return reduce_reports(self.gradients.reports, rules, self.context.pg, self.device)

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
        gradients, self.gradients = self.gradients, None
        if gradients is None:
            with before_changes():
                raise ConfigError("optim_step has no gradients to apply: call forward_backward first", key="optim_step")
        self.weights_version += 1
        step = self._applied(gradients)
        gather_parameters(self.model, self.phases[self.phase])
        self._background_saves.finish_if_written()
        self.updates += 1
        return gradients.routers.means() | step_metrics([step])
