"""Weights, gradients and optimizer state of a role leave the device and come back, so that roles take turns on it.

What is offloaded is the memory under the tensors and not the tensors: each keeps its place, and so do all views of it
that Megatron holds (gradient buffers, buckets, the distributed optimizer's shards). While it is away the memory is
empty, and nothing may touch it: ``Offload.reload`` comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcontroller.errors import ConfigError

__all__ = ["Offload", "Sleeper", "gradient_tensors", "model_tensors", "optimizer_tensors"]


@runtime_checkable
class Sleeper(Protocol):
    """A part of a role that frees its device memory itself."""

    def sleep(self) -> int:
        """How many bytes it has freed."""
        ...

    def wake_up(self) -> None: ...


class Offload:
    """What of a role is in host memory, part by part.

    A part's tensors are looked up when it goes, so that an optimizer may be replaced in between. Memory that two parts
    share belongs to the first.
    """

    def __init__(self) -> None:
        self._away: dict[str, Sleeper | list[tuple[torch.UntypedStorage, int, Tensor | None]]] = {}

    @property
    def away(self) -> tuple[str, ...]:
        """The parts that are offloaded."""
        return tuple(self._away)

    def offload(
        self, parts: Mapping[str, Iterable[Tensor] | Sleeper], chosen: Sequence[str], discard: Sequence[str] = ()
    ) -> int:
        """Free the device memory of the ``chosen`` of ``parts``: how many bytes; 0 for those that are away already.

        Args:
            discard: parts whose numbers are not kept: they come back as zeros.

        Raises:
            ConfigError: a chosen part that the role does not have; before anything is moved.
        """
        unknown = [part for part in chosen if part not in parts]
        if unknown:
            raise ConfigError(
                f"cannot offload {', '.join(map(repr, unknown))}: this role has {', '.join(parts) or 'no parts'}",
                key="parts",
                value=tuple(unknown),
            )
        seen: set[int] = set()
        freed = 0
        for part, held in parts.items():
            goes = part in chosen and part not in self._away
            if isinstance(held, Sleeper):
                if goes:
                    self._away[part] = held
                    freed += held.sleep()
                continue
            storages = list(_new_storages(held, seen))
            if goes:
                emptied = self._away[part] = [_emptied(storage, part not in discard) for storage in storages]
                freed += sum(size for _, size, _ in emptied)
        if freed and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return freed

    def reload(self, parts: Sequence[str] | None = None) -> None:
        """Bring these parts back, or all that are away; those that are not away stay as they are."""
        for part in self.away if parts is None else parts:
            away = self._away.pop(part, [])
            if isinstance(away, Sleeper):
                away.wake_up()
                continue
            for storage, size, held in away:
                storage.resize_(size)
                back = _bytes_of(storage)
                if held is None:
                    back.zero_()
                else:
                    back.copy_(held, non_blocking=held.is_pinned())
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


def _new_storages(tensors: Iterable[Tensor], seen: set[int]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _emptied(storage: torch.UntypedStorage, keep: bool) -> tuple[torch.UntypedStorage, int, Tensor | None]:
    size = storage.nbytes()
    held = None
    if keep:
        held = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=storage.device.type == "cuda")
        held.copy_(_bytes_of(storage))
    storage.resize_(0)
    return storage, size, held


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def model_tensors(chunks: Sequence[Any]) -> Iterator[Tensor]:
    """The weights of model chunks, wrapped or not."""
    for chunk in chunks:
        yield from (param.data for param in unwrap_model(chunk).parameters())


def gradient_tensors(chunks: Sequence[Any]) -> Iterator[Tensor]:
    """The gradient buffers of chunks inside DistributedDataParallel."""
    for chunk in chunks:
        yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))


def optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """The moments, and the float32 copies of weights, that a (chained) optimizer keeps.

    Where it works on the weights themselves, they are among these.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.is_stub_optimizer:  # a rank without parameters of this kind
            continue
        for group in part.optimizer.param_groups:
            yield from (param.data for param in group["params"])
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
