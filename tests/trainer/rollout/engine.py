"""A worker that generates by a formula, and episodes of every kind that run with it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.local import LocalWorkerGroup
from mcontroller.ray.class_with_init import ClassWithInitArgs
from trainer import Trajectory, TrajectoryRollout
from trainer.rollout.reference_engine import ReferenceEngine
from workers.role_worker import RoleWorker

PAD, EOS, CALL = 0, 1, 2
PROMPT, RESPONSE, VOCAB = 6, 24, 60
SAMPLING = {"eos_token_id": EOS, "pad_token_id": PAD}


class Formula(RoleWorker):
    """The next token follows from the context, the seed and the position; its log-probability from the token."""

    version = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generation_limits(self) -> dict[str, Any]:
        limits = {"prompt_length": PROMPT, "response_length": RESPONSE, "vocab_size": VOCAB, "max_rows": 256}
        return {**limits, "temperature": 1.0}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def move(self) -> None:
        self.version += 1

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        ids, attention = prompts.batch["input_ids"], prompts.batch["attention_mask"]
        longest, ends = prompts.meta_info["response_length"], prompts.meta_info["eos_token_id"]
        responses = torch.full((len(prompts), longest), PAD)
        mask, log_probs = torch.zeros_like(responses), torch.zeros(responses.shape)
        for row in range(len(prompts)):
            context = ids[row][attention[row] == 1].tolist()
            position = int(prompts.batch["generated"][row])
            for step in range(longest):
                token = next_token(context, int(prompts.batch["sample_seed"][row]), position + step)
                context.append(token)
                responses[row, step], mask[row, step], log_probs[row, step] = token, 1, -token / 100
                if token in ends:
                    break
        version = torch.full((len(prompts),), self.version)
        made = {"prompts": ids, "responses": responses, "response_mask": mask, "rollout_log_probs": log_probs}
        return DataProto.from_dict({**made, "policy_version": version}, meta_info=prompts.meta_info)


def next_token(context: Sequence[int], seed: int, position: int) -> int:
    value = (sum(context) * 31 + seed % 9973 + position * 17) % 47
    return CALL if value % 5 == 0 else EOS if value % 13 == 1 else 3 + value


def whole(prompt: Sequence[int], seed: int) -> list[int]:
    """The response without turns."""
    tokens: list[int] = []
    while len(tokens) < RESPONSE and (not tokens or tokens[-1] != EOS):
        tokens.append(next_token([*prompt, *tokens], seed, len(tokens)))
    return tokens


def a_rollout(**options: Any) -> TrajectoryRollout:
    group = LocalWorkerGroup(ClassWithInitArgs(Formula), name_prefix="formula")
    engines = [ReferenceEngine(group, step_tokens=3)]
    return TrajectoryRollout(group, **{"engines": engines, "driven": True, **SAMPLING, **options})


class Tools:
    """Replies to every call with two tokens, at most ``turns`` times; misbehaves as the problem says."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    async def __call__(self, rollout: Any, problem: Mapping[str, Any]) -> Any:
        made = await rollout.submit(problem["prompt_ids"], stop_token_ids=[CALL])
        kind = problem.get("kind", "")
        if kind == "raises":
            raise ValueError("no such tool")
        if kind == "waits":
            await asyncio.sleep(1000)
        if kind == "blocks":
            time.sleep(1000)
        if kind == "exits":
            os._exit(3)
        if kind == "forges":
            made.tokens[-1] = 3 + made.tokens[-1] % 40
        if kind == "claims":
            made.replied([7])
            made.mask[-1] = 1
        if kind == "endless":
            made.replied([7] * RESPONSE)
        if kind == "text":
            return "the answer is 4"
        if kind == "tokenless":
            return Trajectory(list(problem["prompt_ids"]))
        while made.ended == "turn" and made.turns <= self.turns and len(made.tokens) + 2 < RESPONSE:
            await asyncio.sleep(0.001 * problem.get("slow", 0))
            made.replied([50, 50 + made.turns])
            made = await rollout.submit(made, stop_token_ids=[CALL])
        return made
