"""The verb ``verify`` finds no layout in which adapters are trained as they are not in one process."""

from __future__ import annotations

import pytest

from mcontroller.cli.main import main


@pytest.mark.simulated
def test_verify_accepts_adapters_in_layouts_of_every_axis(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = ["tp=2,sp", "tp=2,pp=2,vpp=2", "cp=2,dp=2,distopt"]
    assert main(["verify", "examples/verify/lora.py:program", "--layouts", *layouts]) == 0
    assert capsys.readouterr().out.count(" yes ") == len(layouts)
