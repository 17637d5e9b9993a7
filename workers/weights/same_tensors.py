"""Whether two models have the same tensors: of a checkpoint and a model, or of the two sides of a transfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcontroller.errors import DataError


def check_same_tensors(
    have: Mapping[str, Sequence[int]], need: Mapping[str, Sequence[int]], what: str, **fields: Any
) -> None:
    """Check that a source of tensors has those that a model needs, in the same shapes, and no others.

    Args:
        have: the shapes of the source's tensors, by name.
        need: those of the model.
        what: what does not fit what, for the message.
        fields: more fields of the error.

    Raises:
        DataError: they differ; ``missing``, ``unexpected`` and ``differing`` have the names.
    """
    missing, unexpected = sorted(need.keys() - have.keys()), sorted(have.keys() - need.keys())
    differing = [
        f"{name} is {list(have[name])}, the model's is {list(need[name])}"
        for name in sorted(have.keys() & need.keys())
        if list(have[name]) != list(need[name])
    ]
    if missing or unexpected or differing:
        raise DataError(
            f"{what}: missing {some_of(missing)}; unexpected {some_of(unexpected)}; of another shape "
            + some_of(differing),
            missing=missing,
            unexpected=unexpected,
            differing=differing,
            **fields,
        )


def some_of(values: Sequence[str | int], most: int = 8) -> str:
    """Return the first values as text, and how many there are more."""
    text = ", ".join(map(str, values[:most])) or "none"
    return text + (f" and {len(values) - most} more" if len(values) > most else "")
