"""The state that the checks share: the scale, the layers, a folder and a process on the CPU."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Self

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from workers.gpucheck.case_run import CpuProcess
from workers.gpucheck.large import FULL, TINY

__all__ = ["Session"]


class Session:
    """One run of the checks on the current GPU; a context manager that ends its process and removes its files.

    Args:
        tiny: whether models, rows and repetitions are the smallest with which every check runs.
        folder: where checkpoints of the size of the model are saved; None for the folder of temporary files.

    Attributes:
        scale: sizes of the model of parts b to d.
        layers: the implementations of layers that this machine can use.
    """

    def __init__(self, *, tiny: bool, folder: Path | None = None) -> None:
        self.tiny = tiny
        self.scale = TINY if tiny else FULL
        self.layers = ["local", "transformer_engine"] if HAVE_TE else ["local"]
        self.folder = Path(tempfile.mkdtemp(prefix="gpucheck", dir=folder))
        self.cpu_folder = self.folder / "cpu"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    @functools.cached_property
    def cpu(self) -> CpuProcess:
        """The process that computes the CPU's results; it starts with the first call."""
        return CpuProcess()

    @property
    def implementation(self) -> str:
        """The implementation of the layers that a run would use."""
        return self.layers[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if "cpu" in vars(self):
            self.cpu.end()
        shutil.rmtree(self.folder, ignore_errors=True)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
