"""Reading the pickles of a checkpoint without running code: only the types that checkpoints consist of are accepted.

Three kinds of its files are pickles: ``.metadata``, the description of torch's distributed checkpoints; the objects in
the shards, such as the random state, which torch unpickles without a check; and ``common.pt``. They are checked before
Megatron reads them. A tensor in a shard is read by torch with ``weights_only``.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.safe_globals import SAFE_GLOBALS
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from mcontroller.errors import DataError

_METADATA, _COMMON, _COMMON_OBJECT = ".metadata", "common.pt", "common_state"
_DESCRIPTION = {
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"set", "frozenset", "list", "dict"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
}
"""Module -> names that ``.metadata`` may use, next to the classes of these modules."""
_OF_DESCRIPTION = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.sharded_tensor.metadata",
    "megatron.core.dist_checkpointing.strategies.torch",
)
_SCALES = {
    "collections": {"OrderedDict", "deque"},
    "builtins": {"set", "frozenset"},
    "torch": {"Size"},
    "torch._utils": {"_rebuild_tensor_v2"},
    "megatron.core.extensions.transformer_engine": {"TEDelayedScaling"},
}
"""Module -> names that the extra state of a layer may use, next to the recipes of Transformer Engine."""
_OF_SCALES = ("transformer_engine.common.recipe",)


def known_types() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which ``torch.load(weights_only=True)`` also reads the types of Megatron's checkpoints."""
    return torch.serialization.safe_globals(SAFE_GLOBALS)


def read_metadata(checkpoint: Path) -> Metadata:
    """Return the content of ``.metadata``.

    Raises:
        DataError: it is damaged, or has a type that does not belong there.
    """
    with _as_data_error(checkpoint, _METADATA):
        with open(checkpoint / _METADATA, "rb") as file:
            metadata = _Unpickler(file, _DESCRIPTION, _OF_DESCRIPTION).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise TypeError(f"it contains {type(metadata).__name__}, expected Metadata")
        for place in metadata.storage_data.values():
            if Path(place.relative_path).name != place.relative_path:
                raise ValueError(f"it names the file {place.relative_path!r}, expected one of its directory")
            if place.offset < 0 or place.offset + place.length > (checkpoint / place.relative_path).stat().st_size:
                raise ValueError(f"{place.relative_path} is shorter than it states")
    return metadata


def read_common(checkpoint: Path) -> dict[str, Any]:
    """Return what is not sharded: the content of ``common.pt``, or of an object in the shards (megatron-core 0.19).

    Returns:
        The values by name; empty if the checkpoint has neither.

    Raises:
        DataError: it is damaged, or has a type that does not belong there.
    """
    with _as_data_error(checkpoint, _COMMON), known_types():
        if (checkpoint / _COMMON).is_file():
            common = torch.load(checkpoint / _COMMON, map_location="cpu", weights_only=True)
        else:
            common = next(iter(_common_objects(checkpoint)), {})
        if not isinstance(common, dict):
            raise TypeError(f"it contains {type(common).__name__}, expected a dict")
    return common


def _common_objects(checkpoint: Path) -> Iterator[Any]:
    for index, place in read_metadata(checkpoint).storage_data.items():
        if index.fqn.partition("/")[0] == _COMMON_OBJECT:
            value = _object_at(checkpoint, place)
            yield value[0] if isinstance(value, list) and value else value


def _object_at(checkpoint: Path, place: Any) -> Any:
    with open(checkpoint / place.relative_path, "rb") as file:
        file.seek(place.offset)
        return torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)


def check_objects(checkpoint: Path, metadata: Metadata, part: int = 0, parts: int = 1) -> None:
    """Check a part of the objects in the shards, which torch unpickles as they are.

    Args:
        checkpoint: its directory.
        metadata: of ``read_metadata``.
        part: which of ``parts`` to check.
        parts: into how many parts the objects are divided.

    Raises:
        DataError: an object is damaged, or has a type that does not belong there; names it.
    """
    description = metadata.state_dict_metadata
    places = [
        (index.fqn, place)
        for index, place in metadata.storage_data.items()
        if isinstance(description.get(index.fqn), BytesStorageMetadata)
    ]
    for name, place in places[part::parts]:
        with _as_data_error(checkpoint, f"{name} in {place.relative_path}"), known_types():
            value = _object_at(checkpoint, place)
            if "_extra_state" in name:
                for state in _pickles(value):
                    _Unpickler(io.BytesIO(state), _SCALES, _OF_SCALES).load()


def _pickles(value: Any) -> Iterable[bytes]:
    """Return what layers of Transformer Engine will unpickle: bytes in tensors or buffers."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.numel():
        return [value.numpy().tobytes()]
    if isinstance(value, io.BytesIO):
        return [value.getvalue()] if value.getvalue() else []
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [inner for value in values for inner in _pickles(value)]


class _Unpickler(pickle.Unpickler):
    """Accepts the listed names only, and classes that are defined in the listed modules."""

    def __init__(self, file: Any, names: dict[str, set[str]], modules: Collection[str]) -> None:
        super().__init__(file)
        self._names, self._modules = names, modules

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes") and self._names is _SCALES:
            return _load_weights
        if name in self._names.get(module, ()):
            return super().find_class(module, name)
        if module in self._modules and isinstance(named := super().find_class(module, name), type):
            if named.__module__ == module:
                return named
        elif module == "torch" and name.isidentifier():
            named = getattr(torch, name, None)
            if isinstance(named, torch.dtype | torch.layout | torch.memory_format):
                return named
        raise pickle.UnpicklingError(f"it uses {module}.{name}, which does not belong in a checkpoint")


def _load_weights(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


@contextlib.contextmanager
def _as_data_error(checkpoint: Path, what: str) -> Iterator[None]:
    """Raise any error as one of this project: a damaged pickle raises errors of every type."""
    try:
        yield
    except Exception as error:
        text = f"the checkpoint {str(checkpoint)!r} is damaged: {what} cannot be read: "
        raise DataError(f"{text}{type(error).__name__}: {error!s:.300}", path=str(checkpoint), file=what) from error
