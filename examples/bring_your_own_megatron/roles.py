"""The team's model in the RL workers: one override builds it; generation, PPO, checkpoints and export are there.

The class works in every group that ``ActorRolloutRefWorker`` works in.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

from examples.bring_your_own_megatron import team
from workers import ActorConfig, ActorRolloutRefWorker, ParallelConfig, build_model, model_config_from_megatron


class TeamActor(ActorRolloutRefWorker):
    """A policy that the team's ``model_provider`` builds."""

    args = team.parse_args()

    def build_model(self) -> list[Any]:
        """Return this rank's chunks; called again for the reference policy, which begins with the same weights."""
        config = self.config
        sizes = {
            "tensor_model_parallel_size": config.parallel.tp,
            "pipeline_model_parallel_size": config.parallel.pp,
        }
        args = argparse.Namespace(**(vars(self.args) | sizes))
        provider = functools.partial(team.model_provider, args)
        return build_model(config.model, config.parallel, self.context, model_provider=provider)


def actor_config(args: argparse.Namespace, **fields: Any) -> ActorConfig:
    """Return the configuration of an actor with the layout and the model of the team's arguments."""
    return ActorConfig(
        model=model_config_from_megatron(args), parallel=ParallelConfig.from_megatron_args(args), **fields
    )
