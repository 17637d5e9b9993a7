"""Files beside the weights of an export: the code of the model, and the tokenizer that it was trained with."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch

from workers.weights.hf.export_files import WeightWriter, complete_export

AUTO = {"AutoConfig": "configuration_x.Config", "AutoModelForCausalLM": "owner/repo--modeling_hub.Model"}


def write(directory: Path, files: dict[str, str]) -> Path:
    directory.mkdir()
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory of a model with code, whose tokenizer is of tiktoken."""
    files = {"tiktoken.model": "base", "chat_template.jinja": "base", "tokenizer_config.json": "{}"}
    files |= {"configuration_x.py": "code", "helper.py": "code", "generation_config.json": "{}", "LICENSE": "text"}
    files |= {"config.json": "{}", "model.safetensors": "", "README.md": "", "hf_quant_config.json": "{}"}
    return write(tmp_path / "base", files)


def exported(tmp_path: Path, base: Path, tokenizer: Path | None) -> set[str]:
    target = tmp_path / "export"
    target.mkdir()
    complete_export(target, {"auto_map": AUTO}, {}, base, tokenizer)
    return {file.name for file in target.iterdir()}


def test_an_export_has_the_code_and_the_tokenizer_of_the_model(tmp_path: Path, base: Path) -> None:
    files = exported(tmp_path, base, None)
    assert files == {file.name for file in base.iterdir()} - {
        "model.safetensors",
        "README.md",
        "hf_quant_config.json",
    }


def test_an_export_has_no_file_of_another_tokenizer_than_the_given_one(tmp_path: Path, base: Path) -> None:
    names = {"AutoTokenizer": ["tokenization_y.Tokenizer", None]}
    tokenizer_files = {"tokenizer.json": "own", "tokenizer_config.json": json.dumps({"auto_map": names})}
    tokenizer = write(tmp_path / "tokenizer", tokenizer_files)
    write(tokenizer / "additional_chat_templates", {"tools.jinja": "own"})
    (base / "prompt_style.yaml").write_text("")
    write(base / "original", {"consolidated.00.pth": ""})
    files = exported(tmp_path, base, tokenizer)
    code = {"configuration_x.py", "helper.py", "generation_config.json", "LICENSE", "config.json", "prompt_style.yaml"}
    assert files == code | {"tokenizer.json", "tokenizer_config.json", "additional_chat_templates"}
    assert (tmp_path / "export" / "tokenizer.json").read_text() == "own"


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_exported_weights_have_the_permissions_of_the_umask(tmp_path: Path, mask: int) -> None:
    target = tmp_path / "export"
    before = os.umask(mask)
    try:
        target.mkdir()
        writer = WeightWriter(target, 0, 1000)
        writer.add("weight", torch.ones(2))
        complete_export(target, {}, writer.close(), None, None)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in target.iterdir()} == {0o666 & ~mask}
