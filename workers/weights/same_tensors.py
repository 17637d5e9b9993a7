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
            f"{what}: missing {_some(missing)}; unexpected {_some(unexpected)}; of another shape {_some(differing)}",
            missing=missing,
            unexpected=unexpected,
            differing=differing,
            **fields,
        )


def _some(names: Sequence[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
