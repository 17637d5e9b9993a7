"""Batches of data sets: the rows of batch k depend only on k and the seed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from mcontroller.data.batch import DataProto, DataProtoItem, collate_fn
from mcontroller.errors import DataError


class Dataset(Protocol):
    """Rows by index. A row maps names to tensors, of the same shape in every row, and to any other objects."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Return a row."""


def collate(rows: Sequence[Mapping[str, Any]]) -> DataProto:
    """Return a batch of rows: tensors stacked, other objects as non-tensor columns.

    Raises:
        DataError: rows differ in their columns, or in dtype or shape of one.
    """
    return collate_fn([_item(row) for row in rows])


def _item(row: Mapping[str, Any]) -> DataProtoItem:
    tensors = {name: value for name, value in row.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in row.items() if name not in tensors}
    return DataProtoItem(TensorDict(tensors, []), others)


def check_rows(**datasets: Dataset | None) -> None:
    """Raise DataError if a data set, given by name, has no rows, or its first one lacks the tensors of prompts."""
    expected = "expected a mapping with input_ids and attention_mask [prompt], such as a row of trainer.PromptRows"
    for name, dataset in datasets.items():
        if dataset is None:
            continue
        if len(dataset) == 0:
            raise DataError(f"{name} has no rows: leave it out, or add some", rows=0)
        row: object = dataset[0]
        if not isinstance(row, Mapping):
            raise DataError(f"{name}: row 0 is {repr(row)[:60]} of type {type(row).__name__}; {expected}", row=0)
        for column in ("input_ids", "attention_mask"):
            if not isinstance(row.get(column), Tensor):
                has = ", ".join(row) or "no columns"
                raise DataError(f"{name}: row 0 has {has}, and no tensor {column!r}; {expected}", column=column)


class Mixture:
    """Several data sets as one: ``rows`` takes turns between them in the ratio of their weights.

    Of the first k rows of the sequence, each data set has its share of k, to within a few rows. Each goes through its
    own passes: a small one with a large weight is repeated more often.

    Args:
        datasets: the data sets by name.
        weights: of each data set, more than 0; None: its number of rows.
    """

    def __init__(self, datasets: Mapping[str, Dataset], weights: Mapping[str, float | None]) -> None:
        self.datasets = list(datasets.values())
        self.starts = [0, *accumulate(map(len, self.datasets))]
        given = [weights.get(name) for name in datasets]
        known = [
            len(dataset) if weight is None else weight for dataset, weight in zip(self.datasets, given, strict=True)
        ]
        self._shares = [weight / sum(known) for weight in known]
        self._turns: list[tuple[int, int]] = []
        self._counts = [0] * len(self.datasets)

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        number = bisect_right(self.starts, index) - 1
        return self.datasets[number][index - self.starts[number]]

    def turn(self, position: int) -> tuple[int, int]:
        """Return the number of the data set that has a position of the sequence, and how many it had before."""
        while len(self._turns) <= position:
            total = len(self._turns) + 1
            behind = [share * total - count for share, count in zip(self._shares, self._counts, strict=True)]
            number = behind.index(max(behind))
            self._turns.append((number, self._counts[number]))
            self._counts[number] += 1
        return self._turns[position]


class BatchStream:
    """An endless sequence of batches: ``stream[k]`` is batch k, in a new random order for every pass over the data.

    The rows left at the end of a pass that do not fill a batch are dropped. A ``Mixture`` has no end of a pass.

    The position of a row is its place in the sequence of all passes, which depends on the data and the seed, and not on
    the size of batches: a run may resume with another one.

    Args:
        dataset: the rows.
        batch_size: rows of a batch.
        seed: seed of the order.
        name: the name of the data set in error messages.

    Raises:
        DataError: the data set has fewer rows than one batch.
    """

    def __init__(self, dataset: Dataset, batch_size: int, seed: int, name: str = "train_dataset") -> None:
        self.per_pass = len(dataset) // batch_size
        if self.per_pass == 0:
            raise DataError(
                f"{name} has {len(dataset)} rows, less than one batch of {batch_size}: add rows, or reduce the batch",
                rows=len(dataset),
                batch_size=batch_size,
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self._orders: dict[int, tuple[int, list[int]]] = {}
        self._start, self._position = 0, 0
        self._earlier: Mapping[int, Sequence[int]] = {}

    def resume(self, index: int, position: int, earlier: Mapping[int, Sequence[int]] | None = None) -> None:
        """Continue a stream, which may have had another batch size.

        Args:
            index: number of the next batch.
            position: of the first row of those that were not read.
            earlier: positions of the rows of batches before ``index``.
        """
        self._start, self._position, self._earlier = index, position, dict(earlier or {})

    def position(self, index: int) -> int:
        """Return the position of the first row after those of the batches before ``index``."""
        return self._position if index <= self._start else self.rows(index - 1)[-1] + 1

    def batches_of(self, passes: int) -> int:
        """Return the number of batches of a new stream in so many passes."""
        is_endless = isinstance(self.dataset, Mixture)
        return passes * len(self.dataset) // self.batch_size if is_endless else passes * self.per_pass

    def rows(self, index: int) -> list[int]:
        """Return the positions of the rows of a batch, in the next pass if too few rows are left of one."""
        if index in self._earlier:
            return list(self._earlier[index])
        number, rows, first = index - self._start, len(self.dataset), self._position
        in_pass = (rows - first % rows) // self.batch_size
        if not isinstance(self.dataset, Mixture) and number >= in_pass:
            passes, number = divmod(number - in_pass, self.per_pass)
            first = (first // rows + 1 + passes) * rows
        start = first + number * self.batch_size
        return list(range(start, start + self.batch_size))

    def _row(self, position: int) -> int:
        """Return the row of the data set at a position."""
        dataset, (number, before) = self.dataset, (0, position)
        start, size = 0, len(dataset)
        if isinstance(dataset, Mixture):
            number, before = dataset.turn(position)
            start, size = dataset.starts[number], len(dataset.datasets[number])
        passes, place = divmod(before, size)
        if number not in self._orders or self._orders[number][0] != passes:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + passes + (number << 40)) % (1 << 63))
            self._orders[number] = passes, torch.randperm(size, generator=generator).tolist()
        return start + self._orders[number][1][place]

    def __getitem__(self, index: int) -> DataProto:
        return collate([self.dataset[self._row(position)] for position in self.rows(index)])


def in_order(dataset: Dataset, batch_size: int = 0) -> Iterator[DataProto]:
    """Yield the whole data set once, in its order, ``batch_size`` rows at a time (0: all at once)."""
    size = batch_size or max(len(dataset), 1)
    for start in range(0, len(dataset), size):
        yield collate([dataset[row] for row in range(start, min(start + size, len(dataset)))])
