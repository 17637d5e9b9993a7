"""How the losses of tokens are averaged over a mini-batch.

A mode assigns a weight to each token, and a count that the weighted sum is divided by. The count is summed over all
micro-batches, data-parallel and context-parallel ranks of the mini-batch, so that the average does not depend on how
the batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from mcontroller.config.registry import Registry

__all__ = ["AGGREGATIONS", "Aggregation", "Weights"]


class Weights(NamedTuple):
    """The weights of an average over tokens.

    Attributes:
        tokens: float ``[rows, response]``, the weight of every token; 0 outside of the mask.
        count: float scalar, this part's share of the number that the weighted sum is divided by.
    """

    tokens: Tensor
    count: Tensor


Aggregation = Callable[[Tensor, Tensor, int], Weights]
"""Maps a mask, the lengths of the responses, and the longest possible response to ``Weights``.

The mask ``[rows, response]`` has the tokens of this rank; the lengths ``[rows]`` count the tokens of the whole
response, those of other context-parallel ranks included.
"""

AGGREGATIONS: Registry[Aggregation] = Registry("aggregation of the loss", key="loss_agg_mode")
"""Modes by the name that ``ActorConfig.loss_agg_mode`` takes."""


@AGGREGATIONS.register("token-mean")
def _token_mean(mask: Tensor, lengths: Tensor, longest: int) -> Weights:
    """Each token counts once (DAPO, arXiv:2503.14476)."""
    return Weights(mask, mask.sum())


@AGGREGATIONS.register("seq-mean-token-mean")
def _sequence_mean_of_means(mask: Tensor, lengths: Tensor, longest: int) -> Weights:
    """Each response counts once, whatever its length (GRPO, arXiv:2402.03300)."""
    shares = _shares(mask, lengths)
    return Weights(shares, shares.sum())


@AGGREGATIONS.register("seq-mean-token-sum")
def _sequence_mean_of_sums(mask: Tensor, lengths: Tensor, longest: int) -> Weights:
    """The mean over responses of their summed tokens."""
    return Weights(mask, _shares(mask, lengths).sum())


@AGGREGATIONS.register("seq-mean-token-sum-norm")
def _constant_length(mask: Tensor, lengths: Tensor, longest: int) -> Weights:
    """As seq-mean-token-sum, divided by the longest possible response (Dr.GRPO, arXiv:2503.20783)."""
    return Weights(mask / longest, _shares(mask, lengths).sum())


def _shares(mask: Tensor, lengths: Tensor) -> Tensor:
    """Return 1 / length on each token of a response: summed over tokens and ranks, the number of responses."""
    return mask / lengths.clamp(min=1)[:, None]
