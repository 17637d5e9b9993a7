"""The weights of a rollout group of its own, which are those of the actor before every generation."""

from __future__ import annotations

from typing import Any, Protocol

from mcontroller.errors import ConfigError
from mcontroller.group import WorkerGroup
from mcontroller.ppo.config import PPOConfig
from mcontroller.ppo.stages.stages import Stages

__all__ = ["RolloutWeights", "check_transfer"]


class SentReport(Protocol):
    """What one transfer cost."""

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log."""
        ...


class SentWeights(Protocol):
    """A transfer of weights between two groups, such as ``workers.weights.transfer.weight_transfer.WeightTransfer``."""

    def run(self) -> SentReport:
        """Send the current weights."""
        ...

    def close(self) -> None:
        """End the connections."""
        ...


class RolloutWeights:
    """Sends the weights of the actor to the group that generates, if they have changed since the last time.

    The worker class of the actor has the class method ``transfer_weights(source, target, transport, timeout)``, which
    returns the transfer. Without a group that only generates, nothing is sent.

    Args:
        stages: the stage ``weights`` gets the seconds.
        transport: the name of the transport.
        timeout: seconds after which a transfer fails.
    """

    def __init__(self, stages: Stages, transport: str, timeout: float) -> None:
        self._stages = stages
        self._options = {"transport": transport, "timeout": timeout}
        self._groups: tuple[WorkerGroup[Any], WorkerGroup[Any]] | None = None
        self._transfer: SentWeights | None = None
        self._stale = True
        self._metrics: dict[str, float] = {}

    def connect(self, actor: WorkerGroup[Any], rollout: WorkerGroup[Any]) -> None:
        """Send from ``actor`` to ``rollout`` from now on; do nothing if they are the same group."""
        if rollout is not actor:
            self._groups, self._stale = (actor, rollout), True

    def changed(self) -> None:
        """Send the weights before the next generation: the policy has changed."""
        self._stale = True

    def update(self) -> None:
        """Send the weights now, if the policy has changed."""
        if self._groups is None or not self._stale:
            return
        actor, rollout = self._groups
        with self._stages("weights", actor.send_weights):
            if self._transfer is None:
                self._transfer = actor.worker_cls.transfer_weights(actor, rollout, **self._options)
            self._metrics = self._transfer.run().metrics()
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
