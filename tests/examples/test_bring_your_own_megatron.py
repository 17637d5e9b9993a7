"""A team's own code under the controller computes what it computes without one."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import pytest
import torch

from examples.bring_your_own_megatron import loop, roles, team
from mcontroller import DataProto
from mcontroller.testing import SimulatedGroupMaker
from parallel_state import ParallelLayout
from parallel_state.simulated import run_ranks
from workers import OptimConfig, RolloutConfig


def arguments(tp: int, pp: int) -> argparse.Namespace:
    return team.parse_args(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)


@functools.cache
def without_controller(tp: int, pp: int) -> list[dict[str, float]]:
    args = arguments(tp, pp)
    return run_ranks(ParallelLayout(4, tp=tp, pp=pp), team.pretrain, args, loop.make_data(args))[-1]


def test_the_loop_under_a_worker_has_the_losses_of_the_loop_alone(simulated_group: SimulatedGroupMaker) -> None:
    args = arguments(1, 2)
    group: Any = simulated_group(loop.TeamWorker, ParallelLayout(4, tp=1, pp=2), args)
    assert loop.steps(group, args, loop.make_data(args)) == without_controller(1, 2)


def test_the_model_in_the_roles_has_the_losses_of_the_loop_alone(simulated_group: SimulatedGroupMaker) -> None:
    args = arguments(2, 2)
    optim = OptimConfig(lr=args.lr, weight_decay=0.01, clip_grad=1.0, decay_style="linear", total_steps=50, min_lr=0.0)
    config = roles.actor_config(
        args,
        optim=optim,
        ppo_mini_batch_size=8,
        ppo_micro_batch_size=2,
        shuffle=False,
        rollout=RolloutConfig(prompt_length=1, response_length=15),
    )
    group: Any = simulated_group(roles.TeamActor, ParallelLayout(4, tp=2, pp=2), config, "actor")
    group.init_model()
    losses = []
    for ids in loop.make_data(args).split(args.global_batch_size):
        mask = torch.ones_like(ids)
        mask[:, 0] = 0  # nothing predicts the first token
        columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": mask}
        losses.append(group.update_sft(DataProto.from_dict(columns)).meta_info["metrics"]["sft/loss"][0])
    expected = [step["lm loss"] for step in without_controller(2, 2)]
    assert losses == pytest.approx(expected, abs=2e-6)
    assert expected[-1] < expected[0]


def test_the_program_prints_the_same_losses_on_ray(ray_for_programs: None, capsys: pytest.CaptureFixture[str]) -> None:
    loop.main()
    lines = capsys.readouterr().out.splitlines()
    printed = [float(line.split("lm loss ")[1].split()[0]) for line in lines if "lm loss" in line]
    assert printed == pytest.approx([step["lm loss"] for step in without_controller(2, 2)], abs=1e-6)
