"""The data of a batch: its construction, where its columns are, size, comparison, copying, pickling and saving.

`DataProto` adds the operations on rows and columns.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from mcontroller.data import checks
from mcontroller.data.columns import (
    Columns,
    column_names,
    column_nbytes,
    describe_column,
    format_bytes,
    is_jagged,
    make_columns,
    map_columns,
    packed_parts,
    shallow_copy,
)
from mcontroller.data.meta import copy_meta, same_value, short_repr
from mcontroller.data.remote import RemoteColumns
from mcontroller.data.serialization import OutOfBand, pack_tensors
from mcontroller.data.storage import load_batch, save_batch
from mcontroller.data.tensordicts import is_tensordict_base
from mcontroller.errors import DataError
from mcontroller.transport import Future, countdown
from parallel_state.describe import table_html

if TYPE_CHECKING:
    from os import PathLike

    from tensordict import TensorDict

    from mcontroller.data.columns import Batch

_FIELDS = ("stored_batch", "non_tensor_batch", "meta_info", "remote")


class DataProtoConfig:
    """Process-wide defaults of `DataProto`.

    Attributes:
        auto_padding: whether every batch may be padded if the number of shards does not divide its rows.
        auto_padding_key: the key of ``meta_info`` that allows padding for one batch.
    """

    auto_padding: bool = False
    auto_padding_key: str = "_auto_padding"


class BatchData(OutOfBand):
    """The three fields of a batch, all of the same number of rows. Base class of `DataProto`.

    The tensors are in this process, or kept on the workers that computed them. The result of a call that was not waited
    for has no fields yet: the first access to one waits for the call.

    Args:
        batch: tensors, as a TensorDict whose dim 0 counts rows.
        non_tensor_batch: Numpy arrays ``[rows, ...]`` by name.
        meta_info: values for the whole batch by name.

    Attributes:
        stored_batch: low level: the local tensors as they are stored, for code that moves rows. A TensorDict,
            or ``Columns``, which are cheaper and become a TensorDict at the first access to ``batch``; None if there
            are no tensors.
        non_tensor_batch: Numpy arrays ``[rows, ...]`` by name.
        meta_info: values for the whole batch by name.
        remote: low level: the tensors that are kept on workers. One that is in ``stored_batch`` too is a copy.

    Raises:
        DataError: if a column has another number of rows than the first, or is of a kind that cannot be split.
    """

    stored_batch: Batch | None
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]
    remote: tuple[RemoteColumns, ...]

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        batch: Batch | None = None,
        non_tensor_batch: dict[str, np.ndarray] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> None:
        self.stored_batch = batch
        self.non_tensor_batch = {} if non_tensor_batch is None else non_tensor_batch
        self.meta_info = {} if meta_info is None else meta_info
        self.remote = ()
        self.check_consistency()

    @property
    def batch(self) -> TensorDict | None:
        """The tensors as a TensorDict, or None if there are none. All of them are fetched, and no longer remote."""
        self.get()
        if isinstance(self.stored_batch, Columns):
            self.stored_batch = self.stored_batch.tensordict()
        return self.stored_batch

    @batch.setter
    def batch(self, batch: TensorDict | None) -> None:
        self.stored_batch, self.remote = batch, ()

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
            tensors: tensors ``[rows, ...]``, dense or jagged, and TensorDicts by name.
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
        for name, value in (("tensors", tensors), ("non_tensors", non_tensors), ("meta_info", meta_info)):
            checks.check_mapping(name, value)
        checks.check_names("tensors", () if tensors is None else tensors.keys())
        checks.check_names("non_tensors", () if non_tensors is None else non_tensors.keys())
        num_batch_dims = checks.count("num_batch_dims", num_batch_dims, 1)
        if num_batch_dims > 1 and non_tensors:
            raise DataError(
                f"num_batch_dims is {num_batch_dims}, with {len(non_tensors or {})} non-tensor columns: "
                "expected 1 if there are non-tensor columns",
                num_batch_dims=num_batch_dims,
            )
        batch = checks.make_batch(tensors, num_batch_dims) if tensors else None
        arrays = {key: checks.as_array(value, f"non_tensors[{key!r}]") for key, value in (non_tensors or {}).items()}
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
        checks.check_mapping("data", data)
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor) or is_tensordict_base(value)}
        others = {key: value for key, value in data.items() if key not in tensors}
        for key, value in others.items():
            if not isinstance(value, np.ndarray | list | tuple):
                raise DataError(
                    f"column {key!r} is {type(value).__name__}: expected a tensor, a numpy array or a list; pass one "
                    f"value for the whole batch as meta_info={{{key!r}: ...}}",
                    column=key,
                )
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
            DataError: if columns differ in their number of rows; names the column.
        """
        from tensordict import NonTensorData, NonTensorStack

        tensors, arrays, info = {}, {}, dict(meta_info or {})
        for key, value in {} if tensor_dict is None else tensor_dict.items():
            if isinstance(value, NonTensorStack):
                arrays[key] = checks.as_array(value.tolist())
            elif isinstance(value, NonTensorData):
                info[key] = value.data
            else:
                tensors[key] = value
        return cls.from_dict(tensors, arrays, info, num_batch_dims)

    def derive(
        self,
        batch: Batch | None,
        non_tensor_batch: dict[str, np.ndarray],
        meta_info: dict[str, Any] | None = None,
        remote: Sequence[RemoteColumns] = (),
    ) -> Self:
        """Low level: make a batch of the same class from columns that agree; they are not checked.

        Args:
            batch: the tensors, as ``stored_batch`` has them.
            non_tensor_batch: the non-tensor columns; the dict is not copied.
            meta_info: values for the whole batch; None copies the values of this batch.
            remote: the tensors that are kept on workers.
        """
        if meta_info is None:
            meta_info = copy_meta(self.meta_info)
        new = object.__new__(type(self))
        if len(self.__dict__) > 4:  # attributes that a subclass or the user has added
            new.__dict__.update(self.__dict__)
        new.stored_batch, new.non_tensor_batch, new.meta_info = batch, non_tensor_batch, meta_info
        new.remote = tuple(remote)
        return new

    # ---- the result of a call that was not waited for --------------------------------------------------------------

    @classmethod
    def later(cls, future: Future[Self], kept: Callable[[], Self]) -> Self:
        """Low level: make the batch that a call computes.

        Args:
            future: the batch with all columns here.
            kept: called when the call has succeeded; returns the batch whose tensors stay on the workers.
        """
        batch = object.__new__(cls)
        batch.__dict__["_later"] = future, kept
        return batch

    if not TYPE_CHECKING:  # a type checker reports attributes that the class does not declare

        def __getattr__(self, name: str) -> Any:
            """Wait for the call that computes this batch, at the first access to a field."""
            if name not in _FIELDS or "_later" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            future, kept = self.__dict__["_later"]
            future.check()
            self._become(kept())
            return getattr(self, name)

    @property
    def _future(self) -> Future[Self] | None:
        future: Future[Self] | None = self.__dict__.get("_later", (None,))[0]
        return future

    def _become(self, other: BatchData) -> None:
        was_computed = self.__dict__.pop("_later", None) is None
        for name in _FIELDS:
            if was_computed or name not in self.__dict__:  # else it was set before the batch was computed
                setattr(self, name, getattr(other, name))

    def _set_columns(self, other: BatchData) -> None:
        self.stored_batch, self.non_tensor_batch, self.remote = other.stored_batch, other.non_tensor_batch, other.remote

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
        here, left = self.tensors_here(), countdown(timeout)
        wanted = set(self.tensor_names if names is None else names) - here.keys()
        for each in self.remote:
            missing = [name for name in each.names if name in wanted and name not in here]
            if missing:
                here |= each.read(missing, left())
        if here:
            self.stored_batch = make_columns(here, (len(self),))
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
        if self.stored_batch is not None:
            rows: int = self.stored_batch.batch_size[0]
            return rows
        for array in self.non_tensor_batch.values():
            return int(array.shape[0])
        return 0

    def check_consistency(self) -> None:
        """Check that all columns have the same number of rows; call it after changing a field directly.

        Raises:
            DataError: if a column has another number of rows, or is of a kind that cannot be split; names the column.
        """
        checks.check_columns(self.stored_batch, self.non_tensor_batch)

    def has_columns(self) -> bool:
        """Return whether the batch has columns, and not only ``meta_info``."""
        return self.stored_batch is not None or bool(self.non_tensor_batch or self.remote)

    def is_padding_enabled(self) -> bool:
        """Return whether this batch may be padded: made with ``auto_padding=True``, or by the process-wide default."""
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False) or DataProtoConfig.auto_padding)

    @property
    def tensor_names(self) -> list[str]:
        """The names of all tensors. Fetches none."""
        here = () if self.stored_batch is None else column_names(self.stored_batch)
        return [*here, *dict.fromkeys(name for each in self.remote for name in each.names if name not in here)]

    @property
    def remote_names(self) -> set[str]:
        """Low level: the names of the tensors that are kept on workers, also of those that were fetched."""
        return {name for each in self.remote for name in each.names}

    def tensors(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return tensors by name in a new dict; cheaper than ``batch``, because no TensorDict is made.

        Args:
            names: the tensors to return, of which those that are kept on workers are fetched; see ``prefetch``. None:
                all.

        Raises:
            DataError: if a name does not exist.
        """
        self.prefetch(names)
        if names is None:
            return self.tensors_here()
        here = self.tensors_here()
        checks.check_keys("tensor column", names, here)
        return {name: here[name] for name in names}

    def tensors_here(self) -> dict[str, Any]:
        """Low level: return the tensors that are in this process, by name."""
        return {} if self.stored_batch is None else dict(self.stored_batch.items())

    def column_names(self) -> list[str]:
        """Return the names of all columns: first of ``batch``, then of ``non_tensor_batch``."""
        return [*self.tensor_names, *self.non_tensor_batch]

    def row_lengths(self, key: str = "attention_mask") -> list[int]:
        """Return the length of every row.

        Args:
            key: a mask ``[rows, ...]``, whose entries are summed, or a jagged column, whose rows are measured.

        Raises:
            DataError: if there is no such tensor.
        """
        checks.check_names("key", [key])
        column = self.tensors([key])[key]
        if is_jagged(column):
            lengths = packed_parts(column)[1].diff()
        else:
            lengths = column.flatten(1).sum(dim=1, dtype=torch.int64) if column.ndim > 1 else column
        return list(lengths.tolist())

    def nbytes(self) -> int:
        """Return the bytes of the local tensors and numpy arrays; object arrays count as their pointers."""
        return sum(self._sizes())

    def _sizes(self) -> tuple[int, int]:
        tensors = 0 if self.stored_batch is None else column_nbytes(self.stored_batch)
        return tensors, sum(array.nbytes for array in self.non_tensor_batch.values())

    def summary(self) -> str:
        """Return one line: rows, dtype and shape of every local column, keys of ``meta_info``, bytes."""
        if self._future is not None:
            return f"DataProto({'computed' if self.done() else 'being computed'} on the workers)"
        tensors = "{}" if self.stored_batch is None else describe_column(self.stored_batch)
        away = [name for name in self.tensor_names if name not in self.tensors_here()]
        kept = f", {away} on the workers" if away else ""
        arrays = ", ".join(f"{key}: {describe_column(array)}" for key, array in self.non_tensor_batch.items())
        return (
            f"DataProto({len(self)} rows, batch {tensors}{kept}, non_tensor_batch {{{arrays}}}, "
            f"meta_info {list(self.meta_info)}, {format_bytes(self.nbytes())})"
        )

    __repr__ = summary

    def _repr_html_(self) -> str:
        if self._future is not None:
            return table_html(self.summary(), (), ())
        here = {**self.tensors_here(), **self.non_tensor_batch}
        names = self.column_names()
        columns = [(name, describe_column(here[name]) if name in here else "on the workers") for name in names]
        caption = f"DataProto: {len(self)} rows, {format_bytes(self.nbytes())}"
        return table_html(caption, ("column", "type"), [*columns, ("meta_info", ", ".join(self.meta_info))])

    def print_size(self, prefix: str = "") -> None:
        """Print the size of the tensors and of the non-tensor columns.

        Args:
            prefix: text before it, such as the name of the batch.
        """
        tensors, others = map(format_bytes, self._sizes())
        sys.stdout.write(f"{prefix}{', ' if prefix else ''}batch: {tensors}, non_tensor_batch: {others}\n")

    def difference(self, other: BatchData) -> str | None:
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
                return f"{name} has keys {sorted(mine)}, other has {sorted(others)}"
            for key, value in mine.items():
                if not same_value(value, others[key]):
                    return f"{name}[{key!r}] differs: {short_repr(value)} and {short_repr(others[key])}"
        return None

    def __eq__(self, other: object) -> bool:
        """Return whether ``difference`` finds none."""
        return self.difference(other) is None if isinstance(other, BatchData) else NotImplemented

    # ---- copies and files (pickling: serialization.OutOfBand) -------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        stored = self.prefetch().stored_batch
        columns = None if stored is None else map_columns(stored, lambda column: column)
        state: dict[str, Any] = pack_tensors({**self.__dict__, "stored_batch": columns, "remote": ()})
        return state

    def __copy__(self) -> Self:
        return self.derive(shallow_copy(self.stored_batch), dict(self.non_tensor_batch), remote=self.remote)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        stored = self.prefetch().stored_batch
        batch = None if stored is None else map_columns(stored, lambda column: column.clone())
        return self.derive(batch, copy.deepcopy(self.non_tensor_batch, memo), copy.deepcopy(self.meta_info, memo))

    def save_to_disk(self, filepath: str | PathLike[str]) -> None:
        """Write the batch to one safetensors file.

        Args:
            filepath: path of the file; an existing file is replaced when the new one is complete.

        Raises:
            DataError: if a value can be stored only with pickle; names the column or key. Values can be tensors,
                numpy arrays of numbers, strings or objects, numbers, strings, lists, tuples and dicts.
        """
        save_batch(filepath, self.prefetch().stored_batch, self.non_tensor_batch, self.meta_info)

    @classmethod
    def load_from_disk(cls, filepath: str | PathLike[str]) -> Self:
        """Read a batch that ``save_to_disk`` wrote, onto the CPU. No code from the file is executed.

        Args:
            filepath: path of the file.

        Raises:
            DataError: if the file is not such a file, or was written by another version.
        """
        return cls(*load_batch(filepath))
