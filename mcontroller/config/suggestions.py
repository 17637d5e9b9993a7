"""Near matches of a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["close_names"]


def close_names(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean a or b?"`` for the names in ``known`` that are similar; empty if there are none."""
    close = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""
