"""Problems of reasoning-gym as rows for the trainer; no held-out question is in the training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from examples.ppo.config import ProblemConfig
from examples.ppo.gym import DATASETS, reasoning_gym
from examples.ppo.tokenizer import CharTokenizer
from mcontroller.errors import ConfigError, DataError

__all__ = ["Demonstrations", "Problems", "Prompts", "make_problems"]

SEED_DISTANCE = 10_000_019
"""Distance of seeds: reasoning-gym draws problem i from ``seed + i``, so seeds this far apart share no draw."""


@dataclass(frozen=True)
class Problems:
    """Problems of a task, with ``question``, ``answer`` and ``metadata``; ``scorer.score_answer`` scores a text."""

    scorer: Any
    train: Sequence[Mapping[str, Any]]
    held_out: Sequence[Mapping[str, Any]]


def make_problems(config: ProblemConfig) -> Problems:
    """Return different questions in the order in which the task draws them: the first ones are held out.

    Raises:
        ConfigError: reasoning-gym does not have the task or an option, or the task has too few questions.
    """
    wanted = config.held_out_size + config.train_size
    most_draws = 50 * wanted
    dataset = _dataset(config, most_draws)
    different: dict[str, Mapping[str, Any]] = {}
    for draw in range(most_draws):
        entry = dataset[draw]
        different.setdefault(entry["question"], entry)
        if len(different) == wanted:
            entries = list(different.values())
            return Problems(dataset, entries[config.held_out_size :], entries[: config.held_out_size])
    raise ConfigError(
        f"{config.task} has {len(different)} different questions in {most_draws} draws; held_out_size "
        f"{config.held_out_size} + train_size {config.train_size} = {wanted}: reduce sizes, or change problems.options",
        key="problems.train_size",
        value=config.train_size,
    )


def _dataset(config: ProblemConfig, size: int) -> Any:
    if config.task not in DATASETS:
        raise ConfigError(f"reasoning-gym has no task {config.task!r}", key="problems.task", value=config.task)
    possible = DATASETS[config.task][1].__dataclass_fields__
    for name in config.options:
        if name not in possible:
            raise ConfigError(
                f"{config.task} has no option {name!r}; it has {', '.join(possible)}", key=f"problems.options.{name}"
            )
    return reasoning_gym.create_dataset(config.task, seed=config.seed * SEED_DISTANCE, size=size, **config.options)


class Prompts:
    """Rows for the trainer: ``input_ids`` and ``attention_mask`` ``[prompt]``, padded on the left, and ``entry``."""

    def __init__(self, entries: Sequence[Mapping[str, Any]], tokenizer: CharTokenizer, prompt_length: int) -> None:
        self.entries = entries
        self.tokenizer = tokenizer
        self.prompt_length = prompt_length

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry = self.entries[index]
        ids = self.tokenizer.encode(entry["question"])
        _check_length("question", entry["question"], len(ids), "rollout.prompt_length", self.prompt_length)
        row, mask = _padded(ids, self.prompt_length, self.tokenizer.pad_token_id, left=True)
        return {"input_ids": row, "attention_mask": mask, "entry": entry}


class Demonstrations(Prompts):
    """Rows for the supervised phase: the question and its answer; ``loss_mask`` is 1 for the answer."""

    def __init__(
        self, entries: Sequence[Mapping[str, Any]], tokenizer: CharTokenizer, prompt_length: int, response_length: int
    ) -> None:
        super().__init__(entries, tokenizer, prompt_length)
        self.response_length = response_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        prompt = super().__getitem__(index)
        answer = prompt["entry"]["answer"]
        ids = [*self.tokenizer.encode(answer), self.tokenizer.eos_token_id]
        _check_length("answer", answer, len(ids), "rollout.response_length", self.response_length)
        row, mask = _padded(ids, self.response_length, self.tokenizer.pad_token_id, left=False)
        return {
            "input_ids": torch.cat((prompt["input_ids"], row)),
            "attention_mask": torch.cat((prompt["attention_mask"], mask)),
            "loss_mask": torch.cat((torch.zeros_like(prompt["input_ids"]), mask)),
        }


def _padded(ids: list[int], length: int, pad: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Return the padded ids and their mask, int64 ``[length]``."""
    row = torch.full((length,), pad, dtype=torch.long)
    mask = torch.zeros(length, dtype=torch.long)
    filled = slice(length - len(ids), length) if left else slice(0, len(ids))
    row[filled] = torch.tensor(ids)
    mask[filled] = 1
    return row, mask


def _check_length(what: str, text: str, length: int, key: str, most: int) -> None:
    if length > most:
        raise DataError(f"the {what} {text!r} is {length} tokens; {key} is {most}", length=length, most=most)
