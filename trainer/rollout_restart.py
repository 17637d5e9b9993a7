"""A rollout group that died, started again while the other groups of a trainer go on."""

from __future__ import annotations

from mcontroller.errors import ConfigError
from trainer.loop import RayPPOTrainer
from trainer.roles import Role


def restart_rollout(trainer: RayPPOTrainer) -> None:
    """Restart the group of ``Role.Rollout``, with the weights of the actor.

    Call it after a step has raised an error of that group, such as an engine that died; the groups of the other roles
    go on as they are. Batches in flight are generated again with the newest weights. The batch that the step has failed
    on is not: pass its problems to ``train_step`` again, or go on with ``fit``, which draws the next. The group
    draws samples with the seeds of a new run.

    Args:
        trainer: after ``init_workers``.

    Raises:
        ConfigError: actor and rollout are one group.
        GroupError: the new group does not start, or does not get the weights.
    """
    worker = next((each for each in trainer.run_groups.workers if each.role is Role.Rollout), None)
    if worker is None:
        raise ConfigError(
            "restart_rollout needs a group for Role.Rollout alone: the actor's processes generate. Start the program "
            "again with trainer.resume=true",
            key="role_worker_mapping",
            value=trainer.role_worker_mapping,
        )
    step, groups = trainer.step, trainer.run_groups
    step.weights.close()
    groups.restart([worker.name])
    step.weights.connect(groups.actor, groups.rollout)
    step.generations.restart(groups.rollout)
