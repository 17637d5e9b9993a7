"""Reading the pickles of a checkpoint without running code: only the types that checkpoints consist of are accepted.

Three kinds of its files are pickles: ``.metadata``, the description of torch's distributed checkpoints; the objects in
the shards, such as the random state, which torch unpickles without a check; and ``common.pt``. They are checked before
Megatron reads them. A tensor in a shard is read by torch with ``weights_only``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
from collections.abc import Iterable, Iterator
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
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
}
"""Module -> names that ``.metadata`` may use."""
_SCALES = {
    "collections": {"OrderedDict", "deque"},
    "builtins": {"set", "frozenset"},
    "torch": {"Size"},
    "torch._utils": {"_rebuild_tensor_v2"},
    "megatron.core.extensions.transformer_engine": {"TEDelayedScaling"},
}
"""Module -> names that the extra state of a layer may use, next to the recipes of Transformer Engine."""
_RECIPES = "transformer_engine.common.recipe"


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
            metadata = _Unpickler(file, _DESCRIPTION).load()
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
                    _Unpickler(io.BytesIO(state), _SCALES).load()


def _pickles(value: Any) -> Iterable[bytes]:
    """Return what layers of Transformer Engine will unpickle: bytes in tensors or buffers."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.numel():
        return [value.numpy().tobytes()]
    if isinstance(value, io.BytesIO):
        return [value.getvalue()] if value.getvalue() else []
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [inner for value in values for inner in _pickles(value)]


class _Unpickler(pickle.Unpickler):
    """Accepts the listed names only; of a recipe, classes that are defined in its module."""

    def __init__(self, file: Any, known: dict[str, set[str]]) -> None:
        super().__init__(file)
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes") and self._known is _SCALES:
            return _load_weights
        named = None
        if name in self._known.get(module, ()):
            named = super().find_class(module, name)
        elif module == "torch" and name.isidentifier():
            named = getattr(torch, name, None)
            named = named if isinstance(named, torch.dtype | torch.layout | torch.memory_format) else None
        elif self._known is _SCALES and module == _RECIPES and name.isidentifier():
            named = getattr(importlib.import_module(_RECIPES), name, None)
            named = named if isinstance(named, type) and named.__module__ == _RECIPES else None
        if named is None:
            raise pickle.UnpicklingError(f"it uses {module}.{name}, which does not belong in a checkpoint")
        return named


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
