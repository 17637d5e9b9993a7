"""Broken directories of weights are rejected with an error that names the file or the tensor."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mcontroller.errors import DataError
from workers import ActorRolloutRefWorker
from workers.config import ActorConfig
from workers.config.model import model_config_from_hf
from workers.weights.hf.checkpoint import check_checkpoint_files
from workers.weights.hf.export_files import start_export
from workers.weights.hf.families.llama import Llama
from workers.weights.hf.files import WeightFiles

INDEX = "model.safetensors.index.json"


def write_index(directory: Path, content: object) -> None:
    (directory / "model.safetensors").rename(directory / "part.safetensors")
    (directory / INDEX).write_text(json.dumps(content))


def truncate(directory: Path, size: int) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])


BROKEN: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "no weights": (lambda path: (path / "model.safetensors").unlink(), {}),
    "empty file": (lambda path: truncate(path, 0), {"path": "model.safetensors"}),
    "truncated header": (lambda path: truncate(path, 20), {"path": "model.safetensors"}),
    "truncated tensor": (lambda path: truncate(path, 110), {"path": "model.safetensors"}),
    "pointer of Git LFS": (
        lambda path: (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        {"path": "model.safetensors"},
    ),
    "directory for a file": (
        lambda path: ((path / "model.safetensors").unlink(), (path / "model.safetensors").mkdir()),
        {},
    ),
    "missing file": (
        lambda path: write_index(path, {"weight_map": {"w": "other.safetensors"}}),
        {"missing": ["other.safetensors"]},
    ),
    "missing tensor": (
        lambda path: write_index(path, {"weight_map": {"v": "part.safetensors"}}),
        {"tensor": "v"},
    ),
    "file outside": (lambda path: write_index(path, {"weight_map": {"w": "../w"}}), {}),
    "no map": (lambda path: write_index(path, {}), {}),
    "integers": (
        lambda path: save_file({"w": torch.zeros(4, dtype=torch.int64)}, path / "model.safetensors"),
        {"tensor": "w"},
    ),
    "8 bits": (
        lambda path: save_file({"w": torch.zeros(4).to(torch.float8_e4m3fn)}, path / "model.safetensors"),
        {"tensor": "w"},
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_directory_is_rejected(tmp_path: Path, how: str) -> None:
    save_file({"w": torch.zeros(16)}, tmp_path / "model.safetensors")
    damage, named = BROKEN[how]
    damage(tmp_path)
    with pytest.raises(DataError) as caught:
        files = WeightFiles(tmp_path)
        for name in files.names:
            files.shape(name)
    assert {name: caught.value.fields[name] for name in named} == named
    assert ("git lfs pull" in str(caught.value)) is (how == "pointer of Git LFS")


def test_a_single_file_is_read_before_an_old_index_as_transformers_does(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(16)}, tmp_path / "model.safetensors")
    write_index(tmp_path, {"weight_map": {"w": "part.safetensors"}})
    save_file({"w": torch.ones(16)}, tmp_path / "model.safetensors")
    assert WeightFiles(tmp_path).read("w").equal(torch.ones(16))


@pytest.mark.processes
def test_a_second_export_into_a_directory_is_rejected_until_the_first_ends(tmp_path: Path) -> None:
    target, (ready, started), (ended, end) = tmp_path / "model", os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            start_export(target)
            os.close(started)
            os.close(end)
            os.read(ended, 1)
        finally:
            os._exit(0)
    os.close(started)
    os.read(ready, 1)
    (tmp_path / ".model.partial" / "weights").touch()
    with pytest.raises(DataError) as caught:
        start_export(target)
    assert caught.value.pid == pid
    assert (tmp_path / ".model.partial" / "weights").exists()
    os.close(end)
    os.waitpid(pid, 0)
    start_export(target)
    assert list((tmp_path / ".model.partial").iterdir()) == []


def test_a_checkpoint_is_checked_before_it_is_loaded(tmp_path: Path) -> None:
    """What a node without processes can see: whole files, and an output layer that is tied as config.json says."""
    config = dict.fromkeys(Llama.keys, 8) | {"num_attention_heads": 2}
    config |= {"model_type": "llama", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    embedding = torch.randn(8, 8)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    model = model_config_from_hf(tmp_path)
    check_checkpoint_files(model)
    tensors["lm_head.weight"][5] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DataError) as caught:
        check_checkpoint_files(model)
    assert caught.value.tensor == "lm_head.weight"
    truncate(tmp_path, 200)
    with pytest.raises(DataError) as caught:
        ActorRolloutRefWorker.check_init(config=ActorConfig(model=model))
    assert caught.value.path == "model.safetensors"
    check_checkpoint_files(dataclasses.replace(model, hf_path="/not/on/this/node"))
