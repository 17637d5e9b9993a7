"""DataProto: the batch that travels between the controller and its workers.

A batch is three things of one length: ``batch``, a TensorDict whose dim 0 counts rows; ``non_tensor_batch``, numpy
arrays of as many rows; and ``meta_info``, one dict for the whole batch. Operations give a new DataProto, whose columns
are views where torch and numpy can give them, and whose ``meta_info`` has containers of its own. Three methods change
the batch they are called on, as their names say: ``pop``, ``rename`` and ``reorder``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from mcontroller.data import columns, meta, rows, storage
from mcontroller.data.batch_ops import (
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unite,
    unpad_dataproto,
)
from mcontroller.data.rows import Index, Keys, RowIndexError
from mcontroller.data.serialization import OutOfBand, pack
from mcontroller.data.tensordicts import is_tensordict_base
from mcontroller.errors import DataError
from mcontroller.partition import contiguous

if TYPE_CHECKING:
    from os import PathLike

    from tensordict import TensorDict

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoItem",
    "RowIndexError",
    "collate_fn",
    "fold_batch_dim",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]


class DataProtoConfig:
    """Process-wide defaults. ``auto_padding``: every batch may be padded when its rows do not divide by the shards."""

    auto_padding: bool = False
    auto_padding_key: str = "_auto_padding"


@dataclass(eq=False)
class DataProtoItem(OutOfBand):
    """One row of a DataProto: tensors without their row dim, one object of every non-tensor column, the meta_info."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto(OutOfBand):
    """A batch of rows; the module says what its three fields are and which methods change it.

    Raises DataError when the columns do not have the same number of rows, or are of a kind that cannot be split.
    """

    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        batch: columns.Batch | None = None,
        non_tensor_batch: dict[str, np.ndarray] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> None:
        self._batch: columns.Batch | None = batch
        self.non_tensor_batch = {} if non_tensor_batch is None else non_tensor_batch
        self.meta_info = {} if meta_info is None else meta_info
        self.check_consistency()

    @property
    def batch(self) -> TensorDict | None:
        """The tensors, or None where there are none."""
        if isinstance(self._batch, columns.Columns):
            self._batch = self._batch.tensordict()
        return self._batch

    @batch.setter
    def batch(self, batch: TensorDict | None) -> None:
        self._batch = batch

    # ---- made from -------------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """A batch of these columns; a list under ``non_tensors`` becomes a 1-D object array of its entries.

        The first ``num_batch_dims`` dims of every tensor are batch dims; only with 1 may there be non-tensor columns.
        """
        if num_batch_dims < 1 or (num_batch_dims > 1 and non_tensors):
            raise DataError(
                f"num_batch_dims={num_batch_dims} with {len(non_tensors or {})} non-tensor columns: "
                "give at least 1, and exactly 1 when there are non-tensor columns",
                num_batch_dims=num_batch_dims,
            )
        batch = rows.make_batch(tensors, num_batch_dims) if tensors else None
        arrays = {key: rows.as_array(value) for key, value in (non_tensors or {}).items()}
        info = meta.copy_meta(dict(meta_info or {}))
        if auto_padding:
            info[DataProtoConfig.auto_padding_key] = True
        return cls(batch, arrays, info)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None, auto_padding: bool = False
    ) -> Self:
        """A batch of one dict's columns: tensors and TensorDicts to ``batch``, arrays and lists beside them."""
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor) or is_tensordict_base(value)}
        others = {key: value for key, value in data.items() if key not in tensors}
        for key, value in others.items():
            if not isinstance(value, np.ndarray | list | tuple):
                raise DataError(
                    f"column {key!r} is {type(value).__name__}: give a tensor, a numpy array or a list", column=key
                )
        return cls.from_dict(tensors=tensors, non_tensors=others, meta_info=meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDict | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> Self:
        """A batch of a TensorDict's columns; a NonTensorStack becomes a non-tensor column, NonTensorData meta_info."""
        from tensordict import NonTensorData, NonTensorStack

        tensors, arrays, info = {}, {}, dict(meta_info or {})
        for key, value in {} if tensor_dict is None else tensor_dict.items():
            if isinstance(value, NonTensorStack):
                arrays[key] = rows.as_array(value.tolist())
            elif isinstance(value, NonTensorData):
                info[key] = value.data
            else:
                tensors[key] = value
        return cls.from_dict(tensors, arrays, info, num_batch_dims)

    def _with(
        self, batch: columns.Batch | None, arrays: dict[str, np.ndarray], info: dict[str, Any] | None = None
    ) -> Self:
        """A batch known to be consistent, with a copy of this one's meta_info unless ``info`` is given."""
        if info is None:
            info = meta.copy_meta(self.meta_info)
        new = object.__new__(type(self))
        if len(self.__dict__) > 3:  # attributes of a subclass or of the user's own
            new.__dict__.update(self.__dict__)
        new._batch, new.non_tensor_batch, new.meta_info = batch, arrays, info
        return new

    # ---- looked at -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self._batch is not None:
            return self._batch.batch_size[0]
        for array in self.non_tensor_batch.values():
            return array.shape[0]
        return 0

    def check_consistency(self) -> None:
        """Raises DataError naming the column whose rows or kind do not fit the batch."""
        rows.check_columns(self._batch, self.non_tensor_batch)

    def is_padding_enabled(self) -> bool:
        """Whether this batch may be padded: its own mark (``auto_padding=True``), or the process-wide default."""
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False) or DataProtoConfig.auto_padding)

    def row_lengths(self, key: str = "attention_mask") -> list[int]:
        """Per row, the sum over a column ``[batch, ...]`` such as a mask, or the length of a jagged column's row."""
        tensors = self.tensors()
        rows.check_keys("tensor column", [key], tensors)
        column = tensors[key]
        if columns.is_jagged(column):
            return columns.packed(column)[1].diff().tolist()
        return column.flatten(1).sum(dim=1, dtype=torch.int64).tolist() if column.ndim > 1 else column.tolist()

    def tensors(self) -> dict[str, Any]:
        """The tensors by name, in a dict of its own: no TensorDict is made, nor the package loaded."""
        return {} if self._batch is None else dict(self._batch.items())

    def _column_keys(self) -> list[str]:
        return [*self.tensors(), *self.non_tensor_batch]

    def nbytes(self) -> int:
        """Bytes of the tensors and of the numpy arrays (an object array counts its pointers)."""
        return sum(self._sizes())

    def _sizes(self) -> tuple[int, int]:
        tensors = 0 if self._batch is None else columns.nbytes(self._batch)
        return tensors, sum(array.nbytes for array in self.non_tensor_batch.values())

    def summary(self) -> str:
        """One line: rows, the dtype and shape of every column, the keys of meta_info, the size."""
        tensors = "{}" if self._batch is None else columns.describe(self._batch)
        arrays = ", ".join(f"{key}: {columns.describe(array)}" for key, array in self.non_tensor_batch.items())
        return (
            f"DataProto({len(self)} rows, batch {tensors}, non_tensor_batch {{{arrays}}}, "
            f"meta_info {list(self.meta_info)}, {columns.readable(self.nbytes())})"
        )

    __repr__ = summary

    def print_size(self, prefix: str = "") -> None:
        """Writes the size of the tensors and of the non-tensor columns to standard output."""
        tensors, others = map(columns.readable, self._sizes())
        sys.stdout.write(f"{prefix}{', ' if prefix else ''}batch: {tensors}, non_tensor_batch: {others}\n")

    def difference(self, other: DataProto) -> str | None:
        """The first difference from another batch in words, None when they are equal.

        Compares rows, keys, dtypes, shapes, values (NaN equals NaN, devices may differ) and meta_info.
        """
        if len(self) != len(other):
            return f"{len(self)} rows, other has {len(other)}"
        for name in ("batch", "non_tensor_batch", "meta_info"):
            mine, others = (batch.tensors() if name == "batch" else getattr(batch, name) for batch in (self, other))
            if mine.keys() != others.keys():
                return f"{name} has keys {sorted(mine)}, other has {sorted(others)}"
            for key, value in mine.items():
                if not meta.same_value(value, others[key]):
                    return f"{name}[{key!r}] differs: {meta.short(value)} and {meta.short(others[key])}"
        return None

    def __eq__(self, other: object) -> bool:
        return self.difference(other) is None if isinstance(other, DataProto) else NotImplemented

    # ---- rows ------------------------------------------------------------------------------------------------------

    def __getitem__(self, item: int | slice | Index) -> Any:
        """Row ``i`` as a DataProtoItem; a slice, a list, a mask or an index array as a DataProto.

        A slice gives views; anything else copies. Raises RowIndexError for a row that is not there.
        """
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if not isinstance(item, int | np.integer):
            return self.select_idxs(item)
        index = int(rows.row_index([item], len(self))[0])
        batch = None if self.batch is None else self.batch[index]
        arrays = {key: array[index] for key, array in self.non_tensor_batch.items()}
        return DataProtoItem(batch, arrays, meta.copy_meta(self.meta_info))

    def __iter__(self) -> Iterator[DataProtoItem]:
        return map(self.__getitem__, range(len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Rows ``start:end:step`` as views; a negative step copies."""
        begin, stop, stride = slice(start, end, step).indices(len(self))
        if stride < 0:
            return self.select_idxs(np.arange(begin, stop, stride))
        stop = max(begin, stop)
        batch = None if self._batch is None else columns.slice_rows(self._batch, begin, stop, stride)
        return self._with(batch, {key: array[begin:stop:stride] for key, array in self.non_tensor_batch.items()})

    def select_idxs(self, idxs: Index) -> Self:
        """The rows of an index (negative counts from the end, repeats allowed) or of a boolean mask, as a copy."""
        index = rows.row_index(idxs, len(self))
        batch = None if self._batch is None else columns.take_rows(self._batch, torch.from_numpy(index))
        return self._with(batch, {key: array[index] for key, array in self.non_tensor_batch.items()})

    def __getitems__(self, idxs: list[int]) -> Self:
        """What torch's DataLoader asks for: a whole mini-batch at once, as views where its rows are consecutive."""
        first = idxs[0] if idxs else 0
        if idxs == list(range(first, first + len(idxs))):
            return self.slice(first, first + len(idxs))
        return self.select_idxs(idxs)

    def chunk(self, chunks: int) -> list[Self]:
        """Exactly ``chunks`` consecutive parts as views, no two differing by more than one row (some may be empty)."""
        return self._split([len(shard) for shard in contiguous(len(self), chunks).shards])

    def split(self, split_size: int) -> list[Self]:
        """Consecutive parts of ``split_size`` rows as views; the last one has what is left."""
        if split_size < 1:
            raise DataError(f"split_size {split_size}: give at least 1 row", split_size=split_size)
        return self._split([min(split_size, len(self) - start) for start in range(0, len(self), split_size)])

    def _split(self, sizes: Sequence[int]) -> list[Self]:
        batches: Sequence[columns.Batch | None] = [None] * len(sizes)
        if self._batch is not None:
            batches = columns.split_rows(self._batch, sizes)
        held, copy_info = self.non_tensor_batch, meta.copier(self.meta_info)
        if not held:
            return [self._with(batch, {}, copy_info()) for batch in batches]
        return [
            self._with(batch, {key: held[key][stop - size : stop] for key in held}, copy_info())
            for batch, size, stop in zip(batches, sizes, accumulate(sizes), strict=True)
        ]

    @staticmethod
    def concat(data: Sequence[DataProto], *, spare_cores: bool = False) -> DataProto:
        """The rows of all parts in order, as a copy (of one part: as views).

        ``spare_cores`` leaves them to the processes beside this one, where that costs this one little.
        ``meta_info``: a key whose values agree wherever it stands is kept; ``metrics`` becomes name -> flat list of
        every part's values; any other difference raises DataError, as parts with different columns do.
        """
        others = [data] if isinstance(data, DataProto) else [part for part in data if not isinstance(part, DataProto)]
        if not data or others:
            what = f"of a {type(others[0]).__name__}" if others else "of no parts"
            raise DataError(f"concat {what}: give a list of at least one DataProto")
        first = data[0]
        info = meta.merge_concat([part.meta_info for part in data])
        if len(data) == 1:
            return first._with(columns.shallow(first._batch), dict(first.non_tensor_batch), info)
        rows.check_same_columns(data)
        tensors: list[Any] = [part._batch for part in data]
        batch = None if first._batch is None else columns.join_rows(tensors, spare_cores=spare_cores)
        arrays = {key: np.concatenate([part.non_tensor_batch[key] for part in data]) for key in first.non_tensor_batch}
        return first._with(batch, arrays, info)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Every row ``repeat_times`` times: next to each other (interleave), or the whole batch one after another."""
        if repeat_times < 0:
            raise DataError(f"repeat_times {repeat_times}: give 0 or more", repeat_times=repeat_times)
        index = np.arange(len(self))
        return self.select_idxs(index.repeat(repeat_times) if interleave else np.tile(index, repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | Tensor) -> Self:
        """Row ``i`` ``repeat_times[i]`` times, next to each other."""
        times = np.asarray(repeat_times.cpu() if isinstance(repeat_times, Tensor) else repeat_times, dtype=np.int64)
        if times.shape != (len(self),) or (times < 0).any():
            raise DataError(
                f"repeat_times of shape {times.shape} for {len(self)} rows: give one number of 0 or more for every row",
                shape=times.shape,
                rows=len(self),
            )
        return self.select_idxs(np.arange(len(self)).repeat(times))

    def reorder(self, indices: Index) -> None:
        """Puts the rows of this batch, in place, into the order of ``indices``, a permutation of all of them."""
        rows.check_permutation(rows.row_index(indices, len(self)), len(self))
        ordered = self.select_idxs(indices)
        self._batch, self.non_tensor_batch = ordered._batch, ordered.non_tensor_batch

    def padding(self, padding_size: int, padding_candidate: str = "last") -> Self:
        """The batch with its "first" or "last" row repeated ``padding_size`` times at the end."""
        if padding_candidate not in ("first", "last"):
            raise DataError(f"padding_candidate {padding_candidate!r}: give 'first' or 'last'")
        if padding_size < 0 or (padding_size > 0 and len(self) == 0):
            raise DataError(f"{padding_size} rows of padding for a batch of {len(self)} rows", rows=len(self))
        row = 0 if padding_candidate == "first" else len(self) - 1
        return self.select_idxs([*range(len(self)), *[row] * padding_size]) if padding_size else self.slice()

    def unpad(self, pad_size: int) -> Self:
        """The batch without its last ``pad_size`` rows, as views."""
        if not 0 <= pad_size <= len(self):
            raise DataError(f"{pad_size} rows of padding in a batch of {len(self)} rows", rows=len(self))
        return self.slice(0, len(self) - pad_size)

    def fold_batch_dim(self, new_batch_size: int) -> Self:
        """``[batch, ...]`` as ``[new_batch_size, batch // new_batch_size, ...]``, as views."""
        if new_batch_size < 1 or len(self) % new_batch_size:
            raise DataError(f"{len(self)} rows do not fold into {new_batch_size}", rows=len(self))
        shape = (new_batch_size, len(self) // new_batch_size)
        batch = columns.reshape_rows(self._batch, lambda column: column.unflatten(0, shape), new_batch_size)
        arrays = {key: array.reshape(*shape, *array.shape[1:]) for key, array in self.non_tensor_batch.items()}
        return self._with(batch, arrays)

    def unfold_batch_dim(self, batch_dims: int = 2) -> Self:
        """``[a, b, ...]`` as ``[a * b, ...]``, over the first ``batch_dims`` dims; as views where memory allows."""
        held: list[Any] = [*self.non_tensor_batch.values(), *columns.leaves(self._batch)]
        leading = [tuple(column.shape[:batch_dims]) for column in held]
        if batch_dims < 1 or any(len(dims) < batch_dims or dims != leading[0] for dims in leading):
            raise DataError(
                f"the first {batch_dims} dims cannot be one: columns {self._column_keys()} begin with {leading}",
                batch_dims=batch_dims,
                dims=leading,
            )
        count = int(np.prod(leading[0])) if leading else len(self)
        batch = columns.reshape_rows(self._batch, lambda column: column.flatten(0, batch_dims - 1), count)
        arrays = {key: array.reshape(count, *array.shape[batch_dims:]) for key, array in self.non_tensor_batch.items()}
        return self._with(batch, arrays)

    # ---- columns ---------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Keys | None = None,
        non_tensor_batch_keys: Keys | None = None,
        meta_info_keys: Keys | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """The named columns and meta_info keys (None: all), sharing their memory unless ``deepcopy``."""
        tensors = self.tensors()
        names = rows.as_keys(batch_keys, tensors)
        arrays = rows.as_keys(non_tensor_batch_keys, self.non_tensor_batch)
        info = rows.as_keys(meta_info_keys, self.meta_info)
        rows.check_keys("batch column", names, tensors)
        rows.check_keys("non-tensor column", arrays, self.non_tensor_batch)
        rows.check_keys("meta_info key", info, self.meta_info)
        new = self._with(
            None if self._batch is None else columns.like(self._batch, {key: tensors[key] for key in names}, len(self)),
            {key: self.non_tensor_batch[key] for key in arrays},
            meta.copy_meta({key: self.meta_info[key] for key in info}),
        )
        return copy.deepcopy(new) if deepcopy else new

    def pop(
        self,
        batch_keys: Keys | None = None,
        non_tensor_batch_keys: Keys | None = None,
        meta_info_keys: Keys | None = None,
    ) -> Self:
        """Takes the named columns and meta_info keys (None: none) out of this batch, in place, and gives them."""
        taken = [rows.as_keys(keys) for keys in (batch_keys, non_tensor_batch_keys, meta_info_keys)]
        popped = self.select(taken[0], taken[1], taken[2])
        present = (self.tensors(), self.non_tensor_batch, self.meta_info)
        left = [[key for key in there if key not in keys] for there, keys in zip(present, taken, strict=True)]
        rest = self.select(left[0], left[1], left[2])
        self._batch, self.non_tensor_batch, self.meta_info = rest._batch, rest.non_tensor_batch, rest.meta_info
        return popped

    def rename(self, old_keys: Keys | None = None, new_keys: Keys | None = None) -> Self:
        """Renames columns of this batch, in place, and gives the batch itself."""
        old, new = rows.as_keys(old_keys), rows.as_keys(new_keys)
        rows.check_keys("column", old, self._column_keys())
        renamed = dict(zip(old, new, strict=False))
        names = [renamed.get(key, key) for key in self._column_keys()]
        if len(old) != len(new) or len(set(old)) != len(old) or len(set(names)) != len(names):
            raise DataError(
                f"rename of {old} to {new}: give every old name one new name that no other column has; "
                f"there are {self._column_keys()}",
                old=old,
                new=new,
            )
        if self._batch is not None:
            tensors = {renamed.get(key, key): value for key, value in self.tensors().items()}
            self._batch = columns.like(self._batch, tensors, len(self))
        self.non_tensor_batch = {renamed.get(key, key): array for key, array in self.non_tensor_batch.items()}
        return self

    def union(self, other: DataProto) -> Self:
        """The columns and meta_info of both, as views; a name in both must hold the same values, or DataError.

        A batch without columns adds its meta_info only. Two dicts under ``meta_info["metrics"]`` are united by name.
        """
        if len(self) != len(other) and self._column_keys() and other._column_keys():
            raise DataError(
                f"union of {len(self)} rows with {len(other)}: give batches of the same length",
                rows=(len(self), len(other)),
            )
        return self._with(
            unite(self._batch, other._batch),
            union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch),
            meta.merge_union(self.meta_info, other.meta_info),
        )

    def to(self, device: torch.device | str | int) -> Self:
        """The batch with its tensors on ``device``; columns that are there already are shared, not copied."""
        batch = None if self._batch is None else columns.moved(self._batch, torch.device(device))
        return self._with(batch, dict(self.non_tensor_batch))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Mini-batches of ``mini_batch_size`` rows, ``epochs`` times over; the last of an epoch has what is left.

        ``dataloader_kwargs`` go to ``torch.utils.data.DataLoader`` (``shuffle``, ``drop_last``, ``sampler``, ...);
        ``seed`` fixes the order it shuffles to.
        """
        if mini_batch_size < 1 or epochs < 0:
            raise DataError(f"mini_batch_size {mini_batch_size}, epochs {epochs}: give at least 1 row and 0 epochs")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        options: dict[str, Any] = {"generator": generator, "collate_fn": _as_it_is, **(dataloader_kwargs or {})}
        loader: Any = torch.utils.data.DataLoader(self, batch_size=mini_batch_size, **options)  # type: ignore[arg-type]
        return (mini_batch for _ in range(epochs) for mini_batch in loader)

    # ---- copied and kept (pickling: serialization.OutOfBand) --------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        batch = None if self._batch is None else columns.each(self._batch, _as_it_is)
        return pack({**self.__dict__, "_batch": batch})

    def __copy__(self) -> Self:
        return self._with(columns.shallow(self._batch), dict(self.non_tensor_batch))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        batch = None if self._batch is None else columns.each(self._batch, lambda column: column.clone())
        return self._with(batch, copy.deepcopy(self.non_tensor_batch, memo), copy.deepcopy(self.meta_info, memo))

    def save_to_disk(self, filepath: str | PathLike[str]) -> None:
        """Writes the batch to one safetensors file; ``mcontroller.data.storage`` says what it can hold."""
        storage.save(filepath, self._batch, self.non_tensor_batch, self.meta_info)

    @classmethod
    def load_from_disk(cls, filepath: str | PathLike[str]) -> Self:
        """The batch that ``save_to_disk`` wrote, on the CPU; reads data only, never runs code from the file."""
        return cls(*storage.load(filepath))


def _as_it_is(batch: Any) -> Any:
    return batch


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """A DataProto of these rows, with the meta_info of the first; DataError names a column that differs in shape."""
    if not x:
        raise DataError("collate_fn of no rows: give at least one DataProtoItem")
    batch = columns.stack_rows([item.batch for item in x])
    arrays = {key: rows.as_array([item.non_tensor_batch[key] for item in x]) for key in x[0].non_tensor_batch}
    return DataProto(batch, arrays, meta.copy_meta(x[0].meta_info))
