"""Initial weights: replicas that are drawn with different seeds, and parts of one weight drawn with the same one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from parallel_state.simulated.agreement import digest_of
from parallel_state.verify.outcome import Difference
from parallel_state.verify.weights import NamedTensor


@dataclass(frozen=True)
class InitialPart:
    """A part of a weight as the program initialized it.

    Attributes:
        name: the weight.
        digest: a sum over its bits.
        expected: the same of what one process initialized it with.
    """

    name: str
    digest: str
    expected: str


def initial_parts(named: Sequence[NamedTensor], start: Mapping[str, torch.Tensor]) -> dict[str, InitialPart]:
    """Return the weights of a rank by their position in the whole model, which one process started with ``start``."""
    weights = [weight for weight in named if isinstance(weight.tensor, torch.nn.Parameter)]
    return {
        weight.position: InitialPart(weight.name, digest_of(weight.tensor), digest_of(weight.of(start)))
        for weight in weights
    }


def wrong_seeds(ranks: Sequence[tuple[Mapping[str, InitialPart], dict[str, int]]]) -> Iterator[Difference]:
    """Yield the weights whose replicas start with different values, and those whose parts start with the same.

    Parts that one process starts with the same values too, such as zeros, may have them.

    Args:
        ranks: for each rank its parts by position, and its coordinates.
    """
    by_position: dict[str, tuple[int, InitialPart]] = {}
    by_value: dict[tuple[str, str], tuple[int, str, str]] = {}
    for rank, (parts, coordinates) in enumerate(ranks):
        for position, part in parts.items():
            first, other = by_position.setdefault(position, (rank, part))
            note = ""
            if other.digest != part.digest:
                note = f"its replicas start with other values than on rank {first}: their seeds differ"
            else:
                first, same, expected = by_value.setdefault((part.name, part.digest), (rank, position, part.expected))
                if same != position and expected != part.expected:
                    note = f"this part starts with the values of another part, on rank {first}: their seeds agree"
            if note:
                yield Difference("seed", part.name, 1, rank, coordinates, math.inf, note)
