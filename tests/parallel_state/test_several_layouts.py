"""Roles with different layouts take training steps in the same processes, with the results of separate processes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from tests.ranks import run_ranks
from tests.training import SMALL_GPT, Role, largest_difference
from workers.config import ModelConfig, ParallelConfig

pytestmark = pytest.mark.simulated

STEPS = 3
MOE_GPT = dataclasses.replace(SMALL_GPT, num_moe_experts=4, moe_ffn_hidden_size=64)


@dataclass(frozen=True)
class RoleSpec:
    model: ModelConfig
    parallel: ParallelConfig
    value_head: bool = False
    distributed_optimizer: bool = False

    def alone(self) -> RoleSpec:
        return RoleSpec(self.model, ParallelConfig(), self.value_head)


Trained = list[tuple[list[float], dict[str, torch.Tensor]]]


def train_alternately(specs: list[RoleSpec]) -> Trained:
    roles = [Role(spec.model, spec.parallel, spec.value_head, spec.distributed_optimizer) for spec in specs]
    norms: list[list[float]] = [[] for _ in roles]
    for step in range(STEPS):
        for role, of_role in zip(roles, norms, strict=True):
            of_role.append(role.train_step(step))
    return [(of_role, role.weights()) for role, of_role in zip(roles, norms, strict=True)]


ACTOR = RoleSpec(SMALL_GPT, ParallelConfig(tp=2, pp=2))
CRITIC = RoleSpec(dataclasses.replace(SMALL_GPT, num_layers=2, seed=7), ParallelConfig(), value_head=True)


@pytest.mark.parametrize(
    "specs",
    [
        pytest.param([ACTOR, CRITIC], id="tp2-pp2-dp2 and dp8"),
        pytest.param(
            [
                dataclasses.replace(ACTOR, distributed_optimizer=True),
                dataclasses.replace(CRITIC, parallel=ParallelConfig(tp=4, sequence_parallel=True)),
                dataclasses.replace(CRITIC, parallel=ParallelConfig(tp=2, cp=2, pp=2)),
            ],
            id="tp2-pp2-dp2 and tp4-sp-dp2 and tp2-cp2-pp2",
        ),
        pytest.param(
            [
                RoleSpec(MOE_GPT, ParallelConfig(tp=2, pp=2, ep=2, etp=1, sequence_parallel=True)),
                RoleSpec(dataclasses.replace(MOE_GPT, num_layers=2), ParallelConfig(ep=4)),
                RoleSpec(SMALL_GPT, ParallelConfig(pp=2, vpp=2)),
            ],
            id="experts over ep2 and over ep4 and dense with vpp2",
        ),
    ],
)
def test_each_role_trains_as_in_a_separate_process(specs: list[RoleSpec]) -> None:
    together = run_ranks(train_alternately, 8, specs)[0]
    for spec, (norms, weights) in zip(specs, together, strict=True):
        [(norms_alone, weights_alone)] = run_ranks(train_alternately, 1, [spec.alone()])[0]
        assert norms == pytest.approx(norms_alone, abs=1e-5)
        assert largest_difference(weights, weights_alone) < 1e-5
