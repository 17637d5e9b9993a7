"""The critic worker: a model with a value head, trained on returns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from torch import Tensor, nn

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.worker import delegate
from workers.config import CriticConfig
from workers.losses.masking import inside
from workers.model.build import build_model
from workers.model_worker import ModelWorker
from workers.train.batches import TokenBatch
from workers.train.forward import forward_values, takes_distinct_tokens
from workers.train.losses import checked_output, masked_sum, value_loss
from workers.train.metrics import TOKENS, Rule, reported
from workers.train.mini_batches import division_of
from workers.train.trainer import Trainer


class CriticWorker(ModelWorker):
    """A model that computes a value for every response token.

    Args:
        config: the configuration of the critic.

    Raises:
        LayoutError: the axes do not divide the world size.
    """

    optim_step = delegate("trainer", Trainer.optim_step)

    config_class = CriticConfig
    parts_needed: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **ModelWorker.parts_needed,
        "compute_values": ("params",),
        "update_critic": ("params", "grads", "optimizer"),
    }

    def __init__(self, config: CriticConfig) -> None:
        super().__init__(
            config.model,
            config.parallel,
            timeout_s=config.timeout_s,
            packed=config.packed,
            share_prompts=config.share_prompts,
        )
        self.config = config

    @classmethod
    def columns_read(cls, config: CriticConfig) -> Collection[str] | None:
        """Return which columns of the stages of a step ``update_critic`` reads; None if it is overridden."""
        return None if cls.overrides(CriticWorker.update_critic) else ("values", "returns")

    # ---- what a user overrides (see ModelWorker) ---------------------------------------------------------------------

    def build_model(self) -> list[nn.Module]:
        """Return this rank's chunks of the critic, which ends in a value head."""
        return build_model(self.config.model, self.config.parallel, self.context, value_head=True)

    @takes_distinct_tokens
    def forward_step(self, model: nn.Module, rows: TokenBatch) -> Tensor:
        """Return hidden states, or on the last stage values, float32 ``[rows, targets]``."""
        return forward_values(model, rows, self.context.pg)

    def loss(self, rows: TokenBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the squared error to the returns, clipped around the old values."""
        mask = rows.mask
        output = checked_output(output, mask.shape, "the values of the targets")
        value = value_loss(output, rows.columns["values"], rows.columns["returns"], clip=self.config.cliprange_value)
        count = mask.sum()
        token_means = {"vf_loss": value.loss, "vf_clipfrac": value.clipped, "vpred_mean": output}
        report = {name: masked_sum(values.detach(), mask) for name, values in token_means.items()}
        return masked_sum(value.loss, mask), count, report | {TOKENS: count}

    def metrics(self) -> dict[str, Rule]:
        """Return how the values that ``loss`` reports are reduced."""
        return {"vf_loss": Rule.TOKEN_MEAN, "vf_clipfrac": Rule.TOKEN_MEAN, "vpred_mean": Rule.TOKEN_MEAN}

    # ---- called through the group ------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the model, with the weights of ``model.hf_path`` or of ``model.seed``, and its optimizer."""
        self.set_up({"ppo": self.config.optim}, self.config.ddp)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto | None:
        """Compute the values of the responses.

        Args:
            data: ``input_ids``, ``attention_mask`` ``[rows, prompt + response]`` and ``responses``
                ``[rows, response]``, int64.

        Returns:
            ``values``, float32 ``[rows, response]``: column t is the critic's output at the position that predicts
            response token t, or 0 if there is none. None off the last stage.

        Raises:
            DataError: a column is missing or of a wrong shape.
        """
        rows = self.reader.responses(data, "compute_values")
        values = self.scorer.score(self.model, rows, self.config.scoring_size)
        return None if values is None else DataProto.from_dict({"values": inside(values, rows.mask)})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, padding="zero_loss")
    def update_critic(self, data: DataProto) -> DataProto:
        """Train ``ppo_epochs`` on the batch.

        Mini-batches are drawn like the actor's: see ``mini_batch_rows``.

        Args:
            data: as for ``compute_values``, with ``values`` and ``returns`` ``[rows, response]``. ``meta_info["n"]`` is
                the number of responses to a prompt, under ``ppo_mini_batch_prompts``.

        Returns:
            ``meta_info["metrics"]``, the same on every rank.

        Raises:
            DataError: a column is missing or of a wrong shape, or no row has a valid token.
            NonFiniteGradient: a gradient is NaN or Inf, and ``optim.on_nonfinite`` is ``raise``.
        """
        metrics = self.trainer.train(
            "update_critic",
            self.reader.responses(data, "update_critic", ("values", "returns")),
            loss=self.loss,
            rules=self.metric_rules(),
            micro_batch_size=self.config.update_size,
            division=division_of(self.config, data, "update_critic"),
        )
        return reported("critic", metrics)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, padding="zero_loss")
    def forward_backward(self, data: DataProto, accumulate: bool = False) -> DataProto:
        """Compute the gradients of the whole batch as one mini-batch; ``optim_step`` applies them.

        Args:
            data: as for ``update_critic``.
            accumulate: add to the gradients of earlier calls that were not applied. Otherwise they are replaced.

        Returns:
            ``meta_info["metrics"]``: the metrics of the loss, the same on every rank.

        Raises:
            DataError: a column is missing or of a wrong shape, or no row has a valid token.
        """
        metrics = self.trainer.compute_gradients(
            "forward_backward",
            self.reader.responses(data, "forward_backward", ("values", "returns")),
            loss=self.loss,
            rules=self.metric_rules(),
            micro_batch_size=self.config.update_size,
            accumulate=accumulate,
        )
        return reported("critic", metrics)
