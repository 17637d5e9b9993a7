"""Rollout engines by name: what ``rollout.engine`` chooses.

To add one, register it in a module that the module of your worker imports::

    from workers import ROLLOUT_ENGINES, RolloutEngine

    ROLLOUT_ENGINES.add("mine", RolloutEngine(check=check_mine, build=lambda worker: MyRollout(worker.config)))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from mcontroller.config.registry import Registry
from workers.config import ActorConfig
from workers.config.fit import check_generation
from workers.generate.rollout_protocol import Rollout
from workers.generate.vllm.checks import check_vllm
from workers.generate.vllm.rollout import vllm_rollout

__all__ = ["ROLLOUT_ENGINES", "RolloutEngine"]


@dataclass(frozen=True)
class RolloutEngine:
    """An engine that generates.

    Attributes:
        check: raises ConfigError, with the key of the field, for what the engine cannot run. It is called in the
            controller before any process starts, and again on every rank.
        build: returns the rollout of a rank, for its ``ActorRolloutRefWorker``; called on every rank when the model is
            built.
        in_worker: whether it generates with Megatron's layers in the worker's process, whose memory
            ``mcontroller check`` estimates.
        records_experts: whether it returns the experts of tokens (``Generated.routed_experts``) if
            ``router_replay=rollout``, which is rejected otherwise.
    """

    check: Callable[[ActorConfig], None]
    build: Callable[[Any], Rollout]
    in_worker: bool = False
    records_experts: bool = False


ROLLOUT_ENGINES: Registry[RolloutEngine] = Registry("rollout engine", key="rollout.engine")
"""Every registered engine by its name."""


def _check_megatron(config: ActorConfig) -> None:
    if config.rollout.parallel is None:
        check_generation(config.parallel, "parallel")


ROLLOUT_ENGINES.add(
    "megatron",
    RolloutEngine(_check_megatron, methodcaller("build_megatron_rollout"), in_worker=True, records_experts=True),
)
ROLLOUT_ENGINES.add("vllm", RolloutEngine(check_vllm, lambda worker: vllm_rollout(worker.config, worker.context)))
