"""Problems from files and tasks, by the name of their source."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcontroller.config.checks import close_names
from mcontroller.config.fields import check_unused
from mcontroller.config.imports import import_extra
from mcontroller.config.registry import Registry
from mcontroller.errors import ConfigError, DataError
from mcontroller.files import is_lfs_pointer
from trainer.data.config import DatasetConfig
from trainer.rewards.functions import import_reasoning_gym

DATASET_SOURCES: Registry[Callable[[DatasetConfig], Records]] = Registry("source of problems", key="source")
"""Readers of data sets by the name that a configuration uses. ``skip`` and ``size`` are applied to their result,
except by a reader that makes as many problems as needed."""
SEED_DISTANCE = 10_000_019
"""Distance of seeds: reasoning-gym draws problem i from ``seed + i``, so seeds this far apart share no draw."""
SUFFIXES = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
SETTINGS: Mapping[str, Collection[str]] = {
    **dict.fromkeys(("jsonl", "parquet"), ("path",)),
    "hf": ("path", "split"),
    "reasoning_gym": ("task", "options", "seed"),
    "verifiers": ("task", "options", "split"),
}
"""The fields of a data set that the readers of this package read, besides those of every data set."""


@dataclass(frozen=True)
class Records:
    """Rows of a data set.

    Attributes:
        name: the file, directory or task, for error messages.
        rows: the values by column.
        locations: of each row, such as ``problems.jsonl, line 3``.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    locations: Sequence[str]

    @staticmethod
    def joined(parts: Sequence[Records]) -> Records:
        """Return the rows of several files in their order."""
        rows = [row for part in parts for row in part.rows]
        locations = [location for part in parts for location in part.locations]
        return Records(", ".join(part.name for part in parts), rows, locations)

    def __len__(self) -> int:
        return len(self.rows)

    def selected(self, skip: int, size: int) -> Records:
        """Return ``size`` rows after the first ``skip``; all of them for a ``size`` of 0.

        Raises:
            DataError: there are fewer.
        """
        end = skip + size if size else len(self)
        if end > len(self) or skip >= len(self):
            raise DataError(
                f"{self.name} has {len(self)} rows; skip {skip} and size {size} need {max(end, skip + 1)}",
                rows=len(self),
            )
        return Records(self.name, self.rows[skip:end], self.locations[skip:end])


def check_record(value: Any, location: str) -> None:
    """Raise DataError if a row is no mapping with column names, such as a plain string."""
    if not isinstance(value, Mapping):
        shown = repr(value)[:60]
        raise DataError(
            f"{location} is {shown} of type {type(value).__name__}; expected named columns, such as "
            '{"prompt": "1 + 1 =", "answer": "2"}',
            location=location,
        )


@DATASET_SOURCES.register("reasoning_gym")
def read_reasoning_gym(config: DatasetConfig) -> Records:
    """Return ``skip + size`` different questions with their answers; ``entry`` is what the task's scorer reads.

    Two data sets of the same task, options and seed that select different rows share no question.

    Raises:
        ConfigError: reasoning-gym does not have the task or an option, or the task has too few questions.
    """
    if config.size < 1:
        raise ConfigError(f"source 'reasoning_gym' needs a size of at least 1; it is {config.size}", key="size")
    wanted = config.skip + config.size
    most_draws = 50 * wanted
    dataset = _task(config, most_draws)
    different: dict[str, Mapping[str, Any]] = {}
    for draw in range(most_draws):
        entry = dataset[draw]
        different.setdefault(entry["question"], entry)
        if len(different) == wanted:
            break
    if len(different) < wanted:
        raise ConfigError(
            f"{config.task} has {len(different)} different questions in {most_draws} draws; skip {config.skip} + size "
            f"{config.size} = {wanted}: reduce the sizes, or change options",
            key="size",
            value=config.size,
        )
    rows = [{"prompt": entry["question"], "answer": entry["answer"], "entry": entry} for entry in different.values()]
    name = f"reasoning-gym's {config.task}"
    return Records(name, rows, [f"{name}, problem {number}" for number in range(wanted)])


def _task(config: DatasetConfig, size: int) -> Any:
    gym = import_reasoning_gym()
    tasks = gym.factory.DATASETS
    if config.task not in tasks:
        hint = close_names(str(config.task), tasks)
        raise ConfigError(f"reasoning-gym has no task {config.task!r}{hint}", key="task", value=config.task)
    possible = tasks[config.task][1].__dataclass_fields__
    for name in config.options:
        if name not in possible:
            raise ConfigError(
                f"{config.task} has no option {name!r}{close_names(name, possible)}; it has {', '.join(possible)}",
                key=f"options.{name}",
            )
    return gym.create_dataset(config.task, seed=config.seed * SEED_DISTANCE, size=size, **config.options)


@DATASET_SOURCES.register("verifiers")
def read_verifiers(config: DatasetConfig) -> Records:
    """Return the rows of the training data of an environment of the package verifiers; ``split`` may be ``eval``.

    Raises:
        ConfigError: the extra ``verifiers`` is not installed, or there is no such environment.
    """
    if config.task is None:
        raise ConfigError("source 'verifiers' needs a task: the name of the environment", key="task")
    verifiers = import_extra("verifiers", "verifiers", "source")
    try:
        environment = verifiers.load_environment(config.task, **config.options)
    except (ValueError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"verifiers loads no environment {config.task!r}: {error}", key="task") from error
    rows = environment.get_eval_dataset() if config.split == "eval" else environment.get_dataset()
    named = [{"answer": "", **row} for row in rows]
    return _numbered(f"the environment {config.task}", named)


def source_of_path(path: Path) -> str:
    """Return the name of the reader of a path.

    Raises:
        ConfigError: the suffix is unknown.
    """
    if path.is_dir():
        return "hf"
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"{path} has the suffix {path.suffix!r}; readers are chosen for {', '.join(SUFFIXES)} and directories: "
            "set source to the name of a reader",
            key="source",
            value=str(path),
        )
    return SUFFIXES[path.suffix]


@DATASET_SOURCES.register("jsonl")
def read_jsonl(config: DatasetConfig) -> Records:
    """Return the objects of a JSON file: one per line, where empty lines are skipped, or all in one array.

    Raises:
        DataError: a line or an entry is not a JSON object, or the file is empty; with the file and the line or row.
    """
    path = Path(config.path)
    text = _text(path)
    if text.lstrip().startswith("["):
        rows = _parsed(text, path, 1)
        return _not_empty(_numbered(str(path), rows))
    lines = {number: line for number, line in enumerate(text.split("\n"), start=1) if line.strip()}
    rows = [_parsed(line, path, number) for number, line in lines.items()]
    return _not_empty(Records(str(path), rows, [f"{path}, line {number}" for number in lines]))


def _parsed(text: str, path: Path, line: int) -> Any:
    """Return the value of a JSON text that begins at a line of a file."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # the last from lists in lists, thousands of them
        reason, shown = str(error), text.strip()
        if isinstance(error, json.JSONDecodeError):
            reason, line = f"{error.msg} at column {error.colno}", line + error.lineno - 1
            shown = text.split("\n")[error.lineno - 1].strip()
        raise DataError(
            f"{path}, line {line} is not JSON: {reason}: {shown[:60]!r}", path=str(path), line=line
        ) from error


@DATASET_SOURCES.register("parquet")
def read_parquet(config: DatasetConfig) -> Records:
    """Return the rows of a Parquet file. Needs the extra ``data``.

    Raises:
        DataError: the file is not Parquet, is damaged, or has no rows.
    """
    path = Path(config.path)
    pyarrow, parquet = (import_extra(name, "data", "source") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        table = parquet.read_table(str(path))
        rows = without_filled(table.to_pylist(), table.schema)
    except (OSError, ValueError, pyarrow.ArrowException) as error:  # damaged: compressed content, text in UTF-8
        raise DataError(f"{path} cannot be read as a Parquet file: {error}", path=str(path)) from error
    return _not_empty(_numbered(str(path), rows))


@DATASET_SOURCES.register("hf")
def read_hf(config: DatasetConfig) -> Records:
    """Return the rows of a directory of Hugging Face ``datasets``: of ``save_to_disk``, or of files that it can load.

    Needs the extra ``data``.

    Raises:
        DataError: the directory is not a data set, or has no such split or no rows.
    """
    path = Path(config.path)
    datasets = import_extra("datasets", "data", "source")
    saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    try:
        loaded = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error.__cause__ or error).split())[:400]
        raise DataError(f"{path} cannot be read as a data set of Hugging Face: {reason}", path=str(path)) from error
    if isinstance(loaded, datasets.DatasetDict):
        if config.split not in loaded:
            raise DataError(f"{path} has no split {config.split!r}; it has {', '.join(loaded)}", split=config.split)
        loaded = loaded[config.split]
    return _not_empty(_numbered(str(path), without_filled(loaded.to_list(), loaded.features.arrow_schema)))


def without_filled(rows: list[dict[str, Any]], schema: Any) -> list[dict[str, Any]]:
    """Return rows of an Arrow table without the nulls that stand for keys that a row does not have.

    All structs of a column have the fields of all rows: pyarrow fills the ones that a row lacks with null, and a chat
    template then prints ``"city": null``. A null in a file cannot be told from these. A null ``content`` of a chat
    message stays, because chat templates tell it from a missing one. Maps become mappings, and keep their nulls.

    Args:
        rows: of ``to_pylist``.
        schema: of the table.
    """
    types = import_extra("pyarrow.types", "data", "source")

    def as_written(value: Any, kind: Any) -> Any:
        if types.is_struct(kind) and isinstance(value, Mapping):
            kept = {"content"} if "role" in value else set()
            given = [field for field in kind if value[field.name] is not None or field.name in kept]
            return {field.name: as_written(value[field.name], field.type) for field in given}
        if types.is_map(kind) and isinstance(value, list):
            return {key: as_written(item, kind.item_type) for key, item in value}
        if isinstance(value, list) and kind.num_fields == 1:  # every kind of list
            return [as_written(item, kind.value_type) for item in value]
        return value

    nested = [field for field in schema if field.type.num_fields]
    return [{**row, **{field.name: as_written(row[field.name], field.type) for field in nested}} for row in rows]


def _numbered(name: str, rows: list[dict[str, Any]]) -> Records:
    return Records(name, rows, [f"{name}, row {number}" for number in range(len(rows))])


def _not_empty(records: Records) -> Records:
    if not len(records):
        raise DataError(f"{records.name} is empty: it has no rows", path=records.name)
    return records


def _check_exists(path: Path) -> None:
    """Raise an error if a path leads to no file with data and to no directory."""
    if not path.exists():
        text = f"there is no file or directory {str(path)!r} (in {Path.cwd()})"
        raise ConfigError(text, key="path", value=str(path))
    if not (path.is_file() or path.is_dir()):
        text = f"{str(path)!r} is a device, a socket or a pipe; expected a file or a directory"
        raise ConfigError(text, key="path", value=str(path))
    if is_lfs_pointer(path):
        text = f"{str(path)!r} is a pointer of Git LFS, not the file: run `git lfs pull` in its repository"
        raise ConfigError(text, key="path", value=str(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8: byte {error.start}: {error.reason}", path=str(path)) from error


def check_dataset(config: DatasetConfig, key: str) -> list[str]:
    """Return the name of the reader of each path of a data set, whose files or directories exist if it has some.

    Args:
        config: the data set.
        key: its key in the configuration, for error messages.

    Raises:
        ConfigError: there is no such reader, file or directory; or a field is set that its reader does not read.
    """
    reads_files = config.source in (None, *SUFFIXES.values(), "hf")
    if reads_files and config.path is None:
        raise ConfigError(f"{key} has no path: set {key}.path to a JSON or Parquet file", key=f"{key}.path")
    names = []
    for path in [Path(str(path)) for path in config.paths]:
        if reads_files:
            _check_exists(path)
        names.append(config.source or source_of_path(path))
        DATASET_SOURCES.get_or_raise(names[-1], key=f"{key}.source")
    of_readers = {"path", "split", "task", "options", "seed"}
    unread = of_readers.difference(*(SETTINGS.get(name, of_readers) for name in names))
    check_unused(config, sorted(unread), f"{key}.", f"with the source {' and '.join(dict.fromkeys(names))}")
    return names


def load_records(config: DatasetConfig, key: str) -> Records:
    """Return the rows of a data set that ``skip`` and ``size`` select; those of several paths one after the other.

    Args:
        config: the data set.
        key: its key in the configuration, for error messages.

    Raises:
        ConfigError: there is no such reader, file or task, or an extra is missing.
        DataError: the content cannot be read, with the file and the line or row.
    """
    readers = zip(check_dataset(config, key), config.paths, strict=True)
    records = Records.joined([DATASET_SOURCES[name](replace(config, path=path)) for name, path in readers])
    if len(records.locations) != len(records):
        text = f"{key}: its reader returned {len(records)} rows and {len(records.locations)} locations: return one each"
        raise DataError(text, rows=len(records), locations=len(records.locations))
    for row, location in zip(records.rows, records.locations, strict=True):
        check_record(row, location)
    return records.selected(config.skip, config.size)
