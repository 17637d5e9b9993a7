"""``mcontroller verify``: its table, its JSON and its exit status."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from unittest import mock

import pytest

from mcontroller.cli.main import main
from tests.parallel_state.verify.programs import EXAMPLES

pytestmark = pytest.mark.simulated

GPT = f"{EXAMPLES / 'gpt.py'}:program"


def test_equal_layouts_are_a_table_and_success(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    assert main(["verify", GPT, "--layouts", "pp=2", "dp=2,distopt", "--steps", "1", "--json", str(result)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layout", "ranks", "equal", "largest", "seconds", "first", "difference"]
    assert [line.split()[:3] for line in lines[1:3]] == [["pp=2", "2", "yes"], ["dp=2,distopt", "2", "yes"]]
    assert lines[4].startswith("2 layouts train the model of one process in ")
    actual = json.loads(result.read_text())
    assert [layout["layout"] for layout in actual["layouts"]] == ["pp=2", "dp=2,distopt"]
    assert all(layout["equal"] and layout["largest"] < actual["tolerance"] for layout in actual["layouts"])


def test_a_difference_is_printed_and_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    finalizing = sys.modules["megatron.core.distributed.finalize_model_grads"]
    result = tmp_path / "result.json"
    with mock.patch.object(finalizing, "_allreduce_word_embedding_grads", lambda *args, **kwargs: None):
        assert main(["verify", GPT, "--layouts", "pp=2", "dp=2", "--steps", "1", "--json", str(result)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["pp=2", "2", "NO"]
    assert lines[1].endswith("the sum over pp is that of one process: a reduction over pp is missing")
    assert lines[-3].startswith("1 of 2 layouts do not train the model of one process in ")
    assert re.fullmatch("fingerprint of one process: [0-9a-f]{16}", lines[-1])
    difference = json.loads(result.read_text())["layouts"][0]["differences"][0]
    assert (difference["kind"], difference["name"]) == ("gradient", "embedding.word_embeddings.weight")


def test_bad_input_is_one_line_and_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["verify", "no_such_file.py:program"]) == 1
    assert capsys.readouterr().err == "mcontroller verify: VerifyError: there is no file no_such_file.py\n"
    assert main(["verify", GPT, "tp=2"]) == 1
    assert "VerifyError" in capsys.readouterr().err
    file = str(tmp_path / "missing" / "file")
    wrong = dict.fromkeys(("--json", "--save", "--report", "--record"), file)
    for option, value in (wrong | dict.fromkeys(("--steps", "--ranks", "--every"), "0")).items():
        with pytest.raises(SystemExit) as caught:
            main(["verify", GPT, option, value])
        assert caught.value.code == 2


def test_a_rank_that_exits_and_a_saved_training_of_another_program_are_failures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    exits = "import sys\nfrom gpt import *\n\ndef forward_step(*args):\n    sys.exit(0)\n"
    fields = "config, model_provider, forward_step, batch, seq_length=LENGTH"
    (tmp_path / "exits.py").write_text(f"{exits}\nprogram = Program({fields})\n")
    assert main(["verify", f"{tmp_path / 'exits.py'}:program", "--layouts", "dp=2"]) == 1
    assert "called sys.exit(0)\n    at " in capsys.readouterr().err
    saved = str(tmp_path / "saved")
    assert main(["verify", GPT, "--layouts", "dp=1", "--steps", "1", "--save", saved]) == 0
    wider = "from gpt import program\nprogram = program.smaller(num_layers=1, ffn_hidden_size=32)\n"
    (tmp_path / "wider.py").write_text(wider)
    assert main(["verify", f"{tmp_path / 'wider.py'}:program", "--steps", "1", "--against", saved]) == 1
    assert f"{saved} is of another program: decoder." in capsys.readouterr().err
    (tmp_path / "saved").write_text("{}")
    assert main(["verify", GPT, "--layouts", "dp=1", "--steps", "1", "--against", saved]) == 1
    assert f"{saved} is no file that --save wrote" in capsys.readouterr().err.splitlines()[-1]
