"""Files from an unknown source run no code when they are read: saved batches, Hugging Face directories.

A configuration can run what it names, which docs/reliability.md lists. Checkpoints are in
``tests/workers/checkpoint/test_damage.py``.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcontroller.config.load import load_config
from mcontroller.data.batch import DataProto
from mcontroller.errors import DataError, MControllerError
from trainer.data.hf_tokenizer import HuggingFaceTokenizer
from trainer.data.tokenizers import TokenizerSource
from workers.weights.hf.config import model_fields_from_hf
from workers.weights.hf.files import WeightFiles


class RunsCode:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


@dataclass
class Settings:
    name: str = ""


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    return tmp_path / "ran"


def pickled(path: Path, proof: Path) -> None:
    path.write_bytes(pickle.dumps(RunsCode(proof)))


def saved_by_torch(path: Path, proof: Path) -> None:
    torch.save({"weight": RunsCode(proof)}, path)


@pytest.mark.parametrize("write", [pickled, saved_by_torch])
def test_pickle_in_place_of_a_batch(tmp_path: Path, proof: Path, write: Callable[[Path, Path], None]) -> None:
    write(tmp_path / "batch", proof)
    with pytest.raises(MControllerError) as caught:
        DataProto.load_from_disk(tmp_path / "batch")
    assert caught.value.path == tmp_path / "batch"
    assert not proof.exists()


def test_array_of_a_batch_that_has_an_object_of_a_class(tmp_path: Path, proof: Path) -> None:
    column = np.array([RunsCode(proof)], dtype=object)
    parts = {"batch": None, "non_tensor_batch": {"column": column}, "meta_info": {}}
    torch.save({"format": "mcontroller.DataProto", "version": 2} | parts, tmp_path / "batch")
    with pytest.raises(MControllerError) as caught:
        DataProto.load_from_disk(tmp_path / "batch")
    assert caught.value.path == tmp_path / "batch"
    assert not proof.exists()


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir"])
def test_tags_of_python_in_a_configuration(tmp_path: Path, proof: Path, tag: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"name: {tag} ['{proof}']\n")
    with pytest.raises(MControllerError) as caught:
        load_config(Settings, file)
    assert caught.value.key == str(file)
    with pytest.raises(MControllerError) as caught:
        load_config(Settings, overrides=[f"name={tag} ['{proof}']"])
    assert caught.value.key == "overrides"
    assert not proof.exists()


def test_a_value_reads_an_environment_variable_and_evaluates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof: Path
) -> None:
    monkeypatch.setenv("PLANTED", "value")
    assert load_config(Settings, overrides=["name=${oc.env:PLANTED}"]).name == "value"
    for name in (f"${{eval:os.mkdir('{proof}')}}", f"${{python:__import__('os').mkdir('{proof}')}}"):
        with pytest.raises(MControllerError):
            load_config(Settings, {"name": name})
    assert not proof.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_pickled_weights_in_a_hugging_face_directory(tmp_path: Path, proof: Path, name: str) -> None:
    saved_by_torch(tmp_path / name, proof)
    with pytest.raises(DataError):
        WeightFiles(tmp_path)
    assert not proof.exists()


def test_index_of_weights_that_names_a_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "secret").touch()
    index = {"weight_map": {"weight": "../secret"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError) as caught:
        WeightFiles(tmp_path / "model")
    assert caught.value.path == str(tmp_path / "model")


def remote_code(directory: Path, proof: Path) -> None:
    """Write a model and a tokenizer whose classes are in a module of the directory."""
    (directory / "code.py").write_text(f"import os\nos.mkdir({str(proof)!r})\n")
    auto = {"AutoConfig": "code.Config", "AutoTokenizer": ["code.Tokenizer", None]}
    (directory / "config.json").write_text(json.dumps({"model_type": "other", "auto_map": auto}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Other", "auto_map": auto}))


def test_classes_of_a_hugging_face_directory_are_not_imported(tmp_path: Path, proof: Path) -> None:
    remote_code(tmp_path, proof)
    with pytest.raises(MControllerError) as caught:
        model_fields_from_hf(tmp_path)
    assert (caught.value.key, caught.value.value) == ("model_type", "other")
    assert not proof.exists()


def test_classes_of_a_tokenizer_are_not_imported(tmp_path: Path, proof: Path) -> None:
    remote_code(tmp_path, proof)
    with pytest.raises(MControllerError) as caught:
        HuggingFaceTokenizer(TokenizerSource(str(tmp_path), lambda: ([], [])))
    assert caught.value.key == "tokenizer.path"
    assert not proof.exists()
