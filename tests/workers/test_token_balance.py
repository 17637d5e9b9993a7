"""Runs whose calls split rows by tokens train the same weights as runs that split them in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.testing import simulated_worker_group
from tests.workers.off_policy.runs import SGD, Lines, trainer_of
from trainer import Role
from workers.actor import ActorRolloutRefWorker

SETTINGS: dict[str, Any] = {"ppo_mini_batch_size": 12, "ppo_epochs": 2, "shuffle": True}
GENTLE = SGD | {"lr": 0.1}


class Recording(ActorRolloutRefWorker):
    """Counts the tokens that it trains on, and returns its weights."""

    tokens: tuple[int, ...] = ()

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, padding="zero_loss")
    def update_actor(self, data: DataProto) -> DataProto:
        columns = data.tensors()
        kept = columns["attention_mask"].sum(1) * (columns["response_mask"].sum(1) > 0)
        self.tokens = (*self.tokens, int(kept.sum()))
        return super().update_actor(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def trained(self) -> tuple[tuple[int, ...], dict[str, torch.Tensor]]:
        return self.tokens, {name: value.detach().clone() for name, value in self.model[0].named_parameters()}


def run(balance: bool, share: bool) -> tuple[list[tuple[int, ...]], dict[str, torch.Tensor], Lines]:
    """Return the tokens of each rank by update, the weights, and the metrics."""
    lines = Lines()

    def groups(pool: Any, init: Any, name_prefix: str) -> Any:
        return simulated_worker_group(init, 2, name=name_prefix)

    roles = {Role.ActorRollout: Recording}
    settings = SETTINGS | {"share_prompts": share}
    trainer = trainer_of(
        groups, 0, 1, {}, optim=GENTLE, roles=roles, settings=settings, trackers=[lines], balance_tokens=balance
    )
    with trainer:
        trainer.init_workers()
        trainer.fit()
        every = trainer.actor.trained()
    return [tokens for tokens, _ in every], every[0][1], lines


@pytest.mark.parametrize("share", [False, True])
def test_calls_split_by_tokens_train_the_same_weights(share: bool) -> None:
    in_order, expected, lines = run(balance=False, share=share)
    balanced, actual, its_lines = run(balance=True, share=share)
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, rtol=0, atol=2e-6)
    assert its_lines.steps[1]["actor/pg_loss"] == pytest.approx(lines.steps[1]["actor/pg_loss"], abs=1e-6)
    gaps = [sum(abs(first - second) for first, second in zip(*ranks, strict=True)) for ranks in (in_order, balanced)]
    assert gaps[1] < gaps[0]
