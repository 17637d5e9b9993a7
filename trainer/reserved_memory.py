"""The memory of shared GPUs that an engine of vLLM leaves to other roles if no role hands over its own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from mcontroller.ray.class_with_init import RayClassWithInitArgs
from mcontroller.ray.resource_pool import ResourcePoolManager
from trainer.roles import CONFIG_KEYS, GroupSpec
from workers.config import ActorConfig, CriticConfig, RewardConfig
from workers.generate.vllm.gpu_memory import CUDA_CONTEXT_BYTES
from workers.memory.nccl import nccl_bytes
from workers.role_calls import Lengths, calls_of_roles, estimates
from workers.verify.roles import ModelRole

logger = logging.getLogger(__name__)


def reserved_for_others(specs: Sequence[GroupSpec], pools: ResourcePoolManager, offload: str) -> list[GroupSpec]:
    """Return the groups, with ``rollout.vllm.reserved_bytes`` of the group that generates.

    A process keeps the memory of its largest call, since torch caches what it frees. Nothing is reserved if groups hand
    over memory, or the configuration sets the field.

    Args:
        specs: the groups of a run.
        pools: the pools, and the pool of each role.
        offload: ``trainer.offload``.
    """
    generating = next((spec for spec in specs if spec.name == "rollout"), specs[0])
    config = generating.config
    if offload != "never" or not pools.use_gpu or not isinstance(config, ActorConfig):
        return list(specs)
    if config.rollout.engine != "vllm" or config.rollout.vllm.reserved_bytes:
        return list(specs)
    pool = pools.mapping[generating.role]
    others = [spec for spec in specs if spec is not generating and pools.mapping[spec.role] == pool]
    reserved = sum(_largest_call(spec, sum(pools.resource_pool_spec[pool]), config) for spec in others)
    vllm = dataclasses.replace(config.rollout.vllm, reserved_bytes=reserved)
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, vllm=vllm))
    arguments = {**generating.init.kwargs, "config": config}
    init = RayClassWithInitArgs(generating.init.cls, **arguments)
    init.imports = generating.init.imports
    changed = dataclasses.replace(generating, init=init)
    return [changed if spec is generating else spec for spec in specs]


def _largest_call(spec: GroupSpec, world_size: int, generating: ActorConfig) -> int:
    """The memory of a group's processes on a GPU at the peak of their largest call; 0 if it cannot be estimated."""
    key, config, rollout = CONFIG_KEYS[spec.role], spec.config, generating.rollout
    if not isinstance(config, ActorConfig | CriticConfig | RewardConfig):
        return 0
    role = ModelRole.of(spec.init.cls, config, str(spec.init.kwargs.get("role", "")), world_size)
    lengths = Lengths(rollout.prompt_length, rollout.response_length, rollout.max_rows)
    outcomes = estimates(calls_of_roles({key: role}, lengths))
    for name, outcome in outcomes.items():
        if outcome.failure:
            logger.warning("no memory is kept free for %s next to vLLM's engine: %s", name, outcome.failure)
    sharded = bool(role.updates) and role.variant.distributed_optimizer
    nccl = nccl_bytes(role.variant.layout, experts=config.model.num_moe_experts is not None, sharded=sharded)
    return CUDA_CONTEXT_BYTES + nccl + max(outcome.peak for outcome in outcomes.values())
