"""Profile the calls of a worker from one call to another, and dump CUDA's memory.

nsys and snapshots of CUDA's memory have run on no GPU yet; torch.profiler is tested on a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.trace.recorder import span
from parallel_state.infos import DistRankInfo

_cuda: Any = torch.cuda  # parts of it have no types


class Profiler:
    """The profiler of a worker.

    Args:
        rank_info: returns the coordinates of this rank.
    """

    def __init__(self, rank_info: Callable[[], DistRankInfo]) -> None:
        self._rank_info = rank_info
        self._profile: Any = None
        self._ranges: Any = None
        self._memory: Path | None = None

    def start_profile(self, directory: str, at: Mapping[str, int] | None = None, nsys: bool = False) -> None:
        """Profile this rank until ``stop_profile``.

        Args:
            directory: gets ``<role and rank>.json.gz`` of torch.profiler, for Perfetto.
            at: coordinates, such as ``{"tp": 0, "pp": 1}``; ranks with others are not profiled. None: all are.
            nsys: mark the window and the methods for ``nsys profile --capture-range=cudaProfilerApi``, and run no
                profiler of torch.
        """
        self.stop_profile()  # of a step that has failed
        info = self._rank_info()
        if any(getattr(info, f"{axis}_rank") != index for axis, index in (at or {}).items()):
            return
        if nsys:
            if torch.cuda.is_available():
                _cuda.profiler.start()
                self._ranges = torch.autograd.profiler.emit_nvtx()
                self._ranges.__enter__()
            return
        path = Path(directory) / f"rank-{torch.distributed.get_rank()}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profile = torch.profiler.profile(
            record_shapes=True, on_trace_ready=lambda profile: profile.export_chrome_trace(str(path))
        )
        self._profile.start()

    def stop_profile(self) -> None:
        """End what ``start_profile`` began, and write its file."""
        if self._profile is not None:
            with span("write profile"):
                self._profile.stop()
            self._profile = None
        if self._ranges is not None:
            self._ranges.__exit__(None, None, None)
            _cuda.profiler.stop()
            self._ranges = None

    def record_memory(self, directory: str) -> None:
        """Record the allocations of the GPU from now on; an out-of-memory error writes a snapshot. Nothing on a CPU."""
        self._memory = Path(directory)
        if torch.cuda.is_available():
            _cuda.memory._record_memory_history(max_entries=100_000)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_memory_snapshot(self, name: str = "on-demand") -> str | None:
        """Write the allocations since ``record_memory`` for https://pytorch.org/memory_viz; return the file, if any."""
        if self._memory is None or not torch.cuda.is_available():
            return None
        path = self._memory / f"memory-{name}-rank-{torch.distributed.get_rank()}.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        _cuda.memory._dump_snapshot(str(path))
        return str(path)

    @contextlib.contextmanager
    def during(self, method: str) -> Iterator[None]:
        """Run a call: as a range of nsys while its window is open, with a snapshot if it is out of memory."""
        marked = self._ranges is not None
        if marked:
            _cuda.nvtx.range_push(method)
        try:
            yield
        except torch.OutOfMemoryError:
            self.save_memory_snapshot(f"out-of-memory-in-{method}")
            raise
        finally:
            if marked:
                _cuda.nvtx.range_pop()
