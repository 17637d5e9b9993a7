"""Configuration of the problems of a run: where they are, and which columns hold the prompt and the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcontroller.config.checks import check_at_least, check_one_of
from mcontroller.config.fields import strict_fields
from mcontroller.ppo.config import DataConfig

TRUNCATION = ("drop", "error", "left")


@strict_fields
@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """One data set."""

    path: str | None = None
    """A JSONL or Parquet file, or a directory of Hugging Face ``datasets``."""
    source: str | None = None
    """Name of the reader: jsonl, parquet, hf, reasoning_gym, or one that you registered. None: by the path."""
    split: str = "train"
    """Split of a directory of Hugging Face ``datasets`` that has several."""
    task: str | None = None
    """Name of the task of reasoning-gym."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the task, under reasoning-gym's names."""
    seed: int = 0
    """Seed of the problems of reasoning-gym."""
    skip: int = 0
    """[problems] Problems at the start that are left out, such as those that are held out."""
    size: int = 0
    """[problems] Problems after those. 0: all."""

    def __post_init__(self) -> None:
        check_at_least("skip", self.skip, 0)
        check_at_least("size", self.size, 0)


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemsConfig(DataConfig):
    """The problems of a run, and their batches."""

    train: DatasetConfig = field(default_factory=DatasetConfig)
    """Problems to train on."""
    val: DatasetConfig | None = None
    """Held-out problems. None: no validation."""
    prompt_key: str = "prompt"
    """Column of the prompt: a text, or a list of chat messages ``{"role": ..., "content": ...}``."""
    tools_key: str | None = "tools"
    """Column of the tools of a row, JSON schemas for the chat template; rows may lack it. None: there is none."""
    answer_key: str = "answer"
    """Column of the right answer, which is passed to reward functions; rows may lack it."""
    chat_template: bool | None = None
    """Apply the tokenizer's chat template. None: to chat messages only. True: a text is the message of a user."""
    system_prompt: str | None = None
    """Message of the system in front of chat messages that do not begin with one."""
    truncation: str = "drop"
    """Prompts longer than ``rollout.prompt_length``: drop, error, or left (leave their first tokens out)."""

    def __post_init__(self) -> None:
        super(ProblemsConfig, self).__post_init__()
        check_one_of("data.truncation", self.truncation, TRUNCATION)
