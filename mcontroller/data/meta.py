"""The rules for ``meta_info``: how it is copied, compared and merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from mcontroller.data import columns
from mcontroller.data.tensordicts import is_tensordict_base
from mcontroller.errors import DataError

METRICS = "metrics"

_ATOMS = frozenset({str, int, float, bool, bytes, type(None)})


def is_flat(info: Mapping[str, Any]) -> bool:
    """Whether every value is a plain number, string or None."""
    return _ATOMS.issuperset(map(type, info.values()))


def copy_meta(value: Any) -> Any:
    """The same value with dicts, lists, sets and tuples of its own; what they hold is shared, as columns are."""
    kind = type(value)
    if kind is dict:
        return {key: copy_meta(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(copy_meta(item) for item in value)
    if kind is set:
        return set(value)
    return value


def copier(info: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """What makes copies of ``info``, as ``copy_meta`` does, when many are needed."""
    return info.copy if is_flat(info) else partial(copy_meta, info)


def same_value(left: Any, right: Any) -> bool:
    """Whether two values agree in type and content, through containers, arrays and tensors; NaN equals NaN."""
    if left is right:
        return True
    kinds = _tensor_kind(left), _tensor_kind(right)
    if any(kinds):
        return kinds[0] == kinds[1] and columns.same(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and same_array(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return columns.same_mapping(left, right, same_value)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(same_value, left, right))
    if left != left and right != right:
        return type(left) is type(right)
    return bool(left == right)


def same_array(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two arrays agree in dtype, shape and every element."""
    if left is right:
        return True
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype == object:
        return all(map(same_value, left.flat, right.flat))
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc"))


def merge_concat(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The meta_info of a batch joined from parts.

    A key whose values agree wherever it stands is kept. ``metrics``, a dict of name -> number or list, becomes
    name -> flat list of the values of every part that has it, in part order. Raises DataError on any other difference.
    """
    first = parts[0]
    if all([_ATOMS.issuperset(map(type, part.values())) and part == first for part in parts]):
        return dict(first)
    merged: dict[str, Any] = {}
    origin: dict[str, int] = {}
    metrics: list[Mapping[str, Any]] = []
    for position, part in enumerate(parts):
        for key, value in part.items():
            if key == METRICS and isinstance(value, Mapping):
                metrics.append(value)
            elif key not in merged:
                merged[key], origin[key] = copy_meta(value), position
            elif not same_value(merged[key], value):
                raise _conflict("concat", key, (origin[key], merged[key]), (position, value))
    if metrics and METRICS in merged:
        raise DataError(
            f"meta_info['metrics'] is {short(merged[METRICS])} in part {origin[METRICS]}, a dict in others: "
            "give a dict of name -> number or list in all of them",
            key=METRICS,
        )
    return merged | {METRICS: merge_metrics(metrics)} if metrics else merged


def merge_metrics(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Name -> the values of every part that has it, lists joined flat; parts may differ in their names."""
    merged: dict[str, list[Any]] = {}
    for part in parts:
        for name, value in part.items():
            merged.setdefault(name, []).extend(value if isinstance(value, list | tuple) else [value])
    return merged


def merge_union(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both; two dicts under ``metrics`` are united by name. Raises DataError where the values differ."""
    merged = copy_meta(dict(left))
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
        f"meta_info[{key!r}] differs in {operation}: {short(first[1])} in part {first[0]}, "
        f"{short(second[1])} in part {second[0]}; drop or rename the key, or put numbers per part under 'metrics'",
        key=key,
        parts=(first[0], second[0]),
        values=(first[1], second[1]),
    )


def _tensor_kind(value: Any) -> str | None:
    return "tensor" if isinstance(value, Tensor) else "tensordict" if is_tensordict_base(value) else None


def short(value: Any, limit: int = 80) -> str:
    """A value in a few words: dtype and shape of a column, else its repr, cut."""
    if _tensor_kind(value) or isinstance(value, np.ndarray):
        return columns.describe(value)
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
