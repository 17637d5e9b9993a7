"""DataProto: the batch that travels between the controller and its workers.

A batch has three fields: ``batch``, a TensorDict whose dim 0 counts rows; ``non_tensor_batch``, numpy arrays of as many
rows; and ``meta_info``, one dict for the whole batch. An operation returns a new DataProto. Its columns are views if
torch and numpy can make them, and the dicts and lists of its ``meta_info`` are copies. Only ``to``, ``padding``,
``pop``, ``rename`` and ``reorder`` change the batch that they are called on.

The result of a call with ``blocking=False`` is a DataProto too, whose tensors stay on the workers that compute them.
Reading one waits for the call and fetches the tensor; passing the batch to a call passes it by reference; selecting
rows moves an index.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from mcontroller.data import checks, meta
from mcontroller.data.batch_data import BatchData, DataProtoConfig
from mcontroller.data.checks import Index, Keys, RowIndexError
from mcontroller.data.columns import columns_like, columns_to, leaf_tensors, make_columns, shallow_copy
from mcontroller.data.remote import joinable
from mcontroller.data.rows import (
    ConcatTensors,
    concat_tensors,
    join_rows,
    reshape_rows,
    slice_rows,
    split_columns,
    take_rows,
    union_columns,
    union_numpy_dict,
)
from mcontroller.data.serialization import OutOfBand
from mcontroller.errors import DataError
from mcontroller.partition import contiguous

if TYPE_CHECKING:
    from tensordict import TensorDict

    from mcontroller.data.columns import Batch

__all__ = ["DataProto", "DataProtoConfig", "DataProtoFuture", "DataProtoItem", "RowIndexError", "concat_batches"]

AnyDataProto = TypeVar("AnyDataProto", bound="DataProto")


@dataclass(eq=False)
class DataProtoItem(OutOfBand):
    """One row of a `DataProto`.

    Attributes:
        batch: tensors without their row dim.
        non_tensor_batch: one entry of every non-tensor column.
        meta_info: values for the whole batch by name.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto(BatchData):
    """A batch of rows: tensors, non-tensor columns of the same number of rows, and ``meta_info`` for all of them.

    Args:
        batch: tensors, as a TensorDict whose dim 0 counts rows.
        non_tensor_batch: Numpy arrays ``[rows, ...]`` by name.
        meta_info: values for the whole batch by name.

    Attributes:
        batch: the tensors as a TensorDict, or None if there are none.
        non_tensor_batch: Numpy arrays ``[rows, ...]`` by name.
        meta_info: values for the whole batch by name.

    Raises:
        DataError: if a column has another number of rows than the first, or is of a kind that cannot be split.

    Examples:
        >>> batch = DataProto.from_dict({"input_ids": torch.zeros(4, 16).long()}, {"uid": ["a", "b", "c", "d"]})
        >>> len(batch), batch.batch["input_ids"].shape
        (4, torch.Size([4, 16]))
        >>> batch[:2]  # a DataProto of two rows, as views
        >>> DataProto.concat(batch.chunk(2))  # equal to batch
    """

    # ---- rows ------------------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, item: int | np.integer[Any]) -> DataProtoItem: ...

    @overload
    def __getitem__(self, item: slice | Index) -> Self: ...

    def __getitem__(self, item: int | np.integer[Any] | slice | Index) -> DataProtoItem | Self:
        """Select rows.

        Args:
            item: a row number, a slice, an index (list, array or tensor of integers; negative: from the end), or a mask
                with one boolean per row.

        Returns:
            A `DataProtoItem` for a row number, else a `DataProto`. A slice returns views, an index or mask copies.

        Raises:
            RowIndexError: if a row does not exist.
            DataError: if the index is of another type or shape.
        """
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if not isinstance(item, int | np.integer):
            return self.select_idxs(item)
        row = int(checks.row_index([item], len(self))[0])
        batch = None if self.batch is None else self.batch[row]
        arrays = {key: array[row] for key, array in self.non_tensor_batch.items()}
        return DataProtoItem(batch, arrays, meta.copy_meta(self.meta_info))

    def __iter__(self) -> Iterator[DataProtoItem]:
        """Iterate over the rows."""
        return (self[row] for row in range(len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Return rows ``start:end:step`` as views; with a negative step, as a copy."""
        begin, stop, stride = slice(start, end, step).indices(len(self))
        if stride < 0:
            return self.select_idxs(np.arange(begin, stop, stride))
        stop = max(begin, stop)
        stored = self.stored_batch
        batch = None if stored is None else slice_rows(stored, begin, stop, stride)
        arrays = {key: array[begin:stop:stride] for key, array in self.non_tensor_batch.items()}
        remote = [each.take(np.arange(begin, stop, stride)) for each in self.remote]
        return self.derive(batch, arrays, remote=remote)

    def select_idxs(self, idxs: Index) -> Self:
        """Return the selected rows as a copy.

        Args:
            idxs: row numbers (negative: from the end; repeats are allowed), or a mask with one boolean per row.

        Raises:
            RowIndexError: if a row does not exist.
            DataError: if the index is of another type or shape.
        """
        index = checks.row_index(idxs, len(self))
        stored = self.stored_batch
        batch = None if stored is None else take_rows(stored, torch.from_numpy(index))
        arrays = {key: array[index] for key, array in self.non_tensor_batch.items()}
        return self.derive(batch, arrays, remote=[each.take(index) for each in self.remote])

    def __getitems__(self, idxs: list[int]) -> Self:
        """Return a mini-batch as a copy, for torch's DataLoader."""
        return self.select_idxs(idxs)

    def chunk(self, chunks: int) -> list[Self]:
        """Split the batch into a number of consecutive parts, as views.

        Args:
            chunks: number of parts, at least 1.

        Returns:
            Exactly ``chunks`` parts, whose numbers of rows differ by at most one; some are empty if there are fewer
            rows than parts.

        Raises:
            DataError: if ``chunks`` is less than 1.
        """
        parts = contiguous(len(self), checks.count("chunks", chunks, 1))
        return self._split([len(shard) for shard in parts.shards])

    def split(self, split_size: int) -> list[Self]:
        """Split the batch into consecutive parts of ``split_size`` rows, as views; the last part may have fewer.

        Raises:
            DataError: if ``split_size`` is less than 1.
        """
        split_size = checks.count("split_size", split_size, 1)
        return self._split([min(split_size, len(self) - start) for start in range(0, len(self), split_size)])

    def _split(self, sizes: Sequence[int]) -> list[Self]:
        if self.remote:
            return [self.slice(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
        batches: Sequence[Batch | None] = [None] * len(sizes)
        if self.stored_batch is not None:
            batches = split_columns(self.stored_batch, sizes)
        arrays, copy_info = self.non_tensor_batch, meta.meta_copier(self.meta_info)
        if not arrays:
            return [self.derive(batch, {}, copy_info()) for batch in batches]
        return [
            self.derive(batch, {key: arrays[key][stop - size : stop] for key in arrays}, copy_info())
            for batch, size, stop in zip(batches, sizes, accumulate(sizes), strict=True)
        ]

    @staticmethod
    def concat(data: Sequence[AnyDataProto]) -> AnyDataProto:
        """Concatenate the rows of several batches.

        A key of ``meta_info`` is kept if its values agree in all parts that have it. ``metrics``, a dict of name ->
        number or list, becomes name -> flat list of the values of all parts.

        Args:
            data: at least one batch; all must have the same columns, which may differ in dim 0 only.

        Returns:
            A copy of the rows in the order of the parts.

        Raises:
            DataError: if parts differ in columns, dtypes, shapes or ``meta_info``; names the column or key.
        """
        joined = concat_batches(data)
        return joined.select_idxs(range(len(joined))) if len(data) == 1 and joined.has_columns() else joined

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Repeat every row, as a copy.

        Args:
            repeat_times: number of times that every row occurs in the result, at least 0.
            interleave: whether the repeats of a row are next to each other (``a a b b``); otherwise the whole batch is
                repeated (``a b a b``).

        Raises:
            DataError: if ``repeat_times`` is negative.
        """
        repeat_times = checks.count("repeat_times", repeat_times, 0)
        index = np.arange(len(self))
        return self.select_idxs(index.repeat(repeat_times) if interleave else np.tile(index, repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | Tensor) -> Self:
        """Repeat row ``i`` ``repeat_times[i]`` times, the repeats next to each other, as a copy.

        Args:
            repeat_times: one number per row, each at least 0.

        Raises:
            DataError: if their number is not the number of rows, or one is negative.
        """
        times = checks.counts("repeat_times", repeat_times, len(self))
        return self.select_idxs(np.arange(len(self)).repeat(times))

    def reorder(self, indices: Index) -> None:
        """Reorder the rows of this batch, in place.

        Args:
            indices: a permutation: the row numbers in their new order.

        Raises:
            DataError: if a row occurs twice or not at all.
        """
        checks.check_permutation(checks.row_index(indices, len(self)), len(self))
        self._set_columns(self.select_idxs(indices))

    def padding(self, padding_size: int, padding_candidate: str = "last") -> Self:
        """Append ``padding_size`` repeats of one row to this batch, in place, and return it.

        Args:
            padding_size: number of rows to append, at least 0.
            padding_candidate: which row to repeat, "first" or "last".

        Raises:
            DataError: if an argument is out of range, or the batch has no row to repeat.
        """
        if not isinstance(padding_candidate, str) or padding_candidate not in ("first", "last"):
            raise DataError(f"padding_candidate is {padding_candidate!r}: expected 'first' or 'last'")
        padding_size = checks.count("padding_size", padding_size, 0)
        if padding_size > 0 and len(self) == 0:
            raise DataError(
                f"padding_size is {padding_size} for a batch of {len(self)} rows: expected 0",
                rows=len(self),
            )
        row = 0 if padding_candidate == "first" else len(self) - 1
        if padding_size:
            self._set_columns(self.select_idxs([*range(len(self)), *[row] * padding_size]))
        return self

    def unpad(self, pad_size: int) -> Self:
        """Remove the last ``pad_size`` rows; the result is views.

        Raises:
            DataError: if the batch has fewer rows.
        """
        pad_size = checks.count("pad_size", pad_size, 0)
        if pad_size > len(self):
            raise DataError(
                f"pad_size is {pad_size} for a batch of {len(self)} rows: expected 0 to {len(self)}", rows=len(self)
            )
        return self.slice(0, len(self) - pad_size)

    def fold_batch_dim(self, new_batch_size: int) -> Self:
        """Reshape every column ``[rows, ...]`` to ``[new_batch_size, rows // new_batch_size, ...]``, as views.

        Raises:
            DataError: if ``new_batch_size`` does not divide the rows, or a column is jagged.
        """
        new_batch_size = checks.count("new_batch_size", new_batch_size, 1)
        if len(self) % new_batch_size:
            raise DataError(
                f"new_batch_size is {new_batch_size} for a batch of {len(self)} rows: expected a divisor of the rows",
                rows=len(self),
            )
        shape = (new_batch_size, len(self) // new_batch_size)
        batch = reshape_rows(self.get().stored_batch, lambda column: column.unflatten(0, shape), new_batch_size)
        arrays = {key: array.reshape(*shape, *array.shape[1:]) for key, array in self.non_tensor_batch.items()}
        return self.derive(batch, arrays)

    def unfold_batch_dim(self, batch_dims: int = 2) -> Self:
        """Flatten the first dims of every column: ``[a, b, ...]`` to ``[a * b, ...]``; views if memory allows.

        Args:
            batch_dims: number of dims to flatten, at least 1; all columns must agree in them.

        Raises:
            DataError: if the columns do not agree in these dims, or one is jagged.
        """
        batch_dims = checks.count("batch_dims", batch_dims, 1)
        columns: list[Any] = [*self.non_tensor_batch.values(), *leaf_tensors(self.get().stored_batch)]
        leading = [tuple(column.shape[:batch_dims]) for column in columns]
        if any(len(dims) < batch_dims or dims != leading[0] for dims in leading):
            raise DataError(
                f"cannot flatten the first {batch_dims} dims: columns {self.column_names()} begin with {leading}, and "
                "they must be equal",
                batch_dims=batch_dims,
                dims=leading,
            )
        count = int(np.prod(leading[0])) if leading else len(self)
        batch = reshape_rows(self.stored_batch, lambda column: column.flatten(0, batch_dims - 1), count)
        arrays = {key: array.reshape(count, *array.shape[batch_dims:]) for key, array in self.non_tensor_batch.items()}
        return self.derive(batch, arrays)

    def unfold_column_chunks(self, n_split: int, split_keys: Keys | None = None) -> Self:
        """Make ``n_split`` rows of every row, as a copy: columns are split along dim 1, or repeated.

        Args:
            n_split: number of rows that each row becomes, at least 1.
            split_keys: columns ``[rows, size, ...]`` that become ``[rows * n_split, size // n_split, ...]``. Every
                other column is repeated, the repeats of a row next to each other. None splits none.

        Raises:
            DataError: if a column does not exist, or ``n_split`` does not divide its dim 1.
        """
        n_split = checks.count("n_split", n_split, 1)
        names = [] if split_keys is None else checks.as_keys(split_keys)
        checks.check_keys("column", names, self.column_names())
        columns: dict[str, Any] = {key: {**self.tensors(), **self.non_tensor_batch}[key] for key in names}
        for key, column in columns.items():
            if column.ndim < 2 or column.shape[1] % n_split:
                raise DataError(
                    f"column {key!r} of shape {list(column.shape)} cannot be split into {n_split} along dim 1: "
                    "expected a divisor of its size",
                    column=key,
                    n_split=n_split,
                )
        repeated = self.repeat(n_split)
        split = {
            key: column.reshape(len(repeated), column.shape[1] // n_split, *column.shape[2:])
            for key, column in columns.items()
        }
        repeated.non_tensor_batch.update({key: split.pop(key) for key in names if key in repeated.non_tensor_batch})
        return repeated.with_tensors(split) if split else repeated

    # ---- columns ---------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Keys | None = None,
        non_tensor_batch_keys: Keys | None = None,
        meta_info_keys: Keys | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Return the named columns and keys, sharing their memory.

        Args:
            batch_keys: names of tensors; None selects all.
            non_tensor_batch_keys: names of non-tensor columns; None selects all.
            meta_info_keys: keys of ``meta_info``; None selects all.
            deepcopy: whether to copy the columns.

        Raises:
            DataError: if a name does not exist.
        """
        here, stored = self.tensors_here(), self.stored_batch
        names = checks.as_keys(batch_keys, self.tensor_names)
        arrays = checks.as_keys(non_tensor_batch_keys, self.non_tensor_batch)
        info = checks.as_keys(meta_info_keys, self.meta_info)
        checks.check_keys("batch column", names, self.tensor_names)
        checks.check_keys("non-tensor column", arrays, self.non_tensor_batch)
        checks.check_keys("meta_info key", info, self.meta_info)
        kept = {key: here[key] for key in names if key in here}
        batch = columns_like(stored, kept, len(self)) if stored is not None else None
        if stored is None and self.remote:
            batch = make_columns({}, (len(self),))  # has the rows, if no column is selected
        new = self.derive(
            batch,
            {key: self.non_tensor_batch[key] for key in arrays},
            meta.copy_meta({key: self.meta_info[key] for key in info}),
            [columns for each in self.remote for columns in each.only(names)],
        )
        return copy.deepcopy(new) if deepcopy else new

    def pop(
        self,
        batch_keys: Keys | None = None,
        non_tensor_batch_keys: Keys | None = None,
        meta_info_keys: Keys | None = None,
    ) -> Self:
        """Remove the named columns and keys from this batch, in place, and return them as a batch.

        Args:
            batch_keys: names of tensors; None removes none.
            non_tensor_batch_keys: names of non-tensor columns; None removes none.
            meta_info_keys: keys of ``meta_info``; None removes none.

        Raises:
            DataError: if a name does not exist.
        """
        wanted = [checks.as_keys(keys) for keys in (batch_keys, non_tensor_batch_keys, meta_info_keys)]
        popped = self.select(wanted[0], wanted[1], wanted[2])
        present = (self.tensor_names, self.non_tensor_batch, self.meta_info)
        left = [[key for key in existing if key not in keys] for existing, keys in zip(present, wanted, strict=True)]
        self._become(self.select(left[0], left[1], left[2]))
        return popped

    def rename(self, old_keys: Keys | None = None, new_keys: Keys | None = None) -> Self:
        """Rename columns of this batch, in place, and return the batch itself.

        Args:
            old_keys: names of columns.
            new_keys: as many new names, which no other column has.

        Raises:
            DataError: if a name does not exist, or a new name is taken.
        """
        old, new = checks.as_keys(old_keys), checks.as_keys(new_keys)
        checks.check_keys("column", old, self.column_names())
        renamed = dict(zip(old, new, strict=False))
        names = [renamed.get(key, key) for key in self.column_names()]
        if len(old) != len(new) or len(set(old)) != len(old) or len(set(names)) != len(names):
            raise DataError(
                f"rename of {old} to {new}: expected one new name per old name that no other column has; "
                f"existing: {self.column_names()}",
                old=old,
                new=new,
            )
        if self.stored_batch is not None:
            tensors = {renamed.get(key, key): value for key, value in self.tensors_here().items()}
            self.stored_batch = columns_like(self.stored_batch, tensors, len(self))
        self.remote = tuple(each.renamed(renamed) for each in self.remote)
        self.non_tensor_batch = {renamed.get(key, key): array for key, array in self.non_tensor_batch.items()}
        return self

    def union(self, other: DataProto) -> Self:
        """Unite the columns and the meta_info of two batches, as views.

        Args:
            other: a batch of as many rows; without columns, it adds only its ``meta_info``. Two dicts under
                ``meta_info["metrics"]`` are merged by name.

        Raises:
            DataError: if the numbers of rows differ, or a column or key of both has different values.
        """
        if not isinstance(other, DataProto):
            raise DataError(f"union with {type(other).__name__}: expected a DataProto")
        if len(self) != len(other) and self.has_columns() and other.has_columns():
            raise DataError(
                f"union of {len(self)} rows with {len(other)} rows: both batches must have the same number of rows",
                rows=(len(self), len(other)),
            )
        self._compare_remote(other)
        more = [columns for each in other.remote for columns in each.only(each.names.keys() - self.remote_names)]
        return self.derive(
            union_columns(self.stored_batch, other.stored_batch),
            union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch),
            meta.merge_union(self.meta_info, other.meta_info),
            [*self.remote, *more],
        )

    def _compare_remote(self, other: DataProto) -> None:
        """Fetch the tensors of both batches that are not the same rows of the same results, for ``union_columns``."""
        both = set(self.tensor_names) & set(other.tensor_names)
        for mine in self.remote:
            for theirs in other.remote:
                if mine.has_rows_of(theirs):
                    both -= {name for name, source in mine.names.items() if theirs.names.get(name) == source}
        if both & (self.remote_names | other.remote_names):
            self.prefetch(both)
            other.prefetch(both)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Return a batch with tensors added or replaced, which shares all other columns.

        Unlike ``union``, it does not compare a tensor with the one that it replaces.

        Args:
            tensors: tensors ``[rows, ...]`` by name.

        Raises:
            DataError: if a tensor has another number of rows than the batch.
        """
        stored = self.stored_batch
        kept = [each for each in self.tensor_names if each not in tensors]
        remote = [columns for each in self.remote for columns in each.only(kept)]
        batch_size, device = ((len(self),), None) if stored is None else (tuple(stored.batch_size), stored.device)
        added = checks.make_batch(tensors, len(batch_size))
        if self.has_columns() and tuple(added.batch_size) != batch_size:
            raise DataError(
                f"tensors {list(tensors)} have batch dims {list(added.batch_size)}, the batch has {list(batch_size)}: "
                "they must be equal",
                columns=list(tensors),
                found=tuple(added.batch_size),
                expected=batch_size,
            )
        new = dict(added.items()) if device is None else dict(columns_to(added, device).items())
        united = make_columns(self.tensors_here() | new, added.batch_size, device)
        return self.derive(united, dict(self.non_tensor_batch), remote=remote)

    def to(self, device: torch.device | str | int) -> Self:
        """Move the tensors of this batch to ``device``, in place, as ``nn.Module.to`` does, and return the batch.

        Other batches with the same tensors keep theirs: ``batch.slice().to(device)`` leaves ``batch`` on its device.
        """
        stored = self.get().stored_batch
        if stored is not None:
            self.stored_batch = columns_to(stored, torch.device(device))
        return self

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Iterate over mini-batches.

        Args:
            mini_batch_size: rows of a mini-batch; the last one of an epoch may have fewer.
            epochs: number of passes over the batch.
            seed: seed of the shuffling; None uses torch's default generator.
            dataloader_kwargs: arguments of ``torch.utils.data.DataLoader``, such as ``shuffle``, ``drop_last`` or
                ``sampler``. By default the rows keep their order.

        Returns:
            An iterator over copies of the rows: a change of a mini-batch does not reach the batch or the next epoch.

        Raises:
            DataError: if ``mini_batch_size`` is less than 1, or ``epochs`` is negative.
        """
        mini_batch_size = checks.count("mini_batch_size", mini_batch_size, 1)
        epochs = checks.count("epochs", epochs, 0)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        options: dict[str, Any] = {"generator": generator, "collate_fn": _identity, **(dataloader_kwargs or {})}
        loader: Any = torch.utils.data.DataLoader(self, batch_size=mini_batch_size, **options)  # type: ignore[arg-type]
        return (mini_batch for _ in range(epochs) for mini_batch in loader)


DataProtoFuture = DataProto
"""The result of a call with ``blocking=False``: a DataProto that may still be being computed."""


def concat_batches(
    data: Sequence[AnyDataProto], concat: ConcatTensors = concat_tensors, *, keep_first: bool = False
) -> AnyDataProto:
    """Low level: concatenate the rows of several batches as ``DataProto.concat`` does; one part stays as views.

    Args:
        data: at least one batch.
        concat: function that concatenates ordinary tensors.
        keep_first: whether a key of ``meta_info`` whose values differ keeps the first of them, instead of an error.

    Raises:
        DataError: as ``DataProto.concat``.
    """
    checks.check_parts(data, DataProto)
    first = data[0]
    info = meta.merge_concat([part.meta_info for part in data], keep_first=keep_first)
    if len(data) == 1:
        return first.derive(shallow_copy(first.stored_batch), dict(first.non_tensor_batch), info, first.remote)
    stored, remote = joinable(data)
    checks.check_same_columns([(batch, part.non_tensor_batch) for batch, part in zip(stored, data, strict=True)])
    joined: Any = None if stored[0] is None else join_rows(stored, concat=concat)  # type: ignore[arg-type]
    arrays = {key: np.concatenate([part.non_tensor_batch[key] for part in data]) for key in first.non_tensor_batch}
    return first.derive(joined, arrays, info, remote)


def _identity(batch: Any) -> Any:
    """Return a mini-batch as ``__getitems__`` made it; a function of the module, so that it can be pickled."""
    return batch
