"""The state that the checks share: the device, the CPU reference, and the outcomes so far."""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

import torch

from mcontroller.config.registry import Registry
from workers.gpucheck.course import Case, Outcome, cases, run_course
from workers.gpucheck.reference import CpuProcess, checkpoint_of
from workers.gpucheck.rows import Row, raised

__all__ = ["CHECKS", "Check", "Session"]


_LARGE_BYTES = 40 << 30
"""Memory that the large models of the checks of memory and speed need, with some room."""


class Session:
    """One run of the checks; a context manager that ends its processes and removes its files.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.
        smallest: whether one model is enough.
        small: whether memory and speed are measured with small models; always on a GPU with less than 40 GiB.
        ranks: ranks of the checks with several; None for a GPU each, or 2 on the CPU.
        transformer_engine: the problem with Transformer Engine; None if it has none or is not installed.

    Attributes:
        device: the device of this process.
        cases: the models that are compared with the reference.
    """

    def __init__(
        self,
        device_type: str,
        *,
        smallest: bool = False,
        small: bool = False,
        ranks: int | None = None,
        transformer_engine: str | None = None,
    ) -> None:
        self.device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
        self.small = small or (self.on_gpu and torch.cuda.mem_get_info(0)[1] < _LARGE_BYTES)
        self.transformer_engine = transformer_engine
        self.ranks = ranks or (torch.cuda.device_count() if self.on_gpu else 2)
        self.cases = cases(self.implementations, smallest=smallest)
        self.folder = Path(tempfile.mkdtemp(prefix="gpucheck"))
        self._outcomes: dict[Case, Outcome | Exception] = {}
        self._processes: list[CpuProcess] = []
        if self.on_gpu:
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    @property
    def on_gpu(self) -> bool:
        """Whether the checked device is a GPU."""
        return self.device.type == "cuda"

    @functools.cached_property
    def implementations(self) -> list[str]:
        """The layers that can be used here."""
        from megatron.core.extensions.transformer_engine import HAVE_TE

        return ["local", "transformer_engine"] if self.on_gpu and HAVE_TE else ["local"]

    def seconds(self, call: Callable[[], object]) -> float:
        """Return how long a call takes until the device has done its work."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def cpu_process(self, name: str, task: str, chosen: Sequence[Case]) -> CpuProcess:
        """Start a process on the CPU with a folder of this name; see ``CpuProcess``."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        process = CpuProcess(folder, task, chosen)
        self._processes.append(process)
        return process

    @functools.cached_property
    def reference_process(self) -> CpuProcess:
        """The process that computes the reference of all cases; it runs from the first use on."""
        return self.cpu_process("cpu", "course", list(dict.fromkeys(case.reference for case in self.cases)))

    @functools.cached_property
    def _references(self) -> dict[Case, Outcome]:
        return self.reference_process.results()

    def reference(self, case: Case) -> Outcome:
        """Return what the CPU computes for a case."""
        return self._references[case.reference]

    def outcome(self, case: Case) -> Outcome:
        """Return what this device computes for a case; raise the error of the first time, if there was one."""
        if case not in self._outcomes:
            (self.folder / "device").mkdir(exist_ok=True)
            try:
                self._outcomes[case] = run_course(case, self.checkpoint("device", case))
            except Exception as error:
                self._outcomes[case] = error
        outcome = self._outcomes[case]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def per_case(self, check: str, rows: Callable[[Case], Iterable[Row]]) -> Iterator[Row]:
        """Yield the rows of every case; one that raises is a failed row, and the others still run.

        Args:
            check: name of the check.
            rows: from a case to its rows.
        """
        for case in self.cases:
            try:
                yield from rows(case)
            except Exception as error:  # a kind of model that does not work here says nothing about the others
                yield raised(f"{check}: {case}", error)

    def checkpoint(self, folder: str, case: Case) -> Path:
        """Return the checkpoint of a case's course: on the ``device``, or on the ``cpu``."""
        return checkpoint_of(self.folder / folder, case)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            process.end()
        shutil.rmtree(self.folder, ignore_errors=True)
        if torch.distributed.is_initialized():
            with contextlib.suppress(RuntimeError):
                torch.distributed.destroy_process_group()


Check = Callable[[Session], Iterator[Row]]
"""A function that yields the rows of one check."""

CHECKS: Registry[Check] = Registry("check", key="--only")
"""The checks by name."""
