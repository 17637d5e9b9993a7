"""Copies of rows of a tensor, with gradients that are added in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Spread", "spread_of"]


@dataclass(frozen=True)
class Spread:
    """For every place, the source that it takes its values from; a source may be in many places, or in none.

    ``index_select`` copies as well, but on a GPU adds the gradients in any order, so that two runs differ.

    Attributes:
        index: ``[places]`` int64, the source of each place.
        place: ``[sources]`` int64, the first place of each source that counts; 0 if there is none.
        absent: int64, the sources without such a place.
        several: ``[n]`` int64, the sources with several of them.
        others: ``[n, most - 1]`` int64, their further places; the first one again where there are fewer.
        weights: float32 ``[n, most - 1]``, 0 for the repeated entries. None: there are none.
    """

    index: Tensor
    place: Tensor
    absent: Tensor
    several: Tensor
    others: Tensor
    weights: Tensor | None

    def __call__(self, values: Tensor) -> Tensor:
        """Return ``[places, ...]`` of ``values`` ``[sources, ...]``."""
        copied: Tensor = _Spreading.apply(values, self)
        return copied

    def one_of_each(self, values: Tensor) -> Tensor:
        """Return ``[sources, ...]`` of ``values`` ``[places, ...]``, which are equal in all places of a source.

        Sources without a place get the values of place 0.
        """
        return values.index_select(0, self.place)

    def sum_of_each(self, values: Tensor) -> Tensor:
        """Return ``[sources, ...]``, the sums of ``values`` ``[places, ...]`` over the places of each source."""
        sums = values.index_select(0, self.place)
        if len(self.absent):
            sums.index_fill_(0, self.absent, 0)
        if len(self.several):
            further = values.index_select(0, self.others.flatten()).unflatten(0, self.others.shape)
            if self.weights is not None:
                further = further * self.weights.to(further.dtype).view(*self.weights.shape, *[1] * (values.dim() - 1))
            sums.index_add_(0, self.several, further.sum(1))  # no source comes twice
        return sums

    def to(self, device: torch.device) -> Spread:
        """Return the indices on ``device``."""
        weights = None if self.weights is None else self.weights.to(device)
        index, place, absent = self.index.to(device), self.place.to(device), self.absent.to(device)
        return Spread(index, place, absent, self.several.to(device), self.others.to(device), weights)


def spread_of(index: Tensor, sources: int, counted: Tensor | None = None) -> Spread:
    """Return the spread that ``index`` describes; call it while the tensors are on the CPU.

    Args:
        index: ``[places]`` int64.
        sources: number of sources.
        counted: bool ``[places]``, False for places whose values nothing reads: their gradient is 0. None: all count.
    """
    places = torch.arange(len(index)) if counted is None else counted.nonzero().flatten()
    by_source, order = index[places].sort(stable=True)
    places = places[order]
    found, times = by_source.unique_consecutive(return_counts=True)
    starts = times.cumsum(0) - times
    place = torch.zeros(sources, dtype=torch.long)
    place[found] = places[starts]
    absent = torch.ones(sources, dtype=torch.bool)
    absent[found] = False
    several = times > 1
    further = torch.arange(1, int(times.max()) if len(times) else 1)
    inside = further < times[several, None]
    others = places[starts[several, None] + further * inside]
    weights = None if bool(inside.all()) else inside.float()
    return Spread(index, place, absent.nonzero().flatten(), found[several], others, weights)


class _Spreading(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor, spread: Spread) -> Tensor:
        context.spread = spread
        return values.index_select(0, spread.index)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        spread: Spread = context.spread
        return spread.sum_of_each(gradients[0]), None
