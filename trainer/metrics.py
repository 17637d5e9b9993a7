"""Metrics of a step: how the values of several calls, draws, batches and ranks become one, and which names are taken.

Every metric has one rule, which follows from its name: see ``rule_of``. Values of the same metric meet in ``Metrics``;
metrics of different sources meet in ``united``, which rejects a name that two of them report.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from mcontroller.config.registry import Registry

METRIC_RULES: Registry[MetricRule] = Registry("rule of a metric", key="metrics")
"""Rules by the name of a metric, or by a pattern such as ``mine/*``.

``METRIC_RULES.add("mine/failures", MetricRule.SUM)`` sets that of a metric that a program reports.
"""
_SCORES = ("score", "score_std", "score_min", "score_max", "score_clipped", "unscored", "overlong_penalty")
_PROGRESS = ("prompts", "n", "num_tokens", "epoch", "restarts", "processes", "frac_reward_zero_std")
RESERVED = frozenset({*_SCORES, *_PROGRESS})
"""Names that the trainer reports under ``train/`` and ``held_out/``: no column of a reward can have one."""
_RESERVED_OF_SAMPLES = re.compile(r"(mean|best|maj)_at_\d+")


class MetricRule(enum.Enum):
    """A rule that reduces the values of one metric to one number."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


for _names, _rule in {
    ("episodes/*",): MetricRule.SUM,
    ("rollout/*seconds", "rollout/*bytes*", "weights/*seconds", "weights/*bytes*"): MetricRule.SUM,
    ("weights/policy_version", "memory/*"): MetricRule.MAX,
}.items():
    for _name in _names:
        METRIC_RULES.add(_name, _rule)


def rule_of(name: str) -> MetricRule:
    """Return the rule of a metric: that of ``METRIC_RULES``, or else MAX for ``*_max``, MIN for ``*_min``, or MEAN."""
    if name in METRIC_RULES:
        return METRIC_RULES[name]
    for pattern, rule in METRIC_RULES.items():
        if fnmatchcase(name, pattern):
            return rule
    return MetricRule.MAX if name.endswith("_max") else MetricRule.MIN if name.endswith("_min") else MetricRule.MEAN


class Metrics:
    """Values of metrics from several calls, batches or draws, and what they are reduced to.

    Examples:
        >>> metrics = Metrics()
        >>> metrics.add({"episodes/failed": 3.0, "multi_turn/turns_mean": 2.0}, weight=10)
        >>> metrics.add({"episodes/failed": 4.0, "multi_turn/turns_mean": 5.0}, weight=20)
        >>> metrics.take()
        {'episodes/failed': 7.0, 'multi_turn/turns_mean': 4.0}
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[tuple[float, float]]] = {}

    def add(self, metrics: Mapping[str, float], weight: float = 1.0) -> None:
        """Add the metrics of a part.

        Args:
            metrics: by name; parts may have different names.
            weight: of the part in a mean, such as its number of responses.
        """
        for name, value in metrics.items():
            self._parts.setdefault(name, []).append((float(value), weight))

    def take(self) -> dict[str, float]:
        """Return one number for each metric that a part has, and begin again without parts."""
        parts, self._parts = self._parts, {}
        return {name: _reduced(rule_of(name), values) for name, values in parts.items()}


def _reduced(rule: MetricRule, parts: Sequence[tuple[float, float]]) -> float:
    """Return the number of a metric from the values and weights of its parts."""
    values = [value for value, _ in parts]
    if rule is MetricRule.SUM:
        return sum(values)
    if rule is MetricRule.MAX:
        return max(values)
    if rule is MetricRule.MIN:
        return min(values)
    if len({*values}) == 1:
        return values[-1]
    return sum(value * weight for value, weight in parts) / sum(weight for _, weight in parts)


def over_ranks(metrics: Mapping[str, float | Sequence[float]]) -> dict[str, float]:
    """Return the metrics that data-parallel ranks report, ``meta_info["metrics"]`` of a result, as one number each.

    A rank reports a number of all ranks, so that equal values are not added: the result is the largest of ``MAX``, the
    smallest of ``MIN``, and the mean of all others.
    """
    reduced = {}
    for name, values in metrics.items():
        rule = rule_of(name) if rule_of(name) in (MetricRule.MAX, MetricRule.MIN) else MetricRule.MEAN
        numbers = [values] if isinstance(values, int | float) else values
        reduced[name] = _reduced(rule, [(float(value), 1.0) for value in numbers])
    return reduced


def name_conflict(names: Collection[str], reserved: Iterable[str] = ()) -> tuple[str, str] | None:
    """Return the first name of a column of a reward whose metrics another metric has too, and what reports that.

    Args:
        names: of the columns; each is reported as its mean, and as ``<name>_std``.
        reserved: names that something else has, besides ``RESERVED``.
    """
    reserved_names = RESERVED | {*reserved}
    for name in names:
        if name in reserved_names or f"{name}_std" in reserved_names or _RESERVED_OF_SAMPLES.fullmatch(name):
            return name, "the trainer"
        if name.removesuffix("_std") != name and name.removesuffix("_std") in names:
            return name, f"the standard deviation of {name.removesuffix('_std')!r}"
    return None
