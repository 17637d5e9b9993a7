"""What routers of a mixture of experts do in a step: their losses, and the bias of experts.

The bias of experts moves in the step of the optimizer, by the tokens of all gradients that the step applies. Megatron
moves it whenever gradients are finalized: also if their step is skipped or never made, and once for each call that adds
gradients to a step.

The losses are weighted so that micro-batches and ranks do not change them.

Megatron attaches them to the gradient, which is divided by the count of the main loss: valid targets, responses, or
what a custom loss counts. The factor that Megatron applies before lacks tp x cp in version 0.16, and is wrong in every
version if ranks have different numbers of tokens. So each loss is a sum over the tokens of the micro-batch, without
padding, times the count of the mini-batch divided by the number of all its tokens. After the division it is a mean over
all tokens, whatever the main loss counts.

- z loss (``moe_z_loss_coeff``): the square of the log-sum-exp of a token's logits.
- balance (``moe_aux_loss_coeff``): for a token ``experts * sum_i f_i p_i``, with its probabilities ``p`` and the
  fractions ``f`` of tokens that went to each expert. ``seq_aux_loss`` takes the fractions over the token's own row: the
  same in every layout and micro-batch. ``aux_loss`` takes them over the micro-batch of one data-parallel rank, and
  ``global_aux_loss`` over the micro-batches of all ranks so far in the step: these two depend on how rows are grouped.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_updated_expert_bias
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor, nn

from mcontroller.errors import ConfigError
from workers.model.token_prediction import METRIC, PredictionLoss, is_trained
from workers.train.batches import TokenBatch

_METRICS = {"aux_loss": "moe_aux_loss", "seq_aux_loss": "moe_seq_aux_loss", "global_aux_loss": "moe_global_aux_loss"}
_Z_LOSS = "moe_z_loss"


def losses_of(config: TransformerConfig) -> list[str]:
    """Return the metric names of the router losses that the configuration enables."""
    if getattr(config, "num_moe_experts", None) is None:  # another config than Megatron's has no experts
        return []
    kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    kinds, weights = ([kinds], [weights]) if isinstance(kinds, str) else (kinds, weights)
    metrics = [_METRICS[kind] for kind, weight in zip(kinds, weights, strict=True) if kind in _METRICS and weight]
    return metrics + [_Z_LOSS] * (config.moe_z_loss_coeff is not None)


def padding_matters(model: nn.Module) -> bool:
    """Return whether a training pass of the chunk counts tokens, so that it needs a padding mask."""
    config = get_model_config(model)
    return bool(losses_of(config)) or bool(getattr(config, "moe_router_enable_expert_bias", False))


def prepare_routers(chunks: Sequence[nn.Module]) -> None:
    """Make the routers of a model weight their losses by tokens, before it is trained.

    Raises:
        ConfigError: if a router of another class than Megatron's TopKRouter has losses.
    """
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if type(module) is TopKRouter:
                module.__class__ = _TokenRouter
                module.share = 1.0
                module.sums = {}
            elif isinstance(module, TopKRouter) and losses_of(module.config):
                raise ConfigError(
                    f"the losses of {name}, a {type(module).__name__}, cannot be weighted by tokens: use "
                    "Megatron's TopKRouter, or set model.transformer.moe_aux_loss_coeff=0 and no moe_z_loss_coeff",
                    key="model.transformer.moe_aux_loss_coeff",
                    value=module.config.moe_aux_loss_coeff,
                )


class _TokenRouter(TopKRouter):
    """Megatron's router with losses that are sums over tokens.

    Attributes:
        share: what the loss counts in the mini-batch divided by all tokens of the mini-batch.
        sums: by metric, the sum of the loss in this step, without its coefficient; float64 scalars.
    """

    share: float
    sums: dict[str, Tensor]

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        weight = self.config.moe_z_loss_coeff
        if weight is None or not self.training or not torch.is_grad_enabled():
            return logits
        losses = torch.logsumexp(logits.float(), dim=-1).square()
        if padding_mask is not None:
            losses = losses * ~padding_mask
        return self._attached(logits, _Z_LOSS, weight, losses.sum())

    def _apply_aux_loss(self, probs: Tensor, scores: Tensor, routed: Tensor, **unused: Any) -> Tensor:
        counts = _summed(routed.sum(0), self.tp_cp_group)
        return self._balanced(probs, "aux_loss", scores.sum(0), counts)

    def _apply_seq_aux_loss(
        self, probs: Tensor, scores: Tensor, routed: Tensor, seq_length: int, bsz: int, **unused: Any
    ) -> Tensor:
        shape = (seq_length, bsz, self.config.num_moe_experts)
        counts = _summed(routed.view(shape).sum(0), self.tp_cp_group)
        return self._balanced(probs, "seq_aux_loss", scores.view(shape).sum(0), counts)

    def _apply_global_aux_loss(self, probs: Tensor, scores: Tensor, routed: Tensor, **unused: Any) -> Tensor:
        if not self.get_aux_loss_coeff("global_aux_loss"):
            return probs
        self.global_tokens_per_expert += _summed(routed.sum(0), self.tp_dp_cp_group)
        return self._balanced(probs, "global_aux_loss", scores.sum(0), self.global_tokens_per_expert)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        super()._apply_expert_bias(routing_map if padding_mask is None else routing_map & ~padding_mask[:, None])

    def _balanced(self, probs: Tensor, kind: str, scores: Tensor, counts: Tensor) -> Tensor:
        """Attach a balance loss; ``scores`` of this rank and ``counts`` are sums over tokens, ``[.., experts]``."""
        weight = self.get_aux_loss_coeff(kind)
        if not weight:
            return probs
        fractions = counts / counts.sum(-1, keepdim=True).clamp(min=1)
        return self._attached(probs, _METRICS[kind], weight, self.config.num_moe_experts * (scores * fractions).sum())

    def _attached(self, activation: Tensor, name: str, weight: float, loss: Tensor) -> Tensor:
        self.sums[name] = self.sums.get(name, 0.0) + loss.detach().double()
        return MoEAuxLossAutoScaler.apply(activation, loss * (weight * self.share))


def _summed(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    counts = counts.float()
    if group.size() > 1:
        dist.all_reduce(counts, group=group)
    return counts


class RouterLosses:
    """The router losses of one update, and the loss of multi-token prediction: weights in steps, means at the end.

    A model without any of them causes no communication.

    Args:
        model: this rank's model chunks.
        pg: the process groups of the layout.
        device: the device of the collectives.
        count: maps a micro-batch to the count that the loss is expected to return for it.
    """

    def __init__(
        self,
        model: Sequence[nn.Module],
        pg: ProcessGroupCollection,
        device: torch.device,
        count: Callable[[TokenBatch], Tensor],
    ) -> None:
        config = get_model_config(model[0])
        self.names = losses_of(config) + [METRIC] * bool(getattr(config, "mtp_num_layers", None))
        named = (pair for chunk in model for pair in unwrap_model(chunk).named_modules())
        self.routers = [part for name, part in named if isinstance(part, _TokenRouter) and not name.startswith("mtp.")]
        last: Any = unwrap_model(model[-1])
        self.predictions: list[PredictionLoss] = [last.mtp.loss] if is_trained(last) else []
        self.pg, self.device, self.count = pg, device, count
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self._sums_of_step = torch.zeros_like(self.sums)
        self.tokens = self._tokens_of_step = self._tokens = self._targets = self._count = 0.0
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def begin(self, batches: Sequence[TokenBatch]) -> None:
        """Set the weight of the losses for gradients of these micro-batches (a collective over dp).

        Gradients since the last ``end`` belong to the same step.
        """
        if not self.names:
            return
        self._count_in_step()
        numbers = torch.zeros(3, dtype=torch.float64, device=self.device)
        for batch in batches:
            tokens, targets = (batch.lengths * batch.counted).sum(), (batch.mask != 0).sum()
            numbers += torch.stack((self.count(batch).double(), tokens.double(), targets.double())).to(self.device)
        if self.pg.dp.size() > 1:
            dist.all_reduce(numbers, group=self.pg.dp)
        self._count, self._tokens, self._targets = numbers.tolist()
        self._buffers = [(buffer, buffer.clone()) for router in self.routers for buffer in router.buffers()]
        self._weigh()

    def begin_again(self, count: Tensor) -> bool:
        """Set the weight for the ``count`` that the loss returned, and undo what the routers have counted in the step.

        Returns:
            Whether the gradients have to be computed again; False if the expected count was right.
        """
        if not self.names or math.isclose(float(count), self._count, rel_tol=1e-6):
            return False
        self._count = float(count)
        for buffer, value in self._buffers:
            buffer.copy_(value)
        self._weigh()
        return True

    def _weigh(self) -> None:
        for router in self.routers:
            router.share = self._count / self._tokens
            router.sums = {}
        for loss in self.predictions:
            loss.share, loss.ratio, loss.sums = self._count / self._targets, self._tokens / self._targets, {}

    def _count_in_step(self) -> None:
        """Add the losses of the last gradients, if there are any, to those of the step."""
        parts: list[_TokenRouter | PredictionLoss] = [*self.routers, *self.predictions]
        for part in parts if self._tokens else ():
            for index, name in enumerate(self.names):
                self._sums_of_step[index] += part.sums.get(name, 0.0)
        self._tokens_of_step += self._tokens
        self._tokens = 0.0

    def end(self, made: bool) -> None:
        """End the step; if it was made, its losses count in the means."""
        self._count_in_step()
        if made:
            self.tokens += self._tokens_of_step
            self.sums += self._sums_of_step
        self._tokens_of_step = 0.0
        self._sums_of_step.zero_()

    def means(self) -> dict[str, float]:
        """Return each loss without its coefficient, averaged over all tokens and all layers with experts.

        That of multi-token prediction is averaged over the targets that count. The result is the same on every rank
        (a collective over all ranks of the model); empty if no step was made.
        """
        if not self.tokens:
            return {}
        parts = [float(len(self.predictions if name == METRIC else self.routers)) for name in self.names]
        layers = torch.tensor(parts, dtype=torch.float64, device=self.device)
        sums = self.sums.clone()
        if self.pg.tp_dp_cp.size() > 1:
            dist.all_reduce(sums, group=self.pg.tp_dp_cp)
        both = torch.stack((sums, layers))
        if self.pg.pp.size() > 1:
            dist.all_reduce(both, group=self.pg.pp)
        means = (both[0] / (self.tokens * both[1])).tolist()
        return dict(zip(self.names, means, strict=True))


@contextlib.contextmanager
def keeping_expert_bias(config: TransformerConfig) -> Iterator[None]:
    """Context manager in which Megatron finalizes gradients, and leaves the bias and the counts of routers alone."""
    before = config.moe_router_enable_expert_bias, config.moe_router_load_balancing_type
    config.moe_router_enable_expert_bias, config.moe_router_load_balancing_type = False, "none"
    try:
        yield
    finally:
        config.moe_router_enable_expert_bias, config.moe_router_load_balancing_type = before


def reset_token_counts(chunks: Sequence[nn.Module]) -> None:
    """Set the tokens that routers counted to 0: those of a step that was made, skipped or dropped, or that raised."""
    for chunk in chunks:
        for module in chunk.modules():
            for name in ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps"):
                count = getattr(module, name, None)
                if isinstance(count, Tensor):
                    count.zero_()


def move_expert_bias(chunks: Sequence[nn.Module]) -> None:
    """Move the bias of each expert toward equal numbers of tokens (a collective over tp, cp and dp).

    Args:
        chunks: this rank's model chunks; their routers have counted the tokens of the step.
    """
    modules = (module for chunk in chunks for module in chunk.modules())
    routers: list[Any] = [module for module in modules if getattr(module, "expert_bias", None) is not None]
    if not routers:
        return
    tokens = torch.stack([router.local_tokens_per_expert for router in routers])
    bias = torch.stack([router.expert_bias for router in routers])
    rate = get_model_config(chunks[0]).moe_router_bias_update_rate
    for router, moved in zip(routers, get_updated_expert_bias(tokens, bias, rate), strict=True):
        router.expert_bias.copy_(moved)
