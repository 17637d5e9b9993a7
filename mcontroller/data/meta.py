"""The ``meta_info`` of a batch: its keys with a meaning, and how values are copied, compared and merged."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcontroller.data.columns import describe
from mcontroller.errors import ConfigError, DataError

METRICS = "metrics"
"""The key whose values are gathered instead of compared."""

ROWS_TOGETHER = "rows_together"
"""The key of how many consecutive rows stay in one micro-batch, on one data-parallel rank: 2 for pairs."""

_logger = logging.getLogger(__name__)


def check_near_names(info: Mapping[str, Any], names: Sequence[str], what: str) -> None:
    """Check that no key is nearly one of ``names``: it would be ignored. Other keys are the program's own.

    Args:
        info: the ``meta_info`` of a batch.
        names: the keys that are read.
        what: what they set, for the error.

    Raises:
        ConfigError: with the key and the nearest name.
    """
    for key in info:
        close = [] if key in names else difflib.get_close_matches(str(key), names, 1, cutoff=0.8)
        if close:
            raise ConfigError(
                f"meta_info[{key!r}] is no setting of {what}; did you mean {close[0]!r}? Rename the key if it is a "
                "value of your program",
                key=key,
                value=info[key],
            )


def rows_together(info: Mapping[str, Any], rows: int) -> int:
    """Return how many consecutive rows of a batch stay together; 1 if its ``meta_info`` does not say.

    Args:
        info: the ``meta_info`` of the batch.
        rows: number of rows of the batch.

    Raises:
        DataError: it is not an integer above 0 that divides ``rows``.
    """
    size = info.get(ROWS_TOGETHER, 1)
    if not isinstance(size, int) or size < 1 or rows % size:
        raise DataError(
            f"meta_info['rows_together'] is {size!r} for {rows} rows: expected how many consecutive rows stay "
            "together, an integer that divides the number of rows",
            key=ROWS_TOGETHER,
            value=size,
            rows=rows,
        )
    return int(size)


def copy_meta(value: Any) -> Any:
    """Copy the dicts, lists, sets and tuples of a value; share everything else, such as tensors."""
    kind = type(value)
    if kind is dict:
        return {key: copy_meta(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(copy_meta(item) for item in value)
    return set(value) if kind is set else value


# ---- comparison ------------------------------------------------------------------------------------------------------


def same_value(left: Any, right: Any) -> bool:
    """Return whether two values agree in type and content, also inside containers, arrays, tensors and TensorDicts.

    NaN equals NaN, and devices may differ.
    """
    if left is right:
        return True
    kinds: tuple[tuple[type, Callable[[Any, Any], bool]], ...] = (
        (Tensor, _same_tensor),
        (np.ndarray, _same_array),
        (Mapping, _same_mapping),
    )
    for kind, same in kinds:
        if isinstance(left, kind) or isinstance(right, kind):
            return isinstance(left, kind) and isinstance(right, kind) and same(left, right)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(same_value, left, right))
    if left != left and right != right:
        return type(left) is type(right)
    return bool(left == right)


def _same_tensor(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = left.detach().cpu(), right.detach().cpu()
    if left.dtype.is_floating_point and left.dtype.itemsize == 1:  # torch does not compare them
        left, right = left.float(), right.float()
    return torch.equal(left, right) or bool(((left == right) | ((left != left) & (right != right))).all())


def _same_array(left: np.ndarray, right: np.ndarray) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype == object:
        return all(map(same_value, left.flat, right.flat))
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fcmM"))


def _same_mapping(left: Mapping[Any, Any], right: Mapping[Any, Any]) -> bool:
    if getattr(left, "batch_size", None) != getattr(right, "batch_size", None):  # of TensorDicts
        return False
    keys = left.keys()  # a TensorDict iterates over its rows
    return set(keys) == set(right.keys()) and all(same_value(left[key], right[key]) for key in keys)


# ---- merging ---------------------------------------------------------------------------------------------------------


def merge_concat(parts: Sequence[Mapping[str, Any]], *, keep_first: bool = False) -> dict[str, Any]:
    """Merge the meta_info of parts whose rows are concatenated.

    A key is kept if its values agree in all parts that have it. ``metrics``, a dict of name -> number or list, becomes
    name -> flat list of the values of every part that has the name, in the order of the parts.

    Args:
        parts: the ``meta_info`` of every part.
        keep_first: whether a key whose values differ keeps the value of the first part that has it. A log line names
            the key.

    Raises:
        DataError: if the values of another key differ, without ``keep_first``; names the key, the parts and the values.
    """
    merged: dict[str, Any] = {}
    origin: dict[str, int] = {}
    metrics: dict[str, list[Any]] = {}
    differing: set[str] = set()
    for position, part in enumerate(parts):
        for key, value in part.items():
            if key == METRICS and isinstance(value, Mapping):
                for name, number in value.items():
                    metrics.setdefault(name, []).extend(number if isinstance(number, list | tuple) else [number])
                value = metrics
            if key not in merged:
                merged[key], origin[key] = metrics if value is metrics else copy_meta(value), position
            elif not same_value(merged[key], value):
                if not keep_first:
                    raise _conflict("concat", key, (origin[key], merged[key]), (position, value))
                differing.add(key)
    if differing:
        _logger.info(
            "meta_info of the parts differs in %s: the value of the first part is kept", sorted(differing, key=str)
        )
    return merged


def merge_union(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the meta_info of two batches whose columns are united; two dicts under ``metrics`` are merged by name.

    Raises:
        DataError: if the values of a key differ; names the key and the values.
    """
    merged: dict[str, Any] = copy_meta(dict(left))
    for key, value in right.items():
        if key not in merged:
            merged[key] = copy_meta(value)
        elif key == METRICS and isinstance(value, Mapping) and isinstance(merged[key], Mapping):
            merged[key] = merge_union(merged[key], value)
        elif not same_value(merged[key], value):
            raise _conflict("union", key, (0, merged[key]), (1, value))
    return merged


def _conflict(operation: str, key: str, first: tuple[int, Any], second: tuple[int, Any]) -> DataError:
    return DataError(
        f"meta_info[{key!r}] differs in {operation}: {describe(first[1])} in part {first[0]}, {describe(second[1])} in "
        f"part {second[0]}; drop or rename the key, or put numbers per part under 'metrics'",
        key=key,
        parts=(first[0], second[0]),
        values=(first[1], second[1]),
    )


def united(*sources: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of different sources, of which none overwrites another's.

    Raises:
        DataError: two of them report a metric of the same name.
    """
    metrics: dict[str, float] = {}
    for source in sources:
        for name in source:
            if name in metrics:
                raise DataError(
                    f"the metric {name!r} is reported twice, with the values {metrics[name]} and {source[name]}: "
                    "rename that of your worker class, reward, rollout_fn or callback",
                    metric=name,
                    values=(metrics[name], source[name]),
                )
        metrics |= source
    return metrics
