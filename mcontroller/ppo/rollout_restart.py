"""Start the group that generates again after it has failed, without touching the others."""

from __future__ import annotations

from mcontroller.errors import ConfigError
from mcontroller.ppo.roles import Role
from mcontroller.ppo.trainer import RayPPOTrainer

__all__ = ["restart_rollout"]


def restart_rollout(trainer: RayPPOTrainer) -> None:
    """Replace the group of ``Role.Rollout`` by a new one in its pool, with the weights of the actor.

    Call it after a step has raised an error of that group, such as an engine that died; the groups of the other roles
    go on as they are. Batches in flight are generated again with the newest weights. The batch that the step has failed
    on is not: pass its problems to ``train_step`` again, or go on with ``fit``, which draws the next. The new group
    draws samples with the seeds of a new run.

    Args:
        trainer: after ``init_workers``.

    Raises:
        ConfigError: actor and rollout are one group.
        GroupError: the new group does not start, or does not get the weights.
    """
    worker = next((each for each in trainer.role_workers if each.role is Role.Rollout), None)
    if worker is None:
        raise ConfigError(
            "restart_rollout needs a group for Role.Rollout alone: the actor's processes generate. Start the program "
            "again with trainer.resume=true",
            key="role_worker_mapping",
            value=trainer.role_worker_mapping,
        )
    trainer.rollout_weights.close()
    trainer.groups[worker.name].shutdown()
    pool = trainer.resource_pool_manager.get_resource_pool(worker.role)
    trainer.rollout = trainer.groups[worker.name] = trainer.start_group(worker, pool)
    with trainer.stages("start", trainer.rollout.init_model):
        trainer.rollout.init_model()
    trainer.rollout_weights.connect(trainer.actor, trainer.rollout)
    trainer.generations.restart(trainer.rollout)
