"""Megatron-LM's own training scripts: what they need, and that ``pretrain_gpt.py`` of a checkout is verified."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from mcontroller.cli.main import main

pytestmark = pytest.mark.simulated

HAS_TRAINING = importlib.util.find_spec("megatron.training") is not None


@pytest.mark.skipif(HAS_TRAINING, reason="megatron.training is on PYTHONPATH")
def test_a_script_needs_a_checkout_of_megatron_lm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "pretrain_of_a_team.py"
    script.write_text("from megatron.training import pretrain\n")
    assert main(["verify", str(script), "--", "--num-layers", "24"]) == 1
    message = capsys.readouterr().err
    assert "needs megatron.training, which megatron-core does not contain: put a checkout of Megatron-LM" in message


def test_a_script_that_does_not_exist_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "no_such_script.py"]) == 1
    assert capsys.readouterr().err == "mcontroller verify: VerifyError: there is no file no_such_script.py\n"
