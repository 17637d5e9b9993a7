"""The weights of a rollout group of its own, which are those of the actor before every generation."""

from __future__ import annotations

from typing import Any

from mcontroller.dispatch.future import Future
from mcontroller.errors import ConfigError
from mcontroller.group import WorkerGroup
from mcontroller.ppo.config import PPOConfig, TrainerConfig
from mcontroller.ppo.stages.stages import Stages
from mcontroller.ray.resource_pool import ResourcePoolManager, Role

__all__ = ["RolloutWeights", "check_colocated", "check_transfer"]


class RolloutWeights:
    """Sends the weights of the actor to the group that generates, if they have changed since the last time.

    The worker class of the actor has the class method ``transfer_weights(source, target, transport, timeout)``, which
    returns the transfer, such as ``workers.weights.transfer.weight_transfer.WeightTransfer``: ``run()`` sends the
    current weights and returns a report with ``metrics()``, the numbers to log, and ``policy_version``, the version of
    the policy that was sent; ``close()`` ends the connections. Without a group that only generates, nothing is sent.

    Args:
        stages: the stage ``weights`` gets the seconds.
        config: has the name of the transport, and the seconds after which a transfer fails.
    """

    def __init__(self, stages: Stages, config: TrainerConfig) -> None:
        self._stages = stages
        self._options = {"transport": config.weight_transport, "timeout": config.weight_timeout}
        self._groups: tuple[WorkerGroup[Any], WorkerGroup[Any]] | None = None
        self._transfer: Any = None
        self._stale = True
        self._metrics: dict[str, float] = {}
        self._report: Any = None
        self._generating: Future[Any] | None = None

    def connect(self, actor: WorkerGroup[Any], rollout: WorkerGroup[Any]) -> None:
        """Send from ``actor`` to ``rollout`` from now on; do nothing if they are the same group."""
        self._transfer = self._generating = None
        if rollout is not actor:
            self._groups, self._stale = (actor, rollout), True

    @property
    def sends(self) -> bool:
        """Whether a group of its own generates."""
        return self._groups is not None

    def changed(self) -> None:
        """Send the weights before the next generation: the policy has changed."""
        self._stale = True

    def wait_for(self, generating: Future[Any]) -> None:
        """Do not send weights before this generation has ended."""
        self._generating = generating

    @property
    def version(self) -> int:
        """The version of the policy that was sent last."""
        return int(self._report.policy_version)

    def update(self) -> None:
        """Send the weights now, if the policy has changed; first wait for the generation in flight.

        Raises:
            GroupError: the generation failed.
        """
        if self._groups is None or not self._stale:
            return
        if self._generating is not None:
            with self._stages("generate"):
                self._generating.check()
            self._generating = None
        actor, rollout = self._groups
        with self._stages("weights", actor.send_weights):
            if self._transfer is None:
                self._transfer = actor.worker_cls.transfer_weights(actor, rollout, **self._options)
            self._report = self._transfer.run()
            self._metrics = self._report.metrics()
        self._stale = False

    def take_metrics(self) -> dict[str, float]:
        """Return what the last transfer cost, once."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def close(self) -> None:
        """End the connections between the groups."""
        if self._transfer is not None:
            self._transfer.close()


def check_transfer(config: PPOConfig, actor: Any, rollout: Any) -> None:
    """Raise ConfigError if the weights of the actor cannot become those of the rollout.

    Args:
        config: the configuration of the run.
        actor: the worker class of the actor.
        rollout: the worker class of the rollout.
    """
    if not hasattr(actor, "transfer_weights"):
        raise ConfigError(
            f"{actor.__name__} has no class method transfer_weights, which Role.Actor and Role.Rollout need: derive it "
            "from workers.ActorRolloutRefWorker, or map Role.ActorRollout",
            key="role_worker_mapping",
            value=actor.__name__,
        )
    if config.rollout is not None:
        actor.check_transfer(config.actor_rollout_ref, config.rollout, config.trainer.weight_transport)


def check_colocated(pools: ResourcePoolManager, actor: Role, rollout: Role) -> None:
    """Raise ConfigError if actor and rollout share GPUs of several nodes, between which no transport carries weights.

    Args:
        pools: the pools of the run.
        actor: the role that weights come from.
        rollout: the role that weights go to.
    """
    pool = pools.mapping.get(rollout)
    nodes = len(pools.resource_pool_spec.get(pool or "", ()))
    if pools.use_gpu and nodes > 1 and pool == pools.mapping.get(actor):
        raise ConfigError(
            f"{actor} and {rollout} share the GPUs of pool {pool!r} on {nodes} nodes, and weights travel between "
            f"groups that share GPUs within one node only: give {rollout} a pool of its own (pools.rollout), let the "
            "processes of the actor generate (Role.ActorRollout; in a file, no section rollout), or use one node",
            key="role_worker_mapping",
            value=pool,
        )
