"""Weights are sent before a generation if the policy has changed, or if the rollout has lost them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.config import TrainerConfig
from trainer.rollout.generation import RolloutWeights


class Engine:
    """A rollout that may lose its weights."""

    has = True

    def has_weights(self) -> bool:
        return self.has


def sending(*, shared: bool) -> tuple[RolloutWeights, Any, list[int]]:
    """Weights from an actor to a rollout, the rollout, and what is appended to with every transfer."""
    sent: list[int] = []
    report = SimpleNamespace(policy_version=0, metrics=lambda: {})
    transfer = SimpleNamespace(run=lambda: sent.append(1) or report)
    actor_cls = SimpleNamespace(open_transfer=lambda *_, **__: transfer)
    rollout: Any = Engine()
    stages: Any = lambda name, method=None: nullcontext()  # noqa: E731
    stages.devices = SimpleNamespace(are_shared=lambda group: shared)
    weights = RolloutWeights(stages, TrainerConfig())
    weights.connect(SimpleNamespace(worker_cls=actor_cls, send_weights=None), rollout)  # type: ignore[arg-type]
    return weights, rollout, sent


@pytest.mark.parametrize(("shared", "again"), [(True, 1), (False, 0)])
def test_weights_are_sent_again_if_an_engine_has_lost_them(shared: bool, again: int) -> None:
    weights, rollout, sent = sending(shared=shared)
    for _ in range(2):
        weights.update()
    assert len(sent) == 1
    rollout.has = False
    weights.update()
    assert len(sent) == 1 + again
    weights.changed()
    weights.update()
    assert len(sent) == 2 + again
