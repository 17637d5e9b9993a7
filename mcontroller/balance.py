"""Distribute weighted items over bins so that the heaviest bin is as light as possible (number partitioning).

A partition is constructed, then refined. Longest-processing-time-first (Graham 1969) is fast, and good for many items
per bin; the largest differencing method (Karmarkar and Karp 1982) is better for few. With ``equal_count``, the balanced
form of the latter (Yakir 1996) keeps the numbers of items per bin within one of each other. Refinement moves and
exchanges items between the heaviest bin and lighter ones. If no result is close to the lower bound, a few random
partitions are refined too.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from operator import itemgetter
from random import Random

# The number of items that one construction, or one refinement, may visit.
_DIFFERENCING_STEPS = 300_000
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
    if not equal_count:
        if len(weights) * bins <= _DIFFERENCING_STEPS:
            yield _differencing(weights, bins, 1)
        yield _greedy(weights, bins)
    yield _differencing(weights, bins, bins)
    shuffled, random = list(range(len(weights))), Random(0)
    for _ in range(min(_RANDOM_PARTITIONS, _RANDOM_ITEMS // max(len(weights), 1))):
        random.shuffle(shuffled)
        yield [shuffled[first::bins] for first in range(bins)]


def _heaviest_first(weights: Sequence[int]) -> list[int]:
    return sorted(range(len(weights)), key=lambda item: (-weights[item], item))


def _greedy(weights: Sequence[int], bins: int) -> Bins:
    filled: Bins = [[] for _ in range(bins)]
    lightest = [(0, 0, position) for position in range(bins)]
    for item in _heaviest_first(weights):
        total, count, position = lightest[0]
        filled[position].append(item)
        heapreplace(lightest, (total + weights[item], count + 1, position))
    return filled


def _differencing(weights: Sequence[int], bins: int, together: int) -> Bins:
    """Unite the two partial solutions whose bins differ most, heavy bins with light ones, until one is left.

    Args:
        weights: weight of every item.
        bins: number of bins.
        together: items of each solution at the start; the balanced form begins with one in each bin.
    """
    order = _heaviest_first(weights)
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []  # negative difference, serial number, heaviest first
    for start in range(0, len(order), together):
        items = order[start : start + together]
        solution = [(weights[item], [item]) for item in items] + [(0, list[int]())] * (bins - len(items))
        heap.append((solution[-1][0] - solution[0][0], start, solution))
    heapify(heap)
    for serial in range(len(order), len(order) + len(heap) - 1):
        first, second = heappop(heap)[2], heappop(heap)[2]
        pairs = zip(first, reversed(second), strict=True)
        united = sorted(((a + b, left + right) for (a, left), (b, right) in pairs), key=itemgetter(0), reverse=True)
        heappush(heap, (united[-1][0] - united[0][0], serial, united))
    return [items for _, items in heap[0][2]]


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
