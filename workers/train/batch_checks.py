"""Checks of a batch's columns; every error names the method, the column and the row."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcontroller.errors import ConfigError, DataError

_ADVICE = "; compute_log_prob makes old_log_probs, which several optimizer steps with a batch need"
_WHAT_TRAINS = ("advantages", "returns", "importance_weights")
TOP_COLUMNS = ("top_ids", "top_log_probs")
"""Columns ``[rows, response, k]``: the most likely tokens of a teacher, and their log-probabilities."""


def check_top_columns(batch: Mapping[str, Tensor], vocab_size: int, method: str) -> None:
    """Check that ``top_ids`` and ``top_log_probs`` have one shape, and the ids are in the vocabulary."""
    ids, log_probs = (batch[name] for name in TOP_COLUMNS)
    check_shapes({"top_log_probs": log_probs[..., 0]}, tuple(ids.shape[:2]), method)
    check_token_ids("top_ids", ids, method)
    if ids.shape != log_probs.shape or bool(((ids < 0) | (ids >= vocab_size)).any()):
        raise DataError(
            f"{method}: top_ids is {list(ids.shape)} with ids up to {int(ids.max())}, top_log_probs is "
            f"{list(log_probs.shape)}; expected equal shapes, and ids of the student's vocabulary of {vocab_size}",
            method=method,
            column="top_ids",
        )


def temperature_of(meta_info: Mapping[str, Any], default: float, method: str) -> float:
    """Return the temperature of a batch, or the ``default``.

    Raises:
        ConfigError: it is not a finite number above 0.
    """
    temperature = meta_info.get("temperature", default)
    number = isinstance(temperature, numbers.Real) and not isinstance(temperature, bool)
    if not number or not 0 < float(temperature) < math.inf:
        raise ConfigError(
            f"{method}: meta_info['temperature'] is {temperature!r}; it must be a finite number above 0",
            key="temperature",
            value=temperature,
        )
    return float(temperature)


def check_temperatures(column: Tensor, mask: Tensor, method: str) -> None:
    """Check that the tokens that count were sampled, at a finite temperature above 0.

    Raises:
        DataError: with the first row that has another token: 0 marks the most probable one, which is no sample.
    """
    wrong = (mask != 0) & ~((column > 0) & column.isfinite())
    if bool(wrong.any()):
        row = int(wrong.any(1).nonzero()[0])
        value = float(column[row][wrong[row]][0])
        raise DataError(
            f"{method}: token_temperatures of row {row} has {value:g} for a token that counts; expected a number above "
            "0. Tokens that were taken as the most probable ones (temperature 0) are no samples of the policy: leave "
            "the row out, or set its response_mask to 0",
            method=method,
            column="token_temperatures",
            row=row,
            value=value,
        )


def check_finite(columns: Mapping[str, Tensor], mask: Tensor, method: str) -> None:
    """Check that what trains the tokens that count is finite: one NaN would make the whole gradient NaN.

    Raises:
        DataError: with the first row for which a column is not.
    """
    for name in _WHAT_TRAINS:
        if name not in columns:
            continue
        wrong = (mask != 0) & ~columns[name].isfinite()
        if bool(wrong.any()):
            row = int(wrong.any(1).nonzero()[0])
            value = float(columns[name][row][wrong[row]][0])
            raise DataError(
                f"{method}: {name} of row {row} has the value {value:g} for a token that counts; expected a finite "
                "number. Set response_mask of the row to 0 to leave it out",
                method=method,
                column=name,
                row=row,
                value=value,
            )


def require_columns(columns: Mapping[str, Tensor], names: Sequence[str], method: str) -> None:
    """Check that every one of ``names`` is a column ``[rows, tokens]``, and that the batch has rows.

    Raises:
        DataError: if a column is missing or has another number of dims, or if there are 0 rows.
    """
    missing = [name for name in names if name not in columns]
    if missing:
        raise DataError(
            f"{method} needs the column{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}; "
            f"the batch has {sorted(columns)}{_ADVICE if 'old_log_probs' in missing else ''}",
            method=method,
            missing=missing,
            present=sorted(columns),
        )
    for name in names:
        column = columns[name]
        dims = "[rows, tokens, k]" if name in TOP_COLUMNS else "[rows, tokens]"
        if not isinstance(column, Tensor) or column.dim() != dims.count(",") + 1:
            shape = list(column.shape) if isinstance(column, Tensor) else type(column).__name__
            text = f"{method}: column {name!r} is {shape}, expected a tensor {dims}"
            raise DataError(text, method=method, column=name)
    if columns[names[0]].size(0) == 0:
        raise DataError(
            f"{method} received a batch of 0 rows on this rank, expected at least 1: pass a row for every "
            "data-parallel rank, or use a dispatch mode with padding",
            method=method,
            rows=0,
        )


def check_prompts(batch: Mapping[str, Tensor], *, method: str, vocab_size: int, prompt_length: int) -> None:
    """Check that the batch has prompts padded on the left, in ``input_ids``, ``attention_mask`` ``[rows, prompt]``.

    Args:
        batch: the columns.
        method: the worker method that reads the batch, for error messages.
        vocab_size: token ids must be less than this.
        prompt_length: the most tokens of a prompt.

    Raises:
        DataError: if a row is padded on the right, or for any reason for which ``locate_tokens`` raises.
    """
    require_columns(batch, ("input_ids", "attention_mask"), method)
    start, lengths = locate_tokens(batch, method, vocab_size, prompt_length)
    unfinished = start + lengths < batch["input_ids"].size(1)
    if bool(unfinished.any()):
        row = int(unfinished.nonzero()[0])
        raise DataError(
            f"{method}: row {row} is padded on the right; pad prompts on the left, so that all responses start in the "
            "same column",
            method=method,
            row=row,
        )


def locate_tokens(batch: Mapping[str, Tensor], method: str, vocab_size: int, max_length: int) -> tuple[Tensor, Tensor]:
    """Check the token ids and the attention mask, and return the position of the tokens in each row.

    Args:
        batch: ``input_ids`` and ``attention_mask``, ``[rows, seq]``.
        method: the worker method that reads the batch, for error messages.
        vocab_size: token ids must be less than this.
        max_length: the most tokens of a row.

    Returns:
        The first column with a token, and the number of tokens, both ``[rows]`` int64.

    Raises:
        DataError: if ids are not integers or are outside the vocabulary; if the mask has another shape or values
            other than 0 and 1; or if a row has no token, a gap, or more than ``max_length`` tokens.
    """
    ids, attention = batch["input_ids"], batch["attention_mask"] != 0
    check_token_ids("input_ids", ids, method)
    check_shapes({"attention_mask": attention}, tuple(ids.shape), method)
    check_mask("attention_mask", batch["attention_mask"], method)
    if ids.size(1) == 0:
        text = f"{method}: input_ids is {list(ids.shape)}, expected at least one token in every row"
        raise DataError(text, method=method, row=0)
    lengths = attention.sum(1)
    start = attention.int().argmax(1)
    columns = torch.arange(ids.size(1))[None]
    contiguous = (columns >= start[:, None]) & (columns < (start + lengths)[:, None])
    _check_rows(lengths, (contiguous != attention).any(1), method, max_length)
    outside = attention & ((ids < 0) | (ids >= vocab_size))
    if bool(outside.any()):
        row = int(outside.any(1).nonzero()[0])
        token = int(ids[row][outside[row]][0])
        raise DataError(
            f"{method}: row {row} has the token id {token}, outside the vocabulary of {vocab_size}",
            method=method,
            row=row,
            token=token,
        )
    return start, lengths


def check_responses(batch: Mapping[str, Tensor], prompt_width: int, method: str) -> None:
    """Check that ``responses`` is the end of ``input_ids``, and that ``response_mask`` is 0 on padding.

    Raises:
        DataError: with the first row for which one of them does not hold.
    """
    attended = batch["attention_mask"][:, prompt_width:] != 0
    differing = (batch["responses"] != batch["input_ids"][:, prompt_width:]) & attended
    counted = batch["response_mask"] != 0 if "response_mask" in batch else attended
    for column, wrong, reason in (
        ("responses", differing, "differs from the end of input_ids"),
        ("response_mask", counted & ~attended, "is 1 at a token that attention_mask marks as padding"),
    ):
        if bool(wrong.any()):
            row = int(wrong.any(1).nonzero()[0])
            raise DataError(f"{method}: {column} of row {row} {reason}", method=method, column=column, row=row)


def check_token_ids(name: str, column: Tensor, method: str) -> None:
    """Check that the column has an integer dtype; raise DataError otherwise."""
    if column.dtype.is_floating_point or column.dtype == torch.bool:
        text = f"{method}: {name} is {column.dtype}; token ids must be integers"
        raise DataError(text, method=method, column=name, dtype=str(column.dtype))


def check_mask(name: str, mask: Tensor, method: str) -> None:
    """Check that all values are 0 or 1; raise DataError otherwise.

    The loss is divided by the sum of the mask: with other values that would not be the number of its tokens.
    """
    wrong = (mask != 0) & (mask != 1)
    if bool(wrong.any()):
        row = int(wrong.any(1).nonzero()[0])
        value = float(mask[row][wrong[row]][0])
        raise DataError(
            f"{method}: {name} of row {row} has the value {value:g}; it must be 1 where a token counts and 0 elsewhere "
            "(to weight tokens, use another column)",
            method=method,
            column=name,
            row=row,
            value=value,
        )


def check_shapes(columns: Mapping[str, Tensor], shape: tuple[int, ...], method: str) -> None:
    """Check that every column has this shape; raise DataError otherwise."""
    for name, column in columns.items():
        if tuple(column.shape) != shape:
            raise DataError(
                f"{method}: column {name!r} is {list(column.shape)}, expected {list(shape)}",
                method=method,
                column=name,
                shape=tuple(column.shape),
                expected=shape,
            )


def _check_rows(lengths: Tensor, gaps: Tensor, method: str, max_length: int) -> None:
    for wrong, reason in (
        (lengths == 0, "is padding only: its attention_mask has no 1"),
        (gaps, "has a gap: the 1s of its attention_mask must be contiguous, with padding only before and after them"),
        (lengths > max_length, f"is longer than {max_length}, the maximum"),
    ):
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise DataError(
                f"{method}: row {row}, of {int(lengths[row])} tokens, {reason}",
                method=method,
                row=row,
                length=int(lengths[row]),
                rows=wrong.nonzero().flatten().tolist(),
            )
