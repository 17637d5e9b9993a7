"""What is wrong with a machine is said in one line, before anything runs."""

from __future__ import annotations

import pytest
import torch

from mcontroller.cli.main import main
from workers.gpucheck.machine import gpu_error
from workers.model.utilization import peak_tflops


def driver_error(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    def fail() -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_init", fail, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading\n"
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (OLD, "The NVIDIA driver on your system is too old (found version 11040)"),
        ("Found no NVIDIA driver on your system. Please check", "Found no NVIDIA driver on your system"),
        ("No CUDA GPUs are available", "No CUDA GPUs are available"),
    ],
)
def test_a_driver_that_cannot_be_used_is_one_line(monkeypatch: pytest.MonkeyPatch, message: str, reason: str) -> None:
    driver_error(monkeypatch, message)
    error = gpu_error()
    assert error is not None and error.startswith(f"the CUDA driver cannot be used: {reason}: run nvidia-smi")
    assert "12.8" in error and "\n" not in error


def test_torch_without_cuda_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert f"torch {torch.__version__} is built without CUDA" in str(gpu_error())


def test_hidden_gpus_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    driver_error(monkeypatch, "not called")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert str(gpu_error()).startswith("CUDA_VISIBLE_DEVICES is '', which hides all GPUs")


def test_a_machine_without_a_gpu_ends_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["gpucheck"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("gpucheck: torch ") and printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla T4", None),
        ("fake CUDA device", None),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak
