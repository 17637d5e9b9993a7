"""How the losses of tokens are averaged over a mini-batch.

A mode assigns a weight to each token, and a count that the weighted sum is divided by. The count is summed over all
micro-batches, data-parallel and context-parallel ranks of the mini-batch, so that the average does not depend on how
the batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mcontroller.config.registry import Registry

__all__ = ["AGGREGATIONS", "Aggregation", "Weights"]


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of an average over tokens.

    Attributes:
        tokens: float ``[rows, response]``, the weight of every token; 0 outside of the mask.
        count: float scalar: this part's share of what the weighted sum is divided by.
    """

    tokens: Tensor
    count: Tensor


Aggregation = Callable[[Tensor, Tensor, int], Weights]
"""Maps the mask of this rank's tokens, the mask of all tokens, and the longest possible response to ``Weights``.

Both masks are float ``[rows, response]``. They differ under context parallelism, where ranks share the tokens of a
response. A response is counted on the rank that has its first token.
"""

AGGREGATIONS: Registry[Aggregation] = Registry("aggregation of the loss", key="loss_agg_mode")
"""Modes by the name that ``ActorConfig.loss_agg_mode`` takes."""


@AGGREGATIONS.register("token-mean")
def _token_mean(own: Tensor, whole: Tensor, longest: int) -> Weights:
    """Each token counts once (DAPO, arXiv:2503.14476)."""
    return Weights(own, own.sum())


@AGGREGATIONS.register("seq-mean-token-mean")
def _sequence_mean_of_means(own: Tensor, whole: Tensor, longest: int) -> Weights:
    """Each response counts once, whatever its length (GRPO, arXiv:2402.03300)."""
    return Weights(own / whole.sum(1, keepdim=True).clamp(min=1), _responses(own, whole))


@AGGREGATIONS.register("seq-mean-token-sum")
def _sequence_mean_of_sums(own: Tensor, whole: Tensor, longest: int) -> Weights:
    """The mean over responses of their summed tokens."""
    return Weights(own, _responses(own, whole))


@AGGREGATIONS.register("seq-mean-token-sum-norm")
def _constant_length(own: Tensor, whole: Tensor, longest: int) -> Weights:
    """As seq-mean-token-sum, divided by the longest possible response (Dr.GRPO, arXiv:2503.20783)."""
    return Weights(own / longest, _responses(own, whole))


def _responses(own: Tensor, whole: Tensor) -> Tensor:
    """Return the number of responses whose first token is among this rank's."""
    first = (whole != 0) & ((whole != 0).cumsum(1) == 1)
    return (first & (own != 0)).sum().to(own.dtype)
