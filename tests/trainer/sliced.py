"""Toy roles that generate by trajectory: responses of several letters, whose noise depends on seed and position."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from tests.trainer.separate import SeparateActor
from tests.trainer.toy import LETTERS, ToyTokenizer, problems, toy_config, toy_trainer
from trainer import AlgorithmConfig, AsynchronousConfig, ImportanceConfig, PPOConfig, RayPPOTrainer, Role
from trainer.rewards.reward import Reward, outcome_scores

LONGEST, STOP = 12, ToyTokenizer.eos_token_id


@dataclasses.dataclass(frozen=True)
class Rollout:
    n: int = 2
    response_length: int = LONGEST
    temperature: float = 1.0


@dataclasses.dataclass(frozen=True)
class Settings:
    lr: float = 0.1
    rollout: Rollout = dataclasses.field(default_factory=Rollout)


class SlicedActor(SeparateActor):
    """A policy ``table[letter before]``; a response ends after a length that its seed has."""

    slices: ClassVar[list[int]] = []

    def __init__(self, config: Settings, role: str) -> None:
        super().__init__(config.lr, role)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generation_limits(self) -> dict[str, Any]:
        limits = {"prompt_length": 1, "response_length": LONGEST, "max_rows": 256, "vocab_size": LETTERS + 2, "n": 2}
        return {**limits, "temperature": 1.0}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        self.slices.append(len(prompts))
        ids, room = prompts.batch["input_ids"], prompts.meta_info["response_length"]
        pad = prompts.meta_info["pad_token_id"]
        responses, log_probs = torch.full((len(ids), room), pad), torch.zeros(len(ids), room)
        for row in range(len(ids)):
            seed, before = int(prompts.batch["sample_seed"][row]), int(prompts.batch["generated"][row])
            last, length = int(ids[row, -1]), 1 + seed % LONGEST
            for at in range(room):
                scores = (self.table[last] / prompts.meta_info.get("temperature", 1.0)).log_softmax(0)
                if before + at == length - 1:
                    responses[row, at] = STOP
                    break
                noise = torch.Generator().manual_seed((seed + before + at) % 2**31)
                last = int(torch.multinomial(scores.exp(), 1, generator=noise))
                responses[row, at], log_probs[row, at] = last, scores[last]
                if last in prompts.meta_info["eos_token_id"]:  # the end of a turn
                    break
        whole = torch.cat((ids, responses), 1)
        columns = {"prompts": ids, "responses": responses, "input_ids": whole, "rollout_log_probs": log_probs}
        columns |= {"response_mask": (responses != pad).long(), "attention_mask": (whole != pad).long()}
        columns["policy_version"] = torch.full((len(ids),), self.version)
        return DataProto.from_dict(columns, meta_info=prompts.meta_info)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        self.version += 1
        before, tokens, own = self._letters(data)
        gradient = torch.nn.functional.one_hot(tokens, LETTERS) - self.table[before].softmax(-1)
        weights = data.batch["advantages"] * data.batch["importance_weights"] * own
        self.table.index_add_(0, before.flatten(), (self.lr * weights[..., None] * gradient).flatten(0, 1) / len(data))
        return DataProto(meta_info={"metrics": {"actor/lr": self.lr}})

    @staticmethod
    def _letters(data: DataProto) -> tuple[Tensor, Tensor, Tensor]:
        """The letter before each token, the token, and whether the policy chose it."""
        before = data.batch["input_ids"][:, -LONGEST - 1 : -1]
        tokens = data.batch["responses"]
        return before.clamp(max=LETTERS - 1), tokens.clamp(max=LETTERS - 1), (tokens < LETTERS).float()

    @staticmethod
    def _log_probs(table: Tensor, data: DataProto) -> Tensor:
        before, tokens, own = SlicedActor._letters(data)
        return table[before].log_softmax(-1).gather(2, tokens[..., None]).squeeze(2) * own


SLICED = {Role.Actor: SlicedActor, Role.Rollout: SlicedActor}


def alphabet(batch: DataProto) -> Reward:
    """The share of the letters that follow the one before them in the alphabet."""
    before, tokens, own = SlicedActor._letters(batch)
    right = ((tokens == (before + 1) % LETTERS) * own).sum(1) / own.sum(1).clamp(min=1)
    return Reward(outcome_scores(right, batch.batch["response_mask"]))


def sliced_config(steps: int, directory: Path, staleness: int = 2, trainer: Any = None, **options: Any) -> PPOConfig:
    options = {"schedule": "simulated", **options}
    made = toy_config(
        steps,
        **{"max_staleness": staleness, "default_local_dir": str(directory), "val_before_train": False},
        **{"asynchronous": AsynchronousConfig(**options), **(trainer or {})},
    )
    rule = AlgorithmConfig(adv_estimator="rloo", use_kl_in_reward=False, importance=ImportanceConfig("token"))
    data = dataclasses.replace(made.data, train_batch_size=8)
    return dataclasses.replace(
        made, actor_rollout_ref=Settings(), rollout=Settings(), critic=None, algorithm=rule, data=data
    )


def sliced_trainer(config: PPOConfig, **others: Any) -> tuple[RayPPOTrainer, list[dict[str, float]]]:
    """A trainer with started groups, and the list that gets the metrics of its steps."""
    lines: list[dict[str, float]] = []
    tracker = type("Lines", (), {"log": lambda self, metrics, *_: lines.append(dict(metrics)), "close": print})()
    tracker.log_samples = lambda *_: None
    settings = {"reward_fn": alphabet, "train_dataset": problems(48), "val_dataset": None, "trackers": [tracker]}
    trainer = toy_trainer(config, SLICED, **{**settings, **others})
    trainer.init_workers()
    return trainer, lines
