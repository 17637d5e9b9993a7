"""Offload weights, gradients and optimizer state of a role to host memory, so that roles share a device in time.

The storage of a tensor is offloaded, not the tensor object. So all views of it that Megatron keeps stay valid: gradient
buffers, buckets, the distributed optimizer's shards. An offloaded storage is empty: call ``Offload.reload`` before
anything reads or writes it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcontroller.errors import ConfigError, ResourceError
from workers.weights.in_engine.registered_memory import register_memory, unregister_memory

_ALIGNMENT = 512
"""[bytes] Every copy starts at a multiple of this, as CUDA's own allocations do."""


@runtime_checkable
class Sleepable(Protocol):
    """A part of a role that frees its device memory itself, such as an engine that generates."""

    def sleep(self) -> int:
        """Free the device memory, and return how many bytes that were."""
        ...

    def wake_up(self) -> None:
        """Allocate the device memory again."""
        ...


class HostBuffer:
    """Bytes in host memory that a GPU copies from and to at full speed, freed with this object.

    torch's allocator of page-locked memory rounds every tensor up to a power of two, and keeps what it has allocated:
    9 GB take 16. So memory of the usual allocator is locked instead.

    Args:
        size: [bytes] its length.
        locked: whether its pages are locked for copies from and to a GPU.

    Attributes:
        bytes: uint8 ``[size]``; use no view of it longer than this object, if it is locked.
        locked: whether its pages are locked.

    Raises:
        ResourceError: CUDA cannot lock the pages.
    """

    def __init__(self, size: int, *, locked: bool) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.locked = locked and size > 0
        if not self.locked:
            return
        try:
            register_memory(self.bytes)
        except torch.cuda.CudaError as error:
            raise ResourceError(
                f"CUDA cannot lock {size} bytes of host memory for offloaded parts: {error}; give the node more "
                "memory, or set trainer.offload=never"
            ) from error
        weakref.finalize(self, unregister_memory, self.bytes).atexit = False  # CUDA may have ended before


class Offload:
    """The parts of a role that are offloaded.

    The tensors of a part are looked up when it is offloaded, so the optimizer may be replaced in between. A storage
    that two parts share belongs to the first. The page-locked host memory of a part is kept for its next offload,
    since locking pages takes as long as the copies.
    """

    def __init__(self) -> None:
        self._offloaded: dict[str, Sleepable | list[tuple[torch.UntypedStorage, int, Tensor | None]]] = {}
        self._host: dict[str, HostBuffer] = {}

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that are offloaded."""
        return tuple(self._offloaded)

    def offload(
        self, parts: Mapping[str, Iterable[Tensor] | Sleepable], chosen: Sequence[str], discard: Sequence[str] = ()
    ) -> int:
        """Free the device memory of the ``chosen`` parts, and return how many bytes that were.

        Other processes can use the memory afterwards: torch's cache of freed memory is emptied too.

        Args:
            parts: all parts of the role, by name.
            chosen: names of the parts to offload; a part that is offloaded already counts 0 bytes.
            discard: names of parts whose values are not kept: they come back as zeros.

        Raises:
            ConfigError: the role has no such part; before anything is moved.
        """
        unknown = [part for part in chosen if part not in parts]
        if unknown:
            raise ConfigError(
                f"cannot offload {', '.join(map(repr, unknown))}: this role has {', '.join(parts) or 'no parts'}",
                key="parts",
                value=tuple(unknown),
            )
        visited: set[int] = set()
        freed = 0
        for part, content in parts.items():
            is_due = part in chosen and part not in self._offloaded
            if isinstance(content, Sleepable):
                if is_due:
                    self._offloaded[part] = content
                    freed += content.sleep()
                continue
            storages = list(_new_storages(content, visited))
            if is_due:
                sizes = [storage.nbytes() for storage in storages]
                copies = [None] * len(storages) if part in discard else self._copies(part, storages)
                self._offloaded[part] = list(zip(storages, sizes, copies, strict=True))
                freed += sum(sizes)
                for storage in storages:
                    storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return freed

    def _copies(self, part: str, storages: Sequence[torch.UntypedStorage]) -> list[Tensor | None]:
        """Copy the storages into the host memory of the part, and return the copies."""
        starts = [0, *itertools.accumulate(-(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT for storage in storages)]
        buffer = self._host.pop(part, None)
        if buffer is None or len(buffer.bytes) != starts[-1]:
            del buffer  # freed before the new one is allocated
            buffer = HostBuffer(starts[-1], locked=any(_bytes_of(storage).is_cuda for storage in storages))
        if buffer.locked:
            self._host[part] = buffer
        whole = buffer.bytes
        copies: list[Tensor | None] = []
        for start, storage in zip(starts, storages, strict=False):
            copy = whole[start : start + storage.nbytes()]
            copies.append(copy.copy_(_bytes_of(storage)))
        return copies

    def reload(self, parts: Sequence[str] | None = None, *, release: bool = False) -> None:
        """Bring parts back to the device. Parts that are not offloaded stay as they are.

        Args:
            parts: their names; None is all.
            release: free the host memory of all parts that are on the device then.
        """
        for part in self.parts if parts is None else parts:
            content = self._offloaded.pop(part, [])
            if isinstance(content, Sleepable):
                content.wake_up()
                continue
            for storage, size, copy in content:
                storage.resize_(size)
                on_device = _bytes_of(storage)
                if copy is None:
                    on_device.zero_()
                else:
                    on_device.copy_(copy, non_blocking=copy.is_pinned())
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        if release:
            self._host = {part: buffer for part, buffer in self._host.items() if part in self._offloaded}


def _new_storages(tensors: Iterable[Tensor], visited: set[int]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in visited:
            visited.add(storage._cdata)
            yield storage


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def model_tensors(chunks: Sequence[Any]) -> Iterator[Tensor]:
    """Iterate over the weights of model chunks, wrapped or not."""
    for chunk in chunks:
        yield from (param.data for param in unwrap_model(chunk).parameters())


def buffer_tensors(chunks: Sequence[Any]) -> Iterator[Tensor]:
    """Iterate over the tensors of model chunks that are not weights.

    These are the buffers, and the tensors that modules and the token dispatchers of experts keep as plain attributes,
    such as rotary frequencies and the routes of the last tokens.
    """
    for chunk in chunks:
        for module in unwrap_model(chunk).modules():
            yield from module.buffers(recurse=False)
            kept = list(vars(module).values())
            for dispatcher in [value for value in kept if isinstance(value, MoETokenDispatcher)]:
                kept += vars(dispatcher).values()
            yield from (value for value in kept if isinstance(value, Tensor))


def drop_cached_tables(chunks: Sequence[Any]) -> None:
    """Drop the tables of cosines and sines that rotary embeddings keep for past lengths; they are computed again."""
    for chunk in chunks:
        for module in unwrap_model(chunk).modules():
            if hasattr(type(module).forward, "cache_clear"):
                type(module).forward.cache_clear()


def drop_fp8_weights(chunks: Sequence[Any]) -> int:
    """Drop the FP8 copies of weights that Transformer Engine's modules keep between micro-batches; return their bytes.

    The next pass, which starts with a first micro-batch, makes them again.
    """
    before = torch.cuda.memory_allocated()
    for chunk in chunks:
        for module in unwrap_model(chunk).modules():
            getattr(module, "_fp8_workspaces", {}).clear()
    return before - torch.cuda.memory_allocated()


def gradient_tensors(chunks: Sequence[Any]) -> Iterator[Tensor]:
    """Iterate over the gradient buffers of chunks inside DistributedDataParallel."""
    for chunk in chunks:
        yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))


def optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Iterate over the moments and the float32 copies of weights of a (chained) optimizer.

    If it works on the weights themselves, they are among these.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.is_stub_optimizer:  # a rank without parameters of this kind
            continue
        for group in part.optimizer.param_groups:
            yield from (param.data for param in group["params"])
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
