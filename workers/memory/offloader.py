"""The device memory of a worker: parts that leave the device and come back, and what its calls use."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError, before_changes
from mcontroller.trace.recorder import MEMORY, recorder
from parallel_state.communicators import Communicators
from workers.train.state import TrainingState
from workers.weights.offload import (
    Offload,
    Sleepable,
    buffer_tensors,
    drop_cached_tables,
    drop_fp8_weights,
    gradient_tensors,
    model_tensors,
    optimizer_tensors,
)

COMMUNICATORS = "communicators"
"""Name of the buffers of NCCL among the offloaded parts."""
_GB = 2**30


class Offloader:
    """Moves parts of a worker to host memory, and brings back the parts that a method needs before it runs.

    Args:
        state: the models and the optimizer.
        needs: see ``ModelWorker.parts_needed``.

    Attributes:
        needs: by method, the parts that it computes with; a method without an entry gets all.
        offloaded: the parts that are in host memory now.
        contexts: the layouts whose communicators can be freed, in the same order on every rank.
        sleepers: by name, parts that free their memory themselves, such as an engine that generates.
        alone: names of parts that are offloaded before any method that computes with other parts only.
        takes_turns: whether the role shares its device in time: ``offload`` was called for a next method.
    """

    def __init__(self, state: TrainingState, needs: Mapping[str, tuple[str, ...]]) -> None:
        self._state = state
        self._memory_use = MemoryUse()
        self._has_no_model = False
        self.needs = dict(needs)
        self.offloaded = Offload()
        self.contexts = [state.context]
        self.sleepers: dict[str, Sleepable] = {}
        self.alone: set[str] = set()
        self.takes_turns = False

    def offload(
        self, parts: Sequence[str] | None = None, keep_for: str | None = None, communicators: bool = False
    ) -> int:
        """Move parts of this role from the device to host memory, and return the bytes of device memory freed.

        A method that needs a part brings it back first (see ``ModelWorker.parts_needed``), so no call fails because of
        it.

        Args:
            parts: of ``params``, ``reference`` (if there is one), ``grads`` and ``optimizer`` (if the model is
                trained), ``rollout`` (if it has a copy of the weights); None is all. Gradients are not kept, because
                every update clears them first. Nor are the weights of a rollout, which are updated before it generates.
            keep_for: a method that is called next; the parts that it needs are not moved.
            communicators: free the buffers of NCCL too. The next method that needs a part allocates them again.

        Raises:
            ConfigError: this role has no such part.
            ParallelStateError: ``communicators`` is set, and the installed NCCL cannot free its buffers.
        """
        available = self.parts()
        chosen = tuple(available) if parts is None else parts
        if keep_for is not None:
            self.takes_turns = True
            kept = self.needs.get(keep_for)
            chosen = () if kept is None else tuple(part for part in chosen if part not in kept)
        freed = 0
        for name, chunks in self._state.models.items():
            drop_cached_tables(chunks)
            if _part_of_model(name) in chosen:
                freed += drop_fp8_weights(chunks)
        if "grads" in chosen:
            self._state.gradients = None
        freed += self.offloaded.offload(available, chosen, discard=("grads",))
        if communicators:
            groups = [group for context in self.contexts for group in context.groups()]
            freed += self.offloaded.offload({COMMUNICATORS: Communicators(groups)}, (COMMUNICATORS,))
        return freed

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reload(self, parts: Sequence[str] | None = None) -> None:
        """Bring offloaded parts back before the call that needs them; None is all, and frees their host memory."""
        self.offloaded.reload(parts, release=parts is None)

    def take_memory_use(self) -> dict[str, dict[str, float]]:
        """Return the memory of this process by method, since the last call of this one: see ``MemoryUse.take``."""
        return self._memory_use.take()

    def serves_engine(self) -> None:
        """Reject methods that need a model from now on: the engine has the weights."""
        self._has_no_model = True
        self.needs |= dict.fromkeys(("receive_weights", "weight_fingerprints"), ("rollout",))

    def parts(self) -> dict[str, Iterable[Tensor] | Sleepable]:
        """Return the parts that can be offloaded, by name. Memory that two of them share belongs to the first."""
        state, parts = self._state, dict[str, Iterable[Tensor] | Sleepable]()
        for name, chunks in state.models.items():
            copies = [value for chunk in state.float32.get(name, ()) for value in chunk.values()]
            tensors = itertools.chain(model_tensors(chunks), buffer_tensors(chunks), copies)
            parts[_part_of_model(name)] = tensors
        if state.optimizer is not None:
            parts |= {"grads": gradient_tensors(state.model), "optimizer": optimizer_tensors(state.optimizer)}
        return parts | self.sleepers

    @contextlib.contextmanager
    def during(self, method: str) -> Iterator[None]:
        """Bring back the parts that a method needs, and measure the memory of the block as the memory of its call.

        Raises:
            ConfigError: the method needs parts, and no model has been built.
        """
        measured = contextlib.nullcontext() if self.needs.get(method) == () else self._memory_use.of(method)
        with measured:
            self.reload_for(method)
            yield

    def reload_for(self, method: str) -> None:
        """Bring back the parts that ``method`` needs.

        Raises:
            ConfigError: the method needs parts, and no model has been built.
        """
        needed = self.needs.get(method)
        if needed and "rollout" not in needed and self._has_no_model:
            with before_changes():
                text = f"{method} needs a model, and a worker that only serves an engine has none"
                raise ConfigError(text, key="role", value="rollout")
        if needed and not self.parts():
            with before_changes():
                raise ConfigError(f"{method} was called before init_model: there is no model yet", key="init_model")
        leaving = self.alone.difference(needed) if needed else ()
        if leaving:
            self.offloaded.offload(self.parts(), tuple(leaving))
        self.offloaded.reload((COMMUNICATORS, *needed) if needed else needed)


def _part_of_model(name: str) -> str:
    return "params" if name == "model" else name


class MemoryUse:
    """The most memory that this process used during the calls of each method."""

    def __init__(self) -> None:
        self._by_method: dict[str, dict[str, float]] = {}

    @contextlib.contextmanager
    def of(self, method: str) -> Iterator[None]:
        """Measure the block as a call of ``method``. It resets torch's peak of the allocated memory."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        try:
            yield
        finally:
            past, used = self._by_method.setdefault(method, {}), _now()
            for name, value in used.items():
                past[name] = max(value, past.get(name, 0.0))
            if (trace := recorder()) is not None:
                most = used.get("max_allocated_gb", used.get("resident_gb", 0.0))
                trace.add(MEMORY, at := time.monotonic_ns(), at, round(most * _GB / 1e6))

    def take(self) -> dict[str, dict[str, float]]:
        """Return the measured values by method, and forget them.

        Returns:
            On a GPU ``allocated_gb`` and ``reserved_gb`` at the end of a call, and ``max_allocated_gb``, the peak
            during it; on a CPU ``resident_gb`` at the end of a call. The most over the calls of the method, in units of
            2**30 bytes. Roles that are fused in one process share its memory, so each reports the sum.
        """
        metrics, self._by_method = self._by_method, {}
        return metrics


def _now() -> dict[str, float]:
    if not torch.cuda.is_available():
        return {"resident_gb": _resident_bytes() / _GB}
    return {
        "allocated_gb": torch.cuda.memory_allocated() / _GB,
        "max_allocated_gb": torch.cuda.max_memory_allocated() / _GB,
        "reserved_gb": torch.cuda.memory_reserved() / _GB,
    }


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
