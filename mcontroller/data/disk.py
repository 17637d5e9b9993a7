"""Save a batch to a file of ``torch.save``, and load it without running code of the file (``weights_only``)."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mcontroller.data.columns import as_array, is_tensordict, make_tensordict
from mcontroller.data.pickling import check_sendable
from mcontroller.errors import DataError
from mcontroller.files import replacing

if TYPE_CHECKING:
    from tensordict import TensorDict

_FORMAT = {"format": "mcontroller.DataProto", "version": 2}

_ARRAY_KINDS = "?biufcOU"
"""Kinds of numpy arrays that can be saved: numbers, objects and strings."""

_SAFE_GLOBALS: list[Any] = [
    *(value.__reduce__()[0] for value in (np.zeros(1), np.float32(1))),  # numpy's functions that rebuild them
    *{type(np.dtype(code)) for code in np.typecodes["All"] if np.dtype(code).kind in _ARRAY_KINDS},
    np.ndarray,
    np.dtype,
    bytes,  # the content of an array without elements
]
"""What a file may name besides tensors and Python's values: arrays and numbers of numpy."""

Parts = tuple[Any, dict[str, np.ndarray], dict[str, Any]]
"""The tensors, the non-tensor columns and the meta_info of a batch."""


def save_batch(
    filepath: str | os.PathLike[str],
    batch: TensorDict | None,
    non_tensor_batch: dict[str, np.ndarray],
    meta_info: dict[str, Any],
) -> None:
    """Write the three parts of a batch; the file gets its name only when it is complete.

    Raises:
        DataError: if a value cannot be loaded without running code; names the column or key, and the type.
        OSError: if the file cannot be written.
    """
    content = {
        **_FORMAT,
        "batch": None if batch is None else _columns(batch, "batch"),
        "non_tensor_batch": _stored(non_tensor_batch, "non_tensor_batch"),
        "meta_info": _stored(meta_info, "meta_info"),
    }
    try:
        with replacing(Path(filepath)) as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError after the error of the file
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, cause.strerror or str(cause), os.fspath(filepath)) from error


def load_batch(filepath: str | os.PathLike[str]) -> Parts:
    """Read the three parts of the batch that ``save_batch`` wrote, onto the CPU.

    Raises:
        DataError: if the file contains no batch, is damaged, or was written by another version.
        OSError: if it cannot be read.
    """
    with open(filepath, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:  # torch loads a tensor whose bytes have changed
                if damaged := archive.testzip():
                    raise zipfile.BadZipFile(f"{damaged} has another checksum")
            file.seek(0)
            with torch.serialization.safe_globals(_SAFE_GLOBALS):
                content = torch.load(file, map_location="cpu", weights_only=True)
            if _FORMAT.items() <= content.items():
                batch = content["batch"]
                return None if batch is None else _tensordict(*batch), content["non_tensor_batch"], content["meta_info"]
        except Exception as error:  # of many types, and torch's text advises to load the file nevertheless
            text = f"{os.fspath(filepath)} is not a saved DataProto, or damaged: {type(error).__name__}"
            raise DataError(text, path=filepath) from error
    raise DataError(f"{os.fspath(filepath)} is not a saved DataProto of {_FORMAT}", path=filepath)


def _columns(batch: Any, location: str) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the columns of a TensorDict, nested ones in the same way, and its batch size."""
    columns = {
        key: (_columns if is_tensordict(column) else _stored)(column, f"{location}[{key!r}]")
        for key, column in batch.items()
    }
    return columns, tuple(batch.batch_size)


def _tensordict(columns: dict[str, Any], batch_size: tuple[int, ...]) -> TensorDict:
    nested = {key: _tensordict(*column) if isinstance(column, tuple) else column for key, column in columns.items()}
    return make_tensordict(nested, batch_size)


def _stored(value: Any, location: str) -> Any:
    """Return a value in the form that is saved: a tensor without the rest of its storage.

    Raises:
        DataError: it is of a type that would be loaded by running code.
    """
    if value is None or type(value) in (str, bool, int, float, complex) or isinstance(value, np.bool_ | np.number):
        return value
    if type(value) is dict:
        items = value.items()
        return {_stored(key, f"key of {location}"): _stored(item, f"{location}[{key!r}]") for key, item in items}
    if type(value) in (list, tuple):
        return type(value)(_stored(item, f"{location}[{index}]") for index, item in enumerate(value))
    if isinstance(value, Tensor):
        check_sendable(value, location)
        return value.detach().as_subclass(Tensor).resolve_conj().resolve_neg().cpu().clone()
    if type(value) is np.ndarray and value.dtype.kind in _ARRAY_KINDS:
        if not value.dtype.hasobject:
            return value
        return as_array(_stored(value.ravel().tolist(), location)).reshape(value.shape)
    raise DataError(
        f"cannot save {location}, which is {type(value).__name__}: "
        "expected numbers, strings, lists, tuples, dicts, arrays and tensors",
        location=location,
        type=type(value).__name__,
    )
