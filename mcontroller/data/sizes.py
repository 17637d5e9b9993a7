"""Byte counts as text."""

from __future__ import annotations

__all__ = ["format_bytes"]


def format_bytes(size: float) -> str:
    """Format a number of bytes in decimal units: ``680 B``, ``1.5 kB``, ``120.0 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
