"""Configuration of the problems of a run: where they are, and which columns hold the prompt and the answer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import PurePath
from typing import Any

from mcontroller.config.checks import check_above, check_at_least, check_one_of
from mcontroller.config.fields import strict_fields, unused_if
from mcontroller.errors import ConfigError
from trainer.config import DataConfig, ValidationConfig

TRUNCATION = ("drop", "error", "left")


@strict_fields
@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """One data set."""

    path: Any = None
    """A file of JSON (objects in lines or in an array) or Parquet, a directory of Hugging Face ``datasets``, or a list
    of them, which are read in turn."""
    source: str | None = None
    """Name of the reader: jsonl, parquet, hf, reasoning_gym, verifiers, or one of yours. None: by the path."""
    split: str = "train"
    """Split of a directory of Hugging Face ``datasets`` that has several."""
    task: str | None = None
    """Name of the task of reasoning-gym, or of an environment of verifiers."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the task, under reasoning-gym's names, or arguments of the environment."""
    seed: int = 0
    """Seed of the problems of reasoning-gym."""
    skip: int = 0
    """[problems] Problems at the start that are left out, such as those that are held out."""
    size: int = 0
    """[problems] Problems after those. 0: all."""

    def __post_init__(self) -> None:
        check_at_least("skip", self.skip, 0)
        check_at_least("size", self.size, 0)
        given = self.path if isinstance(self.path, list | tuple) else [self.path]
        if not given or not all(isinstance(path, str | PurePath) for path in given if self.path is not None):
            raise ConfigError(
                f"path is {self.path!r}; expected a path, or a list of at least one", key="path", value=self.path
            )

    @property
    def paths(self) -> list[str | None]:
        """The paths; None alone for a source that has none."""
        given = self.path if isinstance(self.path, list | tuple) else [self.path]
        return [None if path is None else str(path) for path in given]


@strict_fields
@dataclass(frozen=True, slots=True)
class MixedDatasetConfig(DatasetConfig):
    """One of the data sets of ``data.mixture``."""

    weight: float | None = None
    """Share of the problems that are of this data set, in proportion to the other weights. None: its number of rows."""

    def __post_init__(self) -> None:
        super(MixedDatasetConfig, self).__post_init__()
        if self.weight is not None:
            check_above("weight", self.weight, 0.0)


@strict_fields
@dataclass(frozen=True, slots=True)
class EvaluationConfig(DatasetConfig):
    """One of the data sets of ``data.evaluations``, and how its responses are sampled."""

    response_length: int | None = None
    """[tokens] Longest response, at most ``rollout.response_length``. None: that of ``validation``."""
    n: int | None = None
    """[responses] Responses to each problem. None: that of ``validation``."""
    do_sample: bool | None = None
    """Sample; False takes the most likely token. None: that of ``validation``."""
    temperature: float | None = None
    """Temperature of the samples. None: that of ``validation``."""
    top_p: float | None = None
    """Sample from the smallest set of tokens with at least this probability. None: that of ``validation``."""
    top_k: int | None = None
    """[tokens] Sample from the most likely tokens; 0: all. None: that of ``validation``."""

    def sampling(self, validation: ValidationConfig, key: str) -> ValidationConfig:
        """Return how the responses are sampled, with the values of ``validation`` that are not given.

        Args:
            validation: the section of all held-out problems.
            key: the key of these ones.

        Raises:
            ConfigError: the values do not fit together.
        """
        given = {item.name: getattr(self, item.name) for item in fields(validation) if hasattr(self, item.name)}
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("do_sample") is False:  # the settings of samples are not those of the most probable tokens
            validation = ValidationConfig(response_length=validation.response_length)
        try:
            return replace(validation, **given)
        except ConfigError as error:
            name = str(error.fields["key"]).replace("validation.", f"{key}.")
            text = error.message.replace("validation.", f"{key}.")
            raise ConfigError(text, **error.fields | {"key": name}) from error


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemsConfig(DataConfig):
    """The problems of a run, and their batches."""

    train: DatasetConfig = field(default_factory=DatasetConfig)
    """Problems to train on."""
    mixture: dict[str, MixedDatasetConfig] = field(default_factory=dict)
    """Data sets by name to train on together, in place of ``train``: each has a ``weight``. They never end a pass:
    each is repeated on its own."""
    val: DatasetConfig | None = None
    """Held-out problems. None: no validation, or that of ``evaluations`` alone."""
    evaluations: dict[str, EvaluationConfig] = field(default_factory=dict)
    """Other held-out problems by name, with a length and sampling of their own; metrics ``held_out/<name>/score``."""
    prompt_key: str = "prompt"
    """Column of the prompt: a text, or a list of chat messages ``{"role": ..., "content": ...}``."""
    tools_key: str | None = unused_if("tools", chat_template=False)
    """Column of the tools of a row, JSON schemas for the chat template; rows may lack it. None: there is none."""
    answer_key: str = "answer"
    """Column of the right answer, or a key of it (reward_model.ground_truth). Reward functions get it as ``answer``."""
    chat_template: bool | None = None
    """Apply the tokenizer's chat template. None: to chat messages only. True: a text is the message of a user."""
    system_prompt: str | None = unused_if(None, chat_template=False)
    """Message of the system in front of chat messages that do not begin with one."""
    truncation: str = "drop"
    """Prompts longer than ``rollout.prompt_length``: drop, error, or left (leave their first tokens out)."""

    def training_sets(self) -> dict[str, DatasetConfig]:
        """Return the data sets to train on, by their keys in the configuration."""
        return {f"data.mixture.{name}": dataset for name, dataset in self.mixture.items()} or {"data.train": self.train}

    def held_out_sets(self) -> dict[str, DatasetConfig]:
        """Return the held-out data sets, by their keys in the configuration."""
        first = {} if self.val is None else {"data.val": self.val}
        return first | {f"data.evaluations.{name}": evaluation for name, evaluation in self.evaluations.items()}

    def __post_init__(self) -> None:
        super(ProblemsConfig, self).__post_init__()
        if self.mixture and self.train != DatasetConfig():
            raise ConfigError(
                "data.train and data.mixture are set: set one; data.mixture takes data.train as another entry",
                key="data.mixture",
                value=self.mixture,
            )
        for name in self.evaluations:
            if not name or "/" in name or "." in name:
                text = f"data.evaluations has the name {name!r}, which is part of metrics: leave out / and ."
                raise ConfigError(text, key="data.evaluations", value=name)
        check_one_of("data.truncation", self.truncation, TRUNCATION)
