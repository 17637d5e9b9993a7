"""Metrics of an update: how the reports of all micro-batches and ranks are reduced to one number each.

Every metric has one rule. ``TOKEN_MEAN`` averages over all valid tokens of all mini-batches and ranks, ``LOSS_MEAN``
over what the loss counts, ``SUM`` adds, ``MAX`` takes the largest value. For each micro-batch a loss reports the sum
over its valid tokens for the first rule, the weighted sum for the second, and the value for the others. The result is
the same on every rank of the layout. If no step was made, there is no mean and no largest value. Such a metric is
omitted, since JSON cannot represent NaN; a curve has a gap there.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from mcontroller.data.batch import DataProto
from mcontroller.errors import ConfigError, before_changes

TOKENS = "tokens"
"""The key under which a loss reports its number of valid tokens: the weight of every TOKEN_MEAN."""

LOSS_COUNT = "loss_count"
"""The key under which every report has the count that the loss returned: the weight of every LOSS_MEAN."""

LOSS_SIZE = "loss_size"
"""The key under which every report has the absolute value of the loss, before it is divided by the count."""


OF_ROUTERS = {"moe_aux_loss", "moe_seq_aux_loss", "moe_global_aux_loss", "moe_z_loss"}
OF_EVERY_UPDATE = {"lr", "grad_norm", "optimizer_steps", "skipped_steps", "mfu", "mtp_loss", *OF_ROUTERS}
"""Metrics of every update, and of router losses, which a loss must not report."""


class Rule(enum.Enum):
    """A rule that reduces the reports of one metric to one number."""

    TOKEN_MEAN = "token mean"
    LOSS_MEAN = "loss mean"
    SUM = "sum"
    MAX = "max"


def checked_rules(rules: Any, owner: str) -> Mapping[str, Rule]:
    """Return rules by name.

    Args:
        rules: what a user returned or passed.
        owner: where they come from, for the error.

    Raises:
        ConfigError: they are something else, or have the name of a metric in ``OF_EVERY_UPDATE``.
    """
    if not isinstance(rules, Mapping) or not all(isinstance(rule, Rule) for rule in rules.values()):
        with before_changes():
            text = f"{owner} is {rules!r}; expected a dict of names and members of Rule: {', '.join(map(str, Rule))}"
            raise ConfigError(text, key="metrics", value=rules)
    if taken := sorted(OF_EVERY_UPDATE & rules.keys()):
        with before_changes():
            text = f"{owner} has {', '.join(taken)}, which every update reports: choose other names"
            raise ConfigError(text, key="metrics", value=taken)
    return rules


def reduce_reports(
    reports: Sequence[Mapping[str, Tensor]],
    rules: Mapping[str, Rule],
    pg: ProcessGroupCollection,
    device: torch.device,
) -> dict[str, float]:
    """Reduce the reports of all ranks to one number for every name in ``rules`` (a collective over dp x cp, then pp).

    Args:
        reports: scalars of this rank's micro-batches, each report with ``TOKENS``, ``LOSS_COUNT`` and every name in
            ``rules``. Empty on all stages but the last, and if no step was made.
        rules: how to reduce each metric.
        pg: the process groups of the layout.
        device: the device of the collectives.

    Returns:
        The metrics, the same on every rank. If no report has a valid token, only sums, which are 0.

    Raises:
        ConfigError: a report lacks a name.
    """
    if missing := sorted({name for report in reports for name in (*rules, TOKENS) if name not in report}):
        given = ", ".join(sorted(set(reports[0]) - {LOSS_COUNT, LOSS_SIZE})) or "nothing"
        raise ConfigError(
            f"loss reports {given}, and not {', '.join(missing)}, which metrics() names or every report has; override "
            "metrics() of the worker too, with the names that its loss reports, and report TOKENS",
            key="metrics",
        )
    names = [*rules, TOKENS, LOSS_COUNT]
    table = torch.zeros(len(names), dtype=torch.float64, device=device)
    largest = torch.full((len(names),), -math.inf, dtype=torch.float64, device=device)
    if reports:
        values = torch.stack([torch.stack([report[name].double() for name in names]) for report in reports])
        table, largest = values.sum(0), values.amax(0)
    if pg.dp_cp.size() > 1:
        dist.all_reduce(table, group=pg.dp_cp)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=pg.dp_cp)
    both = torch.stack((table, largest))
    if pg.pp.size() > 1:
        dist.broadcast(both, dist.get_process_group_ranks(pg.pp)[-1], group=pg.pp)
    sums, maxima = both.tolist()
    tokens, counts = sums[-2:]
    metrics = {}
    for index, (name, rule) in enumerate(rules.items()):
        if rule is Rule.SUM:
            metrics[name] = sums[index]
        elif rule is Rule.LOSS_MEAN and counts:
            metrics[name] = sums[index] / counts
        elif rule is not Rule.LOSS_MEAN and tokens:
            metrics[name] = sums[index] / tokens if rule is Rule.TOKEN_MEAN else maxima[index]
    return metrics


def reported(prefix: str, metrics: Mapping[str, float]) -> DataProto:
    """Return a DataProto without rows, with each metric in ``meta_info["metrics"]``.

    It is under ``prefix/name``; a name with a slash has its prefix already.
    """
    prefixed = {name if "/" in name else f"{prefix}/{name}": value for name, value in metrics.items()}
    return DataProto(meta_info={"metrics": prefixed})
