"""Rollout engines by name: what ``rollout.engine`` chooses.

To add one, register it in a module that the module of your worker imports, or that ``imports`` of a run names::

    from workers import ROLLOUT_ENGINES, RolloutEngine

    ROLLOUT_ENGINES.add("mine", RolloutEngine(check=check_mine, build=lambda worker: MyRollout(worker.config)))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mcontroller.config.registry import Registry
from workers.config import ActorConfig
from workers.config.fit import check_generation
from workers.generate.megatron_rollout import MegatronRollout
from workers.generate.rollout_protocol import Rollout
from workers.generate.vllm.checks import check_vllm
from workers.generate.vllm.gpu_memory import bytes_of_first_step
from workers.generate.vllm.placement import EnginePlacement, place_engines
from workers.generate.vllm.start import vllm_rollout
from workers.memory.nccl import nccl_bytes

ROLLOUT_ENGINES: Registry[RolloutEngine] = Registry("rollout engine", key="rollout.engine")
"""Every registered engine by its name."""


@dataclass(frozen=True)
class RolloutEngine:
    """An entry of the registry: how the rollout of an engine is checked and built.

    Attributes:
        check: raises ConfigError, with the key of the field, for what the engine cannot run. It is called in the
            controller before any process starts, and again on every rank.
        build: returns the rollout of a rank, for its ``ActorRolloutRefWorker``; called on every rank when the model is
            built.
        in_worker: whether it generates with Megatron's layers in the worker's process, whose memory
            ``mcontroller check`` estimates. A group that only generates, with another engine, builds no model.
        records_experts: whether it returns the experts of tokens (``Generated.routed_experts``) if
            ``router_replay=rollout``, which is rejected otherwise.
        place: returns the ranks whose GPUs its engines use, from the nodes of the ranks, for ``mcontroller check``.
            None: every rank generates.
    """

    check: Callable[[ActorConfig], None]
    build: Callable[[Any], Rollout]
    in_worker: bool = False
    records_experts: bool = False
    place: Callable[[ActorConfig, Sequence[str]], list[EnginePlacement]] | None = None


ROLLOUT_ENGINES.add(
    "megatron",
    RolloutEngine(
        check=lambda config: check_generation(config.parallel),
        build=lambda worker: MegatronRollout(worker.config, worker.model, worker.context),
        in_worker=True,
        records_experts=True,
    ),
)


def _build_vllm(worker: Any) -> Rollout:
    state, offloader, layout, due = worker.state, worker.offloader, worker.context.layout, 0
    if offloader.takes_turns:  # the engine starts beside what is on the device when it generates
        offloader.offload(keep_for="generate_sequences")
    if state.models:
        sharded = state.optimizer is not None and worker.config.optim.distributed_optimizer
        due = nccl_bytes(layout, experts=worker.config.model.num_moe_experts is not None, sharded=bool(sharded))
        due += 0 if offloader.takes_turns else bytes_of_first_step(state.optimizer)
    return vllm_rollout(worker.config, worker.context, due, beside_policy=bool(state.models))


def _place_vllm(config: ActorConfig, nodes: Sequence[str]) -> list[EnginePlacement]:
    return place_engines(nodes, config.rollout.vllm.tp)


ROLLOUT_ENGINES.add("vllm", RolloutEngine(check_vllm, _build_vllm, records_experts=True, place=_place_vllm))
