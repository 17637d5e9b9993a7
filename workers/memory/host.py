"""Host memory of the process of one rank: offloaded parts of a role, and saves of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from workers.config import ActorConfig, CriticConfig, RewardConfig
from workers.memory.estimate import PlannedRole

__all__ = ["HostMemory", "host_memory"]

_GATHERED = 20
"""[bytes] For each weight of a rank, at a save for any layout: three values in float32, and one twice on its way."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory of a rank on the stage that needs the most.

    Attributes:
        offloaded: weights and optimizer while other roles use the GPU; page-locked.
        saved: the rank's part of a checkpoint, copied from the GPU and again for the process that writes it.
        gathered: what a save for any layout needs in addition, of a distributed optimizer.
    """

    offloaded: int
    saved: int
    gathered: int


def host_memory(
    config: ActorConfig | CriticConfig | RewardConfig, world_size: int, *, trained: bool, models: int
) -> HostMemory:
    """Return the host memory of the process of a rank.

    Args:
        config: of the role.
        world_size: number of ranks.
        trained: whether it has an optimizer, and is saved.
        models: copies of the weights: 2 for an actor with its reference.

    Raises:
        LayoutError: the axes do not divide the world size.
        ConfigError: the memory of the model or the optimizer cannot be estimated.
    """
    optim = config.optim if trained and not isinstance(config, RewardConfig) else None
    value_head = not isinstance(config, ActorConfig)
    role = PlannedRole(config.model, config.parallel, world_size, optim, value_head=value_head)
    idle = max((role.idle(stage) for stage in range(config.parallel.pp)), key=lambda memory: memory.total)
    replicas = role.layout.dp * role.layout.cp
    sharded = role.optim is not None and role.optim.distributed_optimizer
    weights = models * idle.parameters
    part = weights // replicas + (idle.optimizer if sharded else idle.optimizer // replicas)
    return HostMemory(
        offloaded=weights + idle.optimizer,
        saved=2 * part if trained else 0,
        gathered=_GATHERED * idle.parameters // role.size if sharded and replicas > 1 else 0,
    )
