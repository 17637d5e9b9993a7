"""What is wrong with a machine is said in one line, before anything runs."""

from __future__ import annotations

import pytest
import torch

from mcontroller.cli.main import main
from workers.model.utilization import peak_tflops


def test_a_machine_without_a_gpu_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["gpucheck"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("mcontroller gpucheck: ResourceError: torch")
    assert "pool" not in printed.err


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak
