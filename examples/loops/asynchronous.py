"""Asynchronous training with a tool: a response that waits for its next turn delays neither others nor updates.

A tool replies to each digit. The weights move while responses are in flight: tokens are weighted by policy / rollout.

python -m examples.loops.asynchronous
"""

from __future__ import annotations

import asyncio
from itertools import cycle
from typing import Any

import numpy as np
import torch

from examples.loops.task import BEGIN, DIGITS, FIRST_DIGIT, LENGTH, PAD, TOKENS, actor_config, local
from mcontroller import DataProto
from trainer import ImportanceConfig, compute_advantage, importance_weights, outcome_scores
from trainer.rollout.reference_engine import ReferenceEngine
from trainer.rollout.trajectories import TrajectoryRollout, trajectory_batch
from trainer.rollout.trajectory import Trajectory
from workers import WeightTransfer

START = local  # on Ray: on_ray of examples.loops.task
ANY_DIGIT = range(FIRST_DIGIT, FIRST_DIGIT + DIGITS)
STEPS, GROUP, GROUPS, IN_FLIGHT = 60, 8, 16, 40


async def episode(rollout: TrajectoryRollout, digit: int) -> Trajectory:
    """Return a response in which the tool replies to every digit of the policy: BEGIN if it is right, else PAD."""
    made = await rollout.submit([BEGIN, digit], stop_token_ids=ANY_DIGIT)
    while made.ended == "turn" and len(made.tokens) < LENGTH - 1:
        made.replied([BEGIN if made.tokens[-1] == digit else PAD])
        made = await rollout.submit(made, stop_token_ids=ANY_DIGIT)
    return made


async def group(rollout: TrajectoryRollout, digit: int) -> tuple[list[Trajectory], list[float]]:
    """Return the responses to one problem, and their scores: the share of the turns that are right."""
    made = await asyncio.gather(*(episode(rollout, digit) for _ in range(GROUP)))
    return made, [response.tokens.count(digit) / (LENGTH / 2) for response in made]


async def train() -> list[float]:
    """Train, and return the mean score of the responses of every step."""
    config = actor_config(ppo_mini_batch_size=GROUP * GROUPS, ppo_micro_batch_size=GROUP * GROUPS)
    policy, engine = (START(config, role) for role in ("actor", "rollout"))
    for workers in (policy, engine):
        workers.init_model()
    engines = [ReferenceEngine(engine, step_tokens=1)]
    rollout, weights = TrajectoryRollout(engine, engines=engines, **TOKENS), WeightTransfer(policy, engine)
    weights.run()
    digits, flying, ready, history = cycle(ANY_DIGIT), set[asyncio.Task[Any]](), list[Any](), list[float]()
    while len(history) < STEPS:
        while len(flying) < IN_FLIGHT:
            flying.add(asyncio.create_task(group(rollout, next(digits))))
        done, flying = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
        ready += [task.result() for task in done]
        if len(ready) < GROUPS:
            continue
        (made, scores), ready = zip(*ready[:GROUPS], strict=True), ready[GROUPS:]
        history.append(float(np.mean(scores)))
        rows = [response for responses in made for response in responses]
        columns = trajectory_batch(rows, prompt_length=2, response_length=LENGTH, pad_token_id=PAD)
        batch = DataProto.from_dict(columns, {"uid": np.arange(GROUPS).repeat(GROUP)}, {"temperature": 1.0})
        rewards = outcome_scores(torch.tensor(scores).flatten(), batch.batch["response_mask"])
        batch = compute_advantage(batch.with_tensors({"token_level_rewards": rewards}), "grpo")
        batch = batch.union(policy.compute_log_prob(batch))
        ratio, _ = importance_weights(batch, ImportanceConfig(level="token", threshold=2.0))
        policy.update_actor(batch.with_tensors({"importance_weights": ratio}).select(non_tensor_batch_keys=[]))
        weights.run()
        print(f"step {len(history)}: score {history[-1]:.3f}, oldest policy {min(row.versions[0] for row in rows)}")
    return history


def main() -> list[float]:
    """Train, and return the mean score of the responses of every step."""
    return asyncio.run(train())


if __name__ == "__main__":
    main()
