"""What a worker reports of an update, and how many ranks' reports become one number.

Every metric has one rule. ``TOKEN_MEAN`` averages over all valid tokens of all mini-batches and ranks, ``SUM`` adds,
``MAX`` takes the largest. A loss reports, per micro-batch, the sum over its valid tokens for the first, and the value
for the others. The result is the same on every rank of the layout. Where no step was made there is no mean and no
largest value: such a metric is left out, so that a curve has a gap there, and JSON no number that it cannot hold.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

__all__ = ["TOKENS", "Rule", "reduce_reports"]

TOKENS = "tokens"
"""The name under which a loss reports how many valid tokens it saw: the weight of every TOKEN_MEAN."""


class Rule(enum.Enum):
    """How reports of one metric become one number."""

    TOKEN_MEAN = "token mean"
    SUM = "sum"
    MAX = "max"


def reduce_reports(
    reports: Sequence[Mapping[str, Tensor]],
    rules: Mapping[str, Rule],
    pg: ProcessGroupCollection,
    device: torch.device,
) -> dict[str, float]:
    """One number for every name in ``rules``, on every rank (a collective over dp x cp and then pp).

    Without a valid token in any report only sums are left, which are 0.

    Args:
        reports: of this rank's micro-batches, each with ``TOKENS`` and every name in ``rules``; empty off the last
            stage, and where no step was made.
    """
    names = list(rules)
    table = torch.zeros(len(names) + 1, dtype=torch.float64, device=device)
    largest = torch.full((len(names) + 1,), -math.inf, dtype=torch.float64, device=device)
    if reports:
        values = torch.stack([torch.stack([report[name].double() for name in [*names, TOKENS]]) for report in reports])
        table, largest = values.sum(0), values.amax(0)
    if pg.dp_cp.size() > 1:
        dist.all_reduce(table, group=pg.dp_cp)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=pg.dp_cp)
    both = torch.stack((table, largest))
    if pg.pp.size() > 1:
        dist.broadcast(both, dist.get_process_group_ranks(pg.pp)[-1], group=pg.pp)
    sums, tops = both.tolist()
    tokens = sums[-1]
    found = {}
    for index, (name, rule) in enumerate(rules.items()):
        if rule is Rule.SUM:
            found[name] = sums[index]
        elif tokens:
            found[name] = sums[index] / tokens if rule is Rule.TOKEN_MEAN else tops[index]
    return found
