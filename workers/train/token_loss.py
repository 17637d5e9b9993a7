"""Losses that a program passes to ``forward_backward``, and those that come with mcontroller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.distributed import ProcessGroup

from workers.train.batches import TokenBatch
from workers.train.losses import masked_sum, over_context, sft_loss
from workers.train.metrics import TOKENS, Rule


@dataclass(frozen=True)
class TokenLoss:
    """A loss of whole rows, for ``forward_backward(batch, loss=...)``; it is pickled, as a function of a call is.

    ``function(rows, output)`` returns the sum of the loss over a micro-batch, the number that the sum over the
    mini-batch is divided by, and a report with every name in ``metrics``. ``rows`` has the ``columns``, and a mask
    ``[rows, targets]`` that is 0 for targets that do not count, and in all of a row that only fills the micro-batch.
    ``output`` is float32 ``[2, rows, targets]``: log-probabilities and entropies. If ``columns`` has ``top_ids``
    ``[rows, targets, k]``, the log-probabilities of these tokens follow: ``[2 + k, rows, targets]``. The function gets
    all targets of its rows, also under context parallelism.

    Attributes:
        name: prefix of the metrics, of which one is ``name/loss``.
        function: as above; a report for ``Rule.TOKEN_MEAN`` is a sum over the mask, for ``LOSS_MEAN`` over what counts.
        columns: the columns that it reads, besides those of responses.
        metrics: how the values of its report are reduced.
        supervised: whether the targets are the tokens with a ``loss_mask`` of 1, and not the responses.

    Examples:
        >>> policy.forward_backward(batch)
        >>> policy.forward_backward(supervised_rows(others), loss=SFT, accumulate=True)
        >>> policy.optim_step()
    """

    name: str
    function: Callable[[TokenBatch, Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
    columns: tuple[str, ...] = ()
    metrics: Mapping[str, Rule] = field(default_factory=dict)
    supervised: bool = False

    @property
    def rules(self) -> dict[str, Rule]:
        """How the values that ``of_rank`` reports are reduced."""
        return {"loss": Rule.LOSS_MEAN, **self.metrics}

    def of_rank(
        self, context_parallel: ProcessGroup, rows: TokenBatch, output: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss as ``ModelWorker.loss`` does: this rank's share of counts, gradients of its own targets.

        Args:
            context_parallel: the process group of the cp axis.
            rows: a micro-batch with its ``whole_mask``.
            output: of ``forward_step``, 0 for targets of other ranks.
        """
        ranks = context_parallel.size()
        whole = rows if rows.whole_mask is None else replace(rows, mask=rows.whole_mask)
        total, count, report = self.function(whole, over_context(output, context_parallel))
        report = {"loss": total, **report}
        shares = {name: report[name] / (1 if rule is Rule.MAX else ranks) for name, rule in self.rules.items()}
        report = {name: value.detach() for name, value in shares.items()}
        return total, count / ranks, report | {TOKENS: whole.mask.sum() / ranks}


def _distillation(rows: TokenBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    teacher = rows.columns["top_log_probs"]
    each = (teacher.exp() * (teacher - output[2:].movedim(0, -1))).sum(-1)
    return masked_sum(each, rows.mask), rows.mask.sum(), {"entropy": masked_sum(output[1], rows.mask)}


SFT = TokenLoss("sft", sft_loss, metrics={"entropy": Rule.TOKEN_MEAN}, supervised=True)
"""Cross entropy of the tokens with a ``loss_mask`` of 1, as ``update_sft``."""

DISTILLATION = TokenLoss(
    "distillation", _distillation, ("top_ids", "top_log_probs"), metrics={"entropy": Rule.TOKEN_MEAN}
)
"""KL divergence of the teacher to the student per token, ``sum p_teacher (log p_teacher - log p_student)``.

The sum is over the tokens of ``compute_top_log_probs``: with all of the vocabulary it is exact (Hinton et al., 2015,
arXiv:1503.02531; on responses of the student: Agarwal et al., 2023, arXiv:2306.13649).
"""
