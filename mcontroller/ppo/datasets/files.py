"""Readers of JSONL and Parquet files and of directories of Hugging Face ``datasets``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mcontroller.config.imports import import_extra
from mcontroller.errors import ConfigError, DataError
from mcontroller.ppo.datasets.config import DatasetConfig
from mcontroller.ppo.datasets.records import DATASET_SOURCES, Records, checked_record

__all__ = ["read_hf", "read_jsonl", "read_parquet", "source_of_path"]

SUFFIXES = {".jsonl": "jsonl", ".parquet": "parquet"}


def source_of_path(path: Path) -> str:
    """Return the name of the reader of a path.

    Raises:
        ConfigError: the suffix is unknown, or there is no such file or directory.
    """
    _check_exists(path)
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
    """Return the lines of a file of JSON objects, one per line; empty lines are skipped.

    Raises:
        DataError: a line is not a JSON object, or the file is empty; with the file and the line.
    """
    path = _path(config)
    rows, locations = [], []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:  # the last from lists in lists, thousands of them
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            text = f"{path}, line {number} is not JSON: {reason}: {line.strip()[:60]!r}"
            raise DataError(text, path=str(path), line=number) from error
        rows.append(checked_record(value, f"{path}, line {number}"))
        locations.append(f"line {number}")
    return _not_empty(Records(str(path), rows, locations))


@DATASET_SOURCES.register("parquet")
def read_parquet(config: DatasetConfig) -> Records:
    """Return the rows of a Parquet file. Needs the extra ``data``.

    Raises:
        DataError: the file is not Parquet, is damaged, or has no rows.
    """
    path = _path(config)
    pyarrow, parquet = (import_extra(name, "data", "source") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        rows = parquet.read_table(str(path)).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:  # OSError: what is compressed in it is damaged
        raise DataError(f"{path} cannot be read as a Parquet file: {error}", path=str(path)) from error
    return _not_empty(_numbered(str(path), rows))


@DATASET_SOURCES.register("hf")
def read_hf(config: DatasetConfig) -> Records:
    """Return the rows of a directory of Hugging Face ``datasets``: of ``save_to_disk``, or of files that it can load.

    Needs the extra ``data``.

    Raises:
        DataError: the directory is not a data set, or has no such split or no rows.
    """
    path = _path(config)
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
    return _not_empty(_numbered(str(path), loaded.to_list()))


def _numbered(name: str, rows: list[dict[str, Any]]) -> Records:
    return Records(name, rows, [f"row {number}" for number in range(len(rows))])


def _not_empty(records: Records) -> Records:
    if not len(records):
        raise DataError(f"{records.name} is empty: it has no rows", path=records.name)
    return records


def _path(config: DatasetConfig) -> Path:
    if config.path is None:
        raise ConfigError(f"source {config.source!r} needs a path", key="path")
    path = Path(config.path)
    _check_exists(path)
    return path


def _check_exists(path: Path) -> None:
    if path.exists():
        return
    raise ConfigError(f"there is no file or directory {str(path)!r} (in {Path.cwd()})", key="path", value=str(path))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8: byte {error.start}: {error.reason}", path=str(path)) from error
