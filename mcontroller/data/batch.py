"""DataProto: the batch that travels between the controller and its workers.

A batch has three fields: ``batch``, a TensorDict whose dim 0 counts rows; ``non_tensor_batch``, numpy arrays of as many
rows; and ``meta_info``, one dict for the whole batch. An operation returns a new DataProto. Its columns are views if
torch and numpy can make them, and the dicts and lists of its ``meta_info`` are copies. Only ``to``, ``padding``,
``pop``, ``rename`` and ``reorder`` change the batch that they are called on.

The result of a call with ``blocking=False`` is a DataProto too, whose tensors stay on the workers that compute them.
Reading one waits for the call and fetches the tensor; passing the batch to a call passes it by reference; selecting
rows moves an index.

A column of ``batch`` is a tensor, or a nested TensorDict; see ``columns``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from mcontroller.data.columns import (
    Keys,
    as_array,
    as_count,
    as_keys,
    check_columns,
    check_keys,
    describe,
    is_tensordict,
    join_arrays,
    join_rows,
    leaf_tensors,
    make_batch,
    make_tensordict,
    row_index,
    shallow_copy,
    take_rows,
)
from mcontroller.data.disk import load_batch, save_batch
from mcontroller.data.meta import copy_meta, merge_concat, merge_union, same_value
from mcontroller.data.pickling import OutOfBand
from mcontroller.data.remote import RemoteColumns
from mcontroller.errors import DataError
from mcontroller.partition import contiguous
from mcontroller.transport import Future, countdown

if TYPE_CHECKING:
    from tensordict import TensorDict

AnyDataProto = TypeVar("AnyDataProto", bound="DataProto")

Index = Sequence[int] | Sequence[bool] | np.ndarray | Tensor
"""Row numbers (negative: from the end) or a mask with one boolean per row."""


class DataProtoConfig:
    """Process-wide defaults of `DataProto`.

    Attributes:
        auto_padding: whether every batch may be padded if the number of shards does not divide its rows.
        auto_padding_key: the key of ``meta_info`` that allows padding for one batch.
    """

    auto_padding: bool = False
    auto_padding_key: str = "_auto_padding"


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


class DataProto(OutOfBand):
    """A batch of rows: tensors, non-tensor columns of the same number of rows, and ``meta_info`` for all of them.

    Args:
        batch: tensors, as a TensorDict whose dim 0 counts rows.
        non_tensor_batch: Numpy arrays ``[rows, ...]`` by name.
        meta_info: values for the whole batch by name.

    Attributes:
        non_tensor_batch: Numpy arrays ``[rows, ...]`` by name.
        meta_info: values for the whole batch by name.
        local_batch: low level: the tensors in this process; None if there are none.
        remote: low level: the tensors that are kept on workers. One that is in ``local_batch`` too is a copy.

    Raises:
        DataError: if a column has another number of rows than the first, or is of a kind that cannot be split.

    Examples:
        >>> batch = DataProto.from_dict({"input_ids": torch.zeros(4, 16).long()}, {"uid": ["a", "b", "c", "d"]})
        >>> len(batch), batch.batch["input_ids"].shape
        (4, torch.Size([4, 16]))
        >>> batch[:2]  # a DataProto of two rows, as views
        >>> DataProto.concat(batch.chunk(2))  # equal to batch
    """

    local_batch: TensorDict | None
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]
    remote: tuple[RemoteColumns, ...]

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        batch: TensorDict | None = None,
        non_tensor_batch: dict[str, np.ndarray] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> None:
        self.local_batch = batch
        self.non_tensor_batch = {} if non_tensor_batch is None else non_tensor_batch
        self.meta_info = {} if meta_info is None else meta_info
        self.remote = ()
        self.check_consistency()

    @property
    def batch(self) -> TensorDict | None:
        """The tensors as a TensorDict, or None if there are none. All of them are fetched, and no longer remote."""
        return self.get().local_batch

    @batch.setter
    def batch(self, batch: TensorDict | None) -> None:
        self.local_batch, self.remote = batch, ()

    # ---- construction -----------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Make a batch from columns.

        Args:
            tensors: tensors ``[rows, ...]`` and TensorDicts by name.
            non_tensors: Numpy arrays ``[rows, ...]`` or lists with one entry per row by name. A list becomes a 1-D
                object array, whatever its entries are.
            meta_info: values for the whole batch by name. Its dicts and lists are copied.
            num_batch_dims: number of leading dims that all tensors share; must be 1 if there are non-tensor columns.
            auto_padding: whether this batch may be padded if the number of shards does not divide its rows.

        Raises:
            DataError: if columns differ in their number of rows, or are of the wrong type; names the column.

        Examples:
            >>> DataProto.from_dict(
            ...     tensors={"input_ids": torch.zeros(4, 16, dtype=torch.int64)},
            ...     non_tensors={"prompt": ["a", "b", "c", "d"]},
            ...     meta_info={"temperature": 0.7},
            ... )
        """
        num_batch_dims = as_count("num_batch_dims", num_batch_dims, 1)
        if num_batch_dims > 1 and non_tensors:
            raise DataError(
                f"num_batch_dims is {num_batch_dims}, with {len(non_tensors or {})} non-tensor columns: "
                "expected 1 if there are non-tensor columns",
                num_batch_dims=num_batch_dims,
            )
        batch = make_batch(tensors, num_batch_dims) if tensors else None
        arrays = {key: as_array(value, key) for key, value in (non_tensors or {}).items()}
        info = copy_meta(dict(meta_info or {}))
        if auto_padding:
            info[DataProtoConfig.auto_padding_key] = True
        return cls(batch, arrays, info)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None, auto_padding: bool = False
    ) -> Self:
        """Make a batch from one dict: tensors become ``batch``, numpy arrays and lists ``non_tensor_batch``.

        Args:
            data: tensors, TensorDicts, numpy arrays and lists by name, each with one entry per row.
            meta_info: values for the whole batch by name.
            auto_padding: whether this batch may be padded if the number of shards does not divide its rows.

        Raises:
            DataError: if columns differ in their number of rows, or are of the wrong type; names the column.
        """
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor) or is_tensordict(value)}
        others = {key: value for key, value in data.items() if key not in tensors}
        return cls.from_dict(tensors=tensors, non_tensors=others, meta_info=meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDict | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> Self:
        """Make a batch from a TensorDict.

        Args:
            tensor_dict: its tensors become ``batch``, a NonTensorStack a non-tensor column, NonTensorData an entry of
                ``meta_info``.
            meta_info: more values for the whole batch by name.
            num_batch_dims: number of leading dims that all tensors share.

        Raises:
            DataError: if columns differ in their number of rows, a key has two values, or ``tensor_dict`` is of another
                type.
        """
        from tensordict import NonTensorData, NonTensorStack

        if not (tensor_dict is None or is_tensordict(tensor_dict)):
            kind = type(tensor_dict).__name__
            raise DataError(f"tensor_dict is {kind}: expected a TensorDict; for a dict, call DataProto.from_dict")
        info: dict[str, Any] = {}
        tensors, arrays = {}, {}
        for key, value in {} if tensor_dict is None else tensor_dict.items():
            if isinstance(value, NonTensorStack):
                arrays[key] = as_array(value.tolist())
            elif isinstance(value, NonTensorData):
                info[key] = value.data
            else:
                tensors[key] = value
        return cls.from_dict(tensors, arrays, merge_union(meta_info or {}, info), num_batch_dims)

    def derive(
        self,
        batch: TensorDict | None,
        non_tensor_batch: dict[str, np.ndarray],
        meta_info: dict[str, Any] | None = None,
        remote: Sequence[RemoteColumns] = (),
    ) -> Self:
        """Low level: make a batch of the same class from columns that agree; they are not checked.

        Args:
            batch: the tensors, as ``local_batch`` has them.
            non_tensor_batch: the non-tensor columns; the dict is not copied.
            meta_info: values for the whole batch; None copies the values of this batch.
            remote: the tensors that are kept on workers.
        """
        if meta_info is None:
            meta_info = copy_meta(self.meta_info)
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)  # with attributes that a subclass or the user has added
        new.local_batch, new.non_tensor_batch, new.meta_info = batch, non_tensor_batch, meta_info
        new.remote = tuple(remote)
        return new

    def with_remote(self, remote: Sequence[RemoteColumns]) -> Self:
        """Low level: make a batch of the local columns of this one, and of tensors that are kept on workers."""
        return self.derive(self.local_batch, self.non_tensor_batch, self.meta_info, remote)

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
        row = int(row_index([item], len(self))[0])
        batch = None if self.batch is None else self.batch[row]
        arrays = self._array_rows(row)
        return DataProtoItem(batch, arrays, copy_meta(self.meta_info))

    def __iter__(self) -> Iterator[DataProtoItem]:
        """Iterate over the rows."""
        return (self[row] for row in range(len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Return rows ``start:end:step`` as views; with a negative step, as a copy."""
        rows = slice(start, end, step)
        index = np.arange(*rows.indices(len(self)))
        if step is not None and step < 0:  # tensors have no such views
            return self.select_idxs(index)
        batch = None if self.local_batch is None else self.local_batch[rows]
        return self.derive(batch, self._array_rows(rows), remote=[columns.take(index) for columns in self.remote])

    def select_idxs(self, idxs: Index) -> Self:
        """Return the selected rows as a copy.

        Args:
            idxs: row numbers (negative: from the end; repeats are allowed), or a mask with one boolean per row.

        Raises:
            RowIndexError: if a row does not exist.
            DataError: if the index is of another type or shape.
        """
        index = row_index(idxs, len(self))
        rows = torch.from_numpy(index)
        batch = self.local_batch
        if batch is not None:
            size = (len(index), *batch.batch_size[1:])
            batch = batch.apply(lambda column: take_rows(column, rows), batch_size=size, filter_empty=False)
        return self.derive(batch, self._array_rows(index), remote=[columns.take(index) for columns in self.remote])

    def _array_rows(self, index: Any) -> dict[str, Any]:
        """Return the selected rows of the arrays, of which ``non_tensor_batch`` may have got one of another length."""
        rows = len(self)
        for array in self.non_tensor_batch.values():
            if not isinstance(array, np.ndarray) or len(array) != rows:
                check_columns(make_tensordict({}, (rows,)), self.non_tensor_batch)
        return {key: array[index] for key, array in self.non_tensor_batch.items()}

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
        parts = contiguous(len(self), as_count("chunks", chunks, 1))
        return [self.slice(shard.start, shard.stop) for shard in parts.shards if isinstance(shard, range)]

    def split(self, split_size: int) -> list[Self]:
        """Split the batch into consecutive parts of ``split_size`` rows, as views; the last part may have fewer.

        Raises:
            DataError: if ``split_size`` is less than 1.
        """
        split_size = as_count("split_size", split_size, 1)
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

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
        repeat_times = as_count("repeat_times", repeat_times, 0)
        index = np.arange(len(self))
        return self.select_idxs(index.repeat(repeat_times) if interleave else np.tile(index, repeat_times))

    def reorder(self, indices: Index) -> None:
        """Reorder the rows of this batch, in place.

        Args:
            indices: a permutation: the row numbers in their new order.

        Raises:
            DataError: if a row occurs twice or not at all.
        """
        index = row_index(indices, len(self))
        distinct = len(np.unique(index))
        if len(index) != len(self) or distinct != len(self):
            text = f"reorder of {len(self)} rows by {len(index)} indices, {distinct} of them distinct"
            raise DataError(f"{text}: expected each row once", rows=len(self), indices=len(index))
        self._set_columns(self.select_idxs(index))

    def padding(self, padding_size: int, padding_candidate: str = "last") -> Self:
        """Append ``padding_size`` repeats of one row to this batch, in place, and return it.

        Args:
            padding_size: number of rows to append, at least 0.
            padding_candidate: which row to repeat, "first" or "last".

        Raises:
            DataError: if an argument is out of range, or the batch has no row to repeat.
        """
        if padding_candidate not in ("first", "last"):
            text = f"padding_candidate is {padding_candidate!r}: expected 'first' or 'last'"
            raise DataError(text, padding_candidate=padding_candidate)
        padding_size = as_count("padding_size", padding_size, 0)
        if padding_size > 0 and len(self) == 0:
            raise DataError(f"padding_size is {padding_size} for a batch without rows: expected 0", rows=0)
        row = 0 if padding_candidate == "first" else len(self) - 1
        if padding_size:
            self._set_columns(self.select_idxs([*range(len(self)), *[row] * padding_size]))
        return self

    def unpad(self, pad_size: int) -> Self:
        """Remove the last ``pad_size`` rows; the result is views.

        Raises:
            DataError: if the batch has fewer rows.
        """
        pad_size = as_count("pad_size", pad_size, 0)
        if pad_size > len(self):
            raise DataError(f"pad_size is {pad_size}: expected at most the {len(self)} rows", rows=len(self))
        return self.slice(0, len(self) - pad_size)

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
        names = as_keys(batch_keys, self.tensor_names)
        arrays = as_keys(non_tensor_batch_keys, self.non_tensor_batch)
        info = as_keys(meta_info_keys, self.meta_info)
        check_keys("batch column", names, self.tensor_names)
        check_keys("non-tensor column", arrays, self.non_tensor_batch)
        check_keys("meta_info key", info, self.meta_info)
        local = self.local_tensors()
        new = self.derive(
            self._with_rows({key: local[key] for key in names if key in local}),
            {key: self.non_tensor_batch[key] for key in arrays},
            copy_meta({key: self.meta_info[key] for key in info}),
            self._remote_columns(names),
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
        wanted = [as_keys(keys) for keys in (batch_keys, non_tensor_batch_keys, meta_info_keys)]
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
        old, new = as_keys(old_keys), as_keys(new_keys)
        check_keys("column", old, self.column_names())
        renamed = dict(zip(old, new, strict=False))
        names = [renamed.get(key, key) for key in self.column_names()]
        if len(old) != len(new) or len(set(old)) != len(old) or len(set(names)) != len(names):
            raise DataError(
                f"rename of {old} to {new}: expected one new name per old name that no other column has; "
                f"existing: {self.column_names()}",
                old=old,
                new=new,
            )
        if self.local_batch is not None:
            tensors = {renamed.get(key, key): value for key, value in self.local_tensors().items()}
            self.local_batch = self._with_rows(tensors)
        self.remote = tuple(columns.renamed(renamed) for columns in self.remote)
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
            text = f"union of {len(self)} rows with {len(other)} rows: both batches must have the same number of rows"
            raise DataError(text, rows=(len(self), len(other)))
        self._compare_remote(other)
        return self.derive(
            _union_tensordicts(self.local_batch, other.local_batch),
            _union(self.non_tensor_batch, other.non_tensor_batch),
            merge_union(self.meta_info, other.meta_info),
            [*self.remote, *other._remote_columns(other.remote_names - self.remote_names)],
        )

    def _compare_remote(self, other: DataProto) -> None:
        """Fetch the tensors of both batches that are not the same rows of the same results, to compare them."""
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
        batch = self.local_batch
        batch_size = (len(self),) if batch is None else tuple(batch.batch_size)
        added = make_batch(tensors, len(batch_size))
        if self.has_columns() and tuple(added.batch_size) != batch_size:
            dims = tuple(added.batch_size)
            text = f"tensors {list(tensors)} have batch dims {list(dims)}, the batch has {list(batch_size)}"
            raise DataError(f"{text}: they must be equal", columns=list(tensors), actual=dims, expected=batch_size)
        device = None if batch is None else batch.device
        joined = make_tensordict(self.local_tensors() | dict(added.items()), added.batch_size, device)
        kept = [name for name in self.tensor_names if name not in tensors]
        return self.derive(joined, dict(self.non_tensor_batch), remote=self._remote_columns(kept))

    def _with_rows(self, tensors: Mapping[str, Any]) -> TensorDict | None:
        """Return a TensorDict of these columns of the batch; without columns it still has the number of rows."""
        if self.local_batch is None:
            return make_tensordict({}, (len(self),)) if self.remote else None
        return make_tensordict(tensors, self.local_batch.batch_size, self.local_batch.device)

    def _remote_columns(self, names: Iterable[str]) -> list[RemoteColumns]:
        kept = list(names)
        return [selected for columns in self.remote for selected in columns.only(kept)]

    def to(self, device: torch.device | str | int) -> Self:
        """Move the tensors of this batch to ``device``, in place, as ``nn.Module.to`` does, and return the batch.

        Other batches with the same tensors keep theirs: ``batch.slice().to(device)`` leaves ``batch`` on its device.
        """
        batch = self.batch
        if batch is not None:
            self.local_batch = batch.to(torch.device(device))
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
        mini_batch_size = as_count("mini_batch_size", mini_batch_size, 1)
        epochs = as_count("epochs", epochs, 0)
        if len(self) == 0:  # torch rejects shuffling nothing
            return iter(())
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        options: dict[str, Any] = {"generator": generator, "collate_fn": _collated, **(dataloader_kwargs or {})}
        loader: Any = torch.utils.data.DataLoader(self, batch_size=mini_batch_size, **options)  # type: ignore[arg-type]
        return (mini_batch for _ in range(epochs) for mini_batch in loader)

    # ---- the result of a call that was not waited for --------------------------------------------------------------

    @classmethod
    def later(cls, future: Future[Self], kept: Callable[[], Self]) -> Self:
        """Low level: make the batch that a call computes.

        Args:
            future: the batch with all columns in this process.
            kept: called when the call has succeeded; returns the batch whose tensors stay on the workers.
        """
        batch = object.__new__(cls)
        batch.__dict__["_later"] = future, kept
        return batch

    if not TYPE_CHECKING:  # a type checker reports attributes that the class does not declare

        def __getattr__(self, name: str) -> Any:
            """Wait for the call that computes this batch, when anything is read that the call decides."""
            if name.startswith("_") or "_later" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            future, kept = self.__dict__["_later"]
            future.check()
            self._become(kept())
            return getattr(self, name)

    @property
    def _future(self) -> Future[Self] | None:
        future: Future[Self] | None = self.__dict__.get("_later", (None,))[0]
        return future

    def _become(self, other: Self) -> None:
        set_before = self.__dict__ if self.__dict__.pop("_later", None) else {}  # before the batch was computed
        self.__class__, self.__dict__ = type(other), other.__dict__ | set_before

    def _set_columns(self, other: DataProto) -> None:
        self.local_batch, self.non_tensor_batch, self.remote = other.local_batch, other.non_tensor_batch, other.remote

    def get(self, timeout: float | None = None) -> Self:
        """Wait until the batch is computed, fetch all its columns, and return it: then no column is remote.

        Args:
            timeout: seconds from now; a later result raises CallTimeout and breaks the group. None waits until the
                call's own deadline.

        Raises:
            WorkerError: a rank's method raised.
            WorkerDied: the process of a rank ended.
            CallTimeout: the result did not arrive in time.
            GroupBroken: an earlier call of the group failed.
            GroupError: the call was cancelled, or its group shut down.
        """
        if self._future is not None:
            self._become(self._future.get(timeout))
        elif self.remote:
            self.prefetch(timeout=timeout)
            self.remote = ()
        return self

    def prefetch(self, names: Iterable[str] | None = None, *, timeout: float | None = None) -> Self:
        """Fetch tensors together that are kept on workers, and return the batch; they also stay on the workers.

        Such a tensor must not be changed in place: a call that gets the batch reads the one on the workers.

        Args:
            names: names of tensors; those that the batch does not have are no error. None: all.
            timeout: seconds until CallTimeout is raised; None for no limit.
        """
        if not self.remote:
            return self
        local, remaining = self.local_tensors(), countdown(timeout)
        wanted = set(self.tensor_names if names is None else names)
        for columns in self.remote:
            missing = [name for name in columns.names if name in wanted and name not in local]
            if missing:
                local |= columns.read(missing, remaining())
        if local:
            self.local_batch = make_tensordict(local, (len(self),))
        return self

    def check(self, timeout: float | None = None) -> None:
        """Wait until the batch is computed, or raise as ``get`` does; fetch nothing."""
        if self._future is not None:
            self._future.check(timeout)

    def done(self) -> bool:
        """Return whether the batch is computed, or its call has failed. Does not wait."""
        return self._future is None or self._future.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the batch is computed or its call has failed; return whether that happened in ``timeout`` s."""
        return self._future is None or self._future.wait(timeout)

    def cancel(self) -> None:
        """Cancel the call that computes the batch on all ranks, or on none if one of them has started it.

        Unless the batch was read before, reading it then raises GroupError, whether the call was cancelled or not.
        """
        if self._future is not None:
            self._future.cancel()

    # ---- properties ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of rows; 0 without columns."""
        if self.remote:
            return len(self.remote[0].index)
        if self.local_batch is not None:
            rows: int = self.local_batch.batch_size[0]
            return rows
        for array in self.non_tensor_batch.values():
            return int(array.shape[0])
        return 0

    def check_consistency(self) -> None:
        """Check that all columns have the same number of rows; call it after changing a field directly.

        Raises:
            DataError: if a column has another number of rows, or is of a kind that cannot be split; names the column.
        """
        check_columns(self.local_batch, self.non_tensor_batch)

    def has_columns(self) -> bool:
        """Return whether the batch has columns, and not only ``meta_info``."""
        return self.local_batch is not None or bool(self.non_tensor_batch or self.remote)

    def is_padding_enabled(self) -> bool:
        """Return whether this batch may be padded: made with ``auto_padding=True``, or by the process-wide default."""
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False) or DataProtoConfig.auto_padding)

    @property
    def tensor_names(self) -> list[str]:
        """The names of all tensors. Fetches none."""
        remote = (name for columns in self.remote for name in columns.names)
        return list(dict.fromkeys([*self.local_tensors(), *remote]))

    @property
    def remote_names(self) -> set[str]:
        """Low level: the names of the tensors that are kept on workers, also of those that were fetched."""
        return {name for columns in self.remote for name in columns.names}

    def tensors(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return tensors by name in a new dict. Unlike ``batch``, it fetches no others.

        Args:
            names: the tensors to return, of which those that are kept on workers are fetched; see ``prefetch``. None:
                all.

        Raises:
            DataError: if a name does not exist.
        """
        if names is None:
            return self.prefetch().local_tensors()
        wanted = as_keys(names)
        local = self.prefetch(wanted).local_tensors()
        check_keys("tensor column", wanted, local)
        return {name: local[name] for name in wanted}

    def local_tensors(self) -> dict[str, Any]:
        """Low level: return the tensors that are in this process, by name."""
        return {} if self.local_batch is None else dict(self.local_batch.items())

    def column_names(self) -> list[str]:
        """Return the names of all columns: first of ``batch``, then of ``non_tensor_batch``."""
        return [*self.tensor_names, *self.non_tensor_batch]

    def row_lengths(self, key: str = "attention_mask") -> list[float]:
        """Return the length of every row, integers unless the entries are floating-point numbers.

        Args:
            key: a mask ``[rows, ...]``, whose entries are summed; or lengths ``[rows]``.

        Raises:
            DataError: if there is no such tensor.
        """
        check_keys("tensor column", [key], self.tensor_names)
        column = self.tensors([key])[key]
        dtype = torch.float64 if column.is_floating_point() else torch.int64
        return list(column.unsqueeze(-1).flatten(1).sum(dim=1, dtype=dtype).tolist())

    def nbytes(self) -> int:
        """Return the bytes of the local tensors and numpy arrays; object arrays count as their pointers."""
        arrays = sum(array.nbytes for array in self.non_tensor_batch.values())
        return int(sum(tensor.nbytes for tensor in leaf_tensors(self.local_batch))) + arrays

    def summary(self) -> str:
        """Return one line: rows, dtype and shape of every local column, keys of ``meta_info``, bytes."""
        if self._future is not None:
            return f"DataProto({'computed' if self.done() else 'being computed'} on the workers)"
        tensors = "{}" if self.local_batch is None else describe(self.local_batch)
        away = [name for name in self.tensor_names if name not in self.local_tensors()]
        kept = f", {away} on the workers" if away else ""
        arrays = ", ".join(f"{key}: {describe(array)}" for key, array in self.non_tensor_batch.items())
        return (
            f"DataProto({len(self)} rows, batch {tensors}{kept}, non_tensor_batch {{{arrays}}}, "
            f"meta_info {list(self.meta_info)}, {format_bytes(self.nbytes())})"
        )

    __repr__ = summary

    def difference(self, other: DataProto) -> str | None:
        """Describe the first difference from another batch.

        Compares rows, keys, dtypes, shapes, values and ``meta_info``. NaN equals NaN, and devices may differ.

        Args:
            other: the other batch.

        Returns:
            One line, or None if the batches are equal.
        """
        if len(self) != len(other):
            return f"{len(self)} rows, other has {len(other)}"
        for name in ("batch", "non_tensor_batch", "meta_info"):
            mine, others = (batch.tensors() if name == "batch" else getattr(batch, name) for batch in (self, other))
            if mine.keys() != others.keys():
                return f"{name} has keys {sorted(mine, key=str)}, other has {sorted(others, key=str)}"
            for key, value in mine.items():
                if not same_value(value, others[key]):
                    return f"{name}[{key!r}] differs: {describe(value)} and {describe(others[key])}"
        return None

    def __eq__(self, other: object) -> bool:
        """Return whether ``difference`` finds none."""
        return self.difference(other) is None if isinstance(other, DataProto) else NotImplemented

    # ---- copies and files (pickling: OutOfBand) ----------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self.prefetch()
        return {**super().__getstate__(), "remote": ()}

    def __copy__(self) -> Self:
        return self.derive(shallow_copy(self.local_batch), dict(self.non_tensor_batch), remote=self.remote)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        local = self.prefetch().local_batch
        batch = None if local is None else local.clone()
        return self.derive(batch, copy.deepcopy(self.non_tensor_batch, memo), copy.deepcopy(self.meta_info, memo))

    def save_to_disk(self, filepath: str | PathLike[str]) -> None:
        """Write the batch to one file of ``torch.save``.

        Args:
            filepath: path of the file; an existing file is replaced when the new one is complete.

        Raises:
            DataError: if loading a value would run code; names the column or key. Values can be tensors, numpy arrays
                of numbers, strings or objects, numbers, strings, lists, tuples and dicts.
        """
        save_batch(filepath, self.prefetch().local_batch, self._array_rows(slice(None)), self.meta_info)

    @classmethod
    def load_from_disk(cls, filepath: str | PathLike[str]) -> Self:
        """Read a batch that ``save_to_disk`` wrote, onto the CPU. No code from the file is executed.

        Args:
            filepath: path of the file.

        Raises:
            DataError: if the file is not such a file, or was written by another version.
        """
        return cls(*load_batch(filepath))


DataProtoFuture = DataProto
"""The result of a call with ``blocking=False``: a DataProto that may still be being computed."""


# ---- functions over batches ------------------------------------------------------------------------------------------


def concat_batches(data: Sequence[AnyDataProto], *, keep_first: bool = False) -> AnyDataProto:
    """Low level: concatenate the rows of several batches as ``DataProto.concat`` does; one part stays as views.

    Args:
        data: at least one batch.
        keep_first: whether a key of ``meta_info`` whose values differ keeps the first of them, instead of an error.

    Raises:
        DataError: as ``DataProto.concat``.
    """
    _check_parts(data)
    first = data[0]
    info = merge_concat([part.meta_info for part in data], keep_first=keep_first)
    if len(data) == 1:
        return first.derive(shallow_copy(first.local_batch), dict(first.non_tensor_batch), info, first.remote)
    batches, remote = _joinable(data)
    _check_same_columns(batches, data)
    joined = None if batches[0] is None else join_rows([batch for batch in batches if batch is not None])
    parts = [part._array_rows(slice(None)) for part in data]
    arrays = {key: join_arrays([part[key] for part in parts], key) for key in first.non_tensor_batch}
    return first.derive(joined, arrays, info, remote)


def _check_parts(data: Any) -> None:
    """Check that the argument of ``concat`` is a list of at least one batch."""
    if isinstance(data, DataProto) or not isinstance(data, Sequence):
        raise DataError(f"concat of a {type(data).__name__}: expected a list of DataProtos", type=type(data).__name__)
    others = [type(part).__name__ for part in data if not isinstance(part, DataProto)]
    if others or not data:
        raise DataError(f"concat of {len(data)} parts, {others}: expected at least one DataProto", types=others)


def _check_same_columns(batches: Sequence[Any], data: Sequence[DataProto]) -> None:
    """Check that parts agree in their non-tensor columns, and that all or none have tensors."""
    expected = sorted(data[0].non_tensor_batch, key=str)
    for position, (batch, part) in enumerate(zip(batches, data, strict=True)):
        columns = sorted(part.non_tensor_batch, key=str)
        if columns != expected:
            text = f"non_tensor_batch of part {position} has columns {columns}, of part 0 {expected}"
            raise DataError(f"{text}: they must be equal", part=position, columns=columns, expected=expected)
        if (batch is None) is not (batches[0] is None):
            text = f"of parts {position} and 0, one has tensors and the other has none: all parts must have the same"
            raise DataError(f"{text} columns", part=position)


def _joinable(data: Sequence[DataProto]) -> tuple[list[TensorDict | None], list[RemoteColumns]]:
    """Return the local tensors of each batch to join, and the tensors that stay on the workers, joined.

    All are fetched if the batches differ in the tensors that they have on workers.
    """
    remote_columns = {tuple((*columns.names.items(), columns.transport) for columns in part.remote) for part in data}
    local_columns = {frozenset(part.tensor_names) - part.remote_names for part in data}
    if remote_columns == {()} or len(remote_columns) > 1 or len(local_columns) > 1:
        return [part.prefetch().local_batch for part in data], []
    local = [part.local_tensors() for part in data]
    names = [name for name in local[0] if all(name in tensors for tensors in local)]
    batches = [
        make_tensordict({name: tensors[name] for name in names}, (len(part),))
        for tensors, part in zip(local, data, strict=True)
    ]
    return [*batches], [RemoteColumns.joined(columns) for columns in zip(*(part.remote for part in data), strict=True)]


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Pad a batch with rows from its start until ``size_divisor`` divides its number of rows.

    Args:
        data: the batch. One without rows is not padded.
        size_divisor: at least 1, such as the number of shards.

    Returns:
        The padded batch, as views if nothing is added, and the number of added rows; pass it to ``unpad_dataproto``.

    Raises:
        DataError: if ``size_divisor`` is less than 1.
    """
    pad_size = -len(data) % as_count("size_divisor", size_divisor, 1)
    padded = data.select_idxs(np.arange(len(data) + pad_size) % len(data)) if pad_size else data.slice()
    return padded, pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Remove the last ``pad_size`` rows; same as ``data.unpad(pad_size)``."""
    return data.unpad(pad_size)


def _collated(batch: DataProto) -> DataProto:
    """Return the batch that ``DataProto.__getitems__`` has made: a DataLoader's ``collate_fn`` without work."""
    return batch


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Stack rows into a batch, as a DataLoader's ``collate_fn`` does.

    Args:
        x: at least one row, as indexing a `DataProto` with an int returns it.

    Returns:
        A copy of the rows, with the ``meta_info`` of the first.

    Raises:
        DataError: if there are no rows, or rows differ in their columns, or in dtype or shape of one; names the column
            and the row.
    """
    if not x:
        raise DataError("collate_fn got no rows: expected at least one DataProtoItem", rows=0)
    expected = _kinds(x[0])
    for position, item in enumerate(x):
        kinds = _kinds(item)
        for key in expected | kinds:
            if (given := kinds.get(key, "missing")) != (first := expected.get(key, "missing")):
                text = f"column {key!r} of row {position} is {given}, of row 0 {first}: they must be equal"
                raise DataError(text, column=key, row=position)
    items: Any = [item.batch for item in x]
    batch: Any = None if items[0] is None else torch.stack(items).contiguous()
    arrays = {key: as_array([item.non_tensor_batch[key] for item in x]) for key in x[0].non_tensor_batch}
    return DataProto(batch, arrays, copy_meta(x[0].meta_info))


def _kinds(item: DataProtoItem) -> dict[str, str]:
    """Return what the columns of rows must have in common to be stacked."""
    tensors = {} if item.batch is None else {key: describe(value) for key, value in item.batch.items()}
    return tensors | dict.fromkeys(item.non_tensor_batch, "not a tensor")


def _union_tensordicts(first: TensorDict | None, second: TensorDict | None) -> TensorDict | None:
    if first is None or second is None:
        return shallow_copy(second if first is None else first)
    if first.batch_size != second.batch_size:
        dims = (list(first.batch_size), list(second.batch_size))
        raise DataError(f"union of batch dims {dims[0]} and {dims[1]}: they must be equal", batch_sizes=dims)
    return make_tensordict(_union(dict(first.items()), dict(second.items())), first.batch_size, first.device)


def _union(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Unite columns by name, sharing their memory; raise DataError if a column of both differs."""
    for key in first.keys() & second.keys():
        if not same_value(first[key], second[key]):
            kinds = f"{describe(first[key])} and {describe(second[key])}"
            text = f"union: column {key!r} is in both batches and differs ({kinds}): pop or rename one of them"
            raise DataError(text, column=key)
    return first | {key: value for key, value in second.items() if key not in first}


def format_bytes(size: float) -> str:
    """Format a number of bytes in decimal units: ``680 B``, ``1.5 kB``, ``120.0 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
