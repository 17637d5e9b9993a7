"""The state that the components of a worker share, which its checkpoints contain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from parallel_state.errors import ParallelStateError
from parallel_state.megatron import MegatronContext


@dataclass
class TrainingState:
    """The models of a worker on this rank, and what trains them: shared by its components, and saved in a checkpoint.

    Attributes:
        context: the layout of this rank.
        models: by part ("model", "reference"), the model chunks of this rank; inside DistributedDataParallel if they
            are trained. Empty until they are built.
        optimizer: of the part "model"; None if it is not trained. Saved only if it has made a step.
        scheduler: the learning-rate schedule of the optimizer.
        counters: go into the manifest: ``phase``, the phase of training that the optimizer belongs to; ``updates``, the
            calls that trained the model; ``optimizer_steps``, the steps of this optimizer; ``ended_phases``, joined by
            commas, the phases whose optimizer has made steps and was replaced.
        float32: by part, for every chunk, copies in float32 of weights by name, which a checkpoint contains instead.
        received_version: the version of the policy that another group sent; None if it sent none. Not saved.
        weights_version: a number that changes whenever the weights may have changed. Not saved.
        base: what the adapters of the part "model" belong to, for the manifest; None if it has none.
        gradients: the ``Gradients`` that ``optim_step`` applies; None if there are none. Not saved.
        unsaved: the parts that never change and are built the same again; a checkpoint does not contain them.
    """

    context: MegatronContext
    models: dict[str, list[Any]] = field(default_factory=dict)
    optimizer: MegatronOptimizer | None = None
    scheduler: OptimizerParamScheduler | None = None
    counters: dict[str, Any] = field(default_factory=lambda: {"phase": "", "updates": 0, "optimizer_steps": 0})
    float32: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)
    weights_version: int = 0
    received_version: int | None = None
    base: dict[str, Any] | None = None
    gradients: Any = None
    unsaved: frozenset[str] = frozenset()

    @property
    def saved_models(self) -> dict[str, list[Any]]:
        """The model chunks of this rank that a checkpoint contains, by part."""
        return {part: chunks for part, chunks in self.models.items() if part not in self.unsaved}

    @property
    def model(self) -> list[Any]:
        """The chunks of the part "model"; none before they are built."""
        return self.models.get("model", [])

    @property
    def policy_version(self) -> int:
        """The version of the policy: the number of calls that trained it, on this worker or on its sender."""
        return self.counters["updates"] if self.received_version is None else self.received_version

    def check_context(self) -> None:
        """Raise unless Megatron's globals belong to this worker.

        Raises:
            ParallelStateError: the caller is outside the worker's context.
        """
        if not self.context.is_active:
            raise ParallelStateError(
                "a method of a worker was called outside its Megatron context: call it through a group, or inside "
                "`with worker.call_context(method):`"
            )


def random_state() -> dict[str, Any]:
    """Return the random state of this rank."""
    return {
        "host": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the random state of this rank, to one of ``random_state``.

    The generators of a CPU and of a GPU have states of different lengths: from a checkpoint of the other kind of
    device, only the state of the host is restored.
    """
    torch.set_rng_state(state["host"])
    if state["device"].shape != torch.cuda.get_rng_state().shape:
        return
    torch.cuda.set_rng_state(state["device"])
    tracker = get_cuda_rng_tracker()
    tracker.set_states({**tracker.get_states(), **state["tracker"]})
