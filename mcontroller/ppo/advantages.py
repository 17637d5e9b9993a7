"""``compute_advantage``: the advantages of a scored batch, by the name of an estimator."""

from __future__ import annotations

from typing import Any

import torch

from mcontroller.data.protocol import DataProto
from mcontroller.errors import ConfigError
from mcontroller.ppo.data import columns
from mcontroller.ppo.estimators.registry import ADVANTAGE_ESTIMATORS

__all__ = ["compute_advantage"]


def compute_advantage(
    data: DataProto,
    adv_estimator: str = "gae",
    gamma: float = 1.0,
    lam: float = 1.0,
    options: Any = None,
) -> DataProto:
    """Return the batch with columns ``advantages`` and ``returns``, float32 ``[rows, response]``.

    The estimator gets the rows that have response tokens: one whose ``response_mask`` is 0 is in no baseline and in no
    statistic over the batch, and its advantages and returns are 0.

    Args:
        data: ``token_level_rewards`` and ``response_mask`` ``[rows, response]``, ``token_level_scores`` if the rewards
            contain a KL penalty, and the columns that the estimator reads: ``values`` for gae, ``greedy_scores`` for
            remax, the non-tensor column ``uid`` for those that compare responses to the same prompt.
        adv_estimator: a name in ``ADVANTAGE_ESTIMATORS``.
        gamma: discount factor per token.
        lam: lambda of generalized advantage estimation.
        options: the options of the estimator, such as ``GRPOOptions(scale="none")``; None for its defaults.

    Raises:
        ConfigError: no estimator has this name, or it has other options.
        DataError: a column is missing.
    """
    estimator = ADVANTAGE_ESTIMATORS.get_or_raise(adv_estimator)
    chosen: dict[str, Any] = {}
    if estimator.options is not None:
        chosen["options"] = estimator.options() if options is None else options
    if options is not None and not isinstance(options, estimator.options or ()):
        expected = estimator.options.__name__ if estimator.options else "None"
        raise ConfigError(
            f"adv_estimator {adv_estimator!r} was passed options of type {type(options).__name__}; expected {expected}",
            key="options",
            value=options,
        )
    (mask,) = columns(data, "response_mask")
    rows = mask.any(1).nonzero().flatten()
    results = [torch.zeros(mask.shape), torch.zeros(mask.shape)]
    if len(rows) == len(mask):
        results = list(estimator.estimate(data, gamma=gamma, lam=lam, **chosen))
    elif len(rows):
        parts = estimator.estimate(data.select_idxs(rows), gamma=gamma, lam=lam, **chosen)
        results = [torch.zeros(mask.shape, dtype=part.dtype).index_copy(0, rows, part) for part in parts]
    return data.union(DataProto.from_dict({"advantages": results[0], "returns": results[1]}))
