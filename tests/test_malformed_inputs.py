"""Malformed files and overrides raise errors of this project only: configurations, saved batches, records."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcontroller.config.load import load_config
from mcontroller.data.batch import DataProto
from mcontroller.errors import MControllerError
from tests.fuzzing import KEYS, VALUES, fuzz, only_errors_of_this_project
from trainer.saving.run_record import read_record
from workers.checkpoint.manifest import find_checkpoint, read_manifest
from workers.weights.hf.config import model_fields_from_hf
from workers.weights.hf.files import WeightFiles


@dataclass
class Inner:
    rate: float = 1.0
    sizes: list[int] = field(default_factory=list)


@dataclass
class Outer:
    name: str = ""
    count: int = 1
    inner: Inner = field(default_factory=Inner)


@fuzz
@given(st.binary(max_size=60) | st.text(alphabet="a: \t\n-[]{}&*!'\"#|>?,0\x00\x85", max_size=40).map(str.encode))
def test_bytes_in_place_of_yaml(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    only_errors_of_this_project(lambda: load_config(Outer, tmp_path / "config.yaml"))


@pytest.mark.parametrize(
    "content",
    [
        "a: [",
        "name: x\nname: y",
        "inner: {rate.x: 1, rate: [1]}",
        "name: &a *b",
        "- 1",
        "{" * 5000,
        "name: ${nothing}",
        "inner: {rate: [1]}",
        "inner: {sizes: {a: 1}}",
        "count: 99999999999999999999e9",
    ],
)
def test_malformed_yaml_is_a_configuration_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(MControllerError):
        load_config(Outer, tmp_path / "config.yaml")


@fuzz
@given(st.text(alphabet="nameinrcout.=[]{}:,'\"$ 1\t\n\x00", max_size=24))
def test_any_text_as_an_override(override: str) -> None:
    only_errors_of_this_project(lambda: load_config(Outer, overrides=[override]))


@pytest.mark.parametrize("override", ["", "=", "=1", "name", "name.=1", "..=2", "inner=3", "name=[", "inner.rate={a"])
def test_malformed_override_is_a_configuration_error(override: str) -> None:
    with pytest.raises(MControllerError):
        load_config(Outer, overrides=[override])


@fuzz
@given(st.data())
def test_a_saved_batch_with_other_bytes(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "batch"
    DataProto.from_dict({"a": torch.arange(4)}, {"uid": ["x"] * 4}, {"b": [1, {"c": 2.0}]}).save_to_disk(path)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    only_errors_of_this_project(lambda: DataProto.load_from_disk(path))


@fuzz
@given(VALUES | st.dictionaries(KEYS, VALUES, max_size=6))
def test_json_files_of_runs_checkpoints_and_models(tmp_path: Path, content: Any) -> None:
    readers: dict[str, Callable[[], object]] = {
        "trainer.json": lambda: read_record(tmp_path),
        "manifest.json": lambda: read_manifest(tmp_path),
        "model.safetensors.index.json": lambda: WeightFiles(tmp_path),
        "config.json": lambda: model_fields_from_hf(tmp_path),
    }
    for name, reader in readers.items():
        (tmp_path / name).write_text(json.dumps(content))
        only_errors_of_this_project(reader)


@fuzz
@given(st.binary(max_size=300))
def test_name_of_the_latest_checkpoint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(MControllerError):
        find_checkpoint(tmp_path)
