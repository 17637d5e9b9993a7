"""A task that a tiny model learns in seconds, for the loops: repeat the digit of the prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcontroller import (
    ClassWithInitArgs,
    DataProto,
    LocalWorkerGroup,
    MegatronRayWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    WorkerGroup,
)
from workers import ActorConfig, ActorRolloutRefWorker, load_config

PAD, END, BEGIN, FIRST_DIGIT, DIGITS, LENGTH = 0, 1, 2, 3, 8, 4
TOKENS = {"eos_token_id": END, "pad_token_id": PAD}
MODEL = {"vocab_size": FIRST_DIGIT + DIGITS, "max_sequence_length": 8, "num_layers": 2, "hidden_size": 32}
COMMON = {
    "model": MODEL | {"num_attention_heads": 2},
    "rollout": {"prompt_length": 2, "response_length": LENGTH},
    "optim": {"lr": 1e-2},
}


def actor_config(**fields: Any) -> ActorConfig:
    """Return the configuration of a tiny actor, with other fields than the defaults."""
    return load_config(ActorConfig, COMMON, fields)


def local(config: ActorConfig, role: str) -> WorkerGroup[ActorRolloutRefWorker]:
    """Return a group of one rank in this process."""
    return LocalWorkerGroup(ClassWithInitArgs(ActorRolloutRefWorker, config, role=role), name_prefix=role)


def on_ray(config: ActorConfig, role: str) -> WorkerGroup[ActorRolloutRefWorker]:
    """Return a group of two data-parallel ranks on Ray."""
    init = RayClassWithInitArgs(ActorRolloutRefWorker, config, role=role)
    return MegatronRayWorkerGroup(RayResourcePool([2], use_gpu=False), init, name_prefix=role)


def problems(rows: int, seed: int) -> DataProto:
    """Return prompts of a digit each: ``input_ids`` and ``attention_mask`` ``[rows, 2]``."""
    digits = torch.randint(DIGITS, (rows,), generator=torch.Generator().manual_seed(seed)) + FIRST_DIGIT
    ids = torch.stack((torch.full_like(digits, BEGIN), digits), 1)
    return DataProto.from_dict({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, meta_info=dict(TOKENS))


def responses(prompts: DataProto, tokens: Tensor) -> DataProto:
    """Return given responses ``[rows, LENGTH]`` to the prompts, with the columns of generated ones."""
    ids = torch.cat((prompts.batch["input_ids"], tokens), 1)
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": tokens}
    return DataProto.from_dict(columns | {"response_mask": torch.ones_like(tokens)}, meta_info={"temperature": 1.0})


def right_answers(prompts: DataProto) -> Tensor:
    """Return the right responses, int64 ``[rows, LENGTH]``."""
    return prompts.batch["input_ids"][:, -1:].repeat(1, LENGTH)


def scores(batch: DataProto) -> Tensor:
    """Return the share of right tokens of each response, float32 ``[rows]``."""
    digit = batch.batch["input_ids"][:, 1:2]
    right = (batch.batch["responses"] == digit) * batch.batch["response_mask"]
    return right.sum(1) / LENGTH
