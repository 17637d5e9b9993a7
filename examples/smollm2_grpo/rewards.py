"""Rewards of the example: the right number, in few words."""

from __future__ import annotations

import re


def right(response: str, answer: str) -> float:
    """Return 1 if the last number in the response is the answer."""
    numbers = re.findall(r"-?\d+", response)
    return float(bool(numbers) and numbers[-1] == answer)


def short(response: str) -> float:
    """Return 1 for a response of one word, and less for more words."""
    return 1.0 / max(1, len(response.split()))
