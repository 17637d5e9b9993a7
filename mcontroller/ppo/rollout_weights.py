"""The weights of a rollout group of its own, which are those of the actor before every generation; and its restart."""

from __future__ import annotations

from typing import Any, Protocol

from mcontroller.data.protocol import DataProto
from mcontroller.group import WorkerGroup
from mcontroller.ppo.config import TrainerConfig
from mcontroller.ppo.stages import Stages

__all__ = ["RolloutWeights"]


class SentReport(Protocol):
    """What one transfer cost."""

    @property
    def policy_version(self) -> int:
        """The version of the policy that was sent; read with ``trainer.max_staleness=1`` only."""
        ...

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
        config: has the name of the transport, and the seconds after which a transfer fails.
    """

    def __init__(self, stages: Stages, config: TrainerConfig) -> None:
        self._stages = stages
        self._options = {"transport": config.weight_transport, "timeout": config.weight_timeout}
        self._groups: tuple[WorkerGroup[Any], WorkerGroup[Any]] | None = None
        self._transfer: SentWeights | None = None
        self._stale = True
        self._metrics: dict[str, float] = {}
        self._report: SentReport | None = None
        self._generating: DataProto | None = None

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

    def wait_for(self, generating: DataProto) -> None:
        """Do not send weights before this generation has ended."""
        self._generating = generating

    @property
    def version(self) -> int:
        """The version of the policy that was sent last."""
        assert self._report is not None
        return self._report.policy_version

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
