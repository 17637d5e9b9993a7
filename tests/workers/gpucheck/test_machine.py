"""What is wrong with a machine is said in one line, before anything runs."""

from __future__ import annotations

import pytest
import torch

from mcontroller.cli.main import main
from workers.model.utilization import peak_tflops

OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading\n"
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)


@pytest.mark.parametrize("error", [RuntimeError(OLD), AssertionError("Torch not compiled with CUDA enabled")])
def test_a_machine_without_a_gpu_ends_with_status_2_and_the_reason_that_torch_gives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert main(["gpucheck"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert all(text in printed.err for text in (str(error).partition(". ")[0], torch.__version__, "'7'"))


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
