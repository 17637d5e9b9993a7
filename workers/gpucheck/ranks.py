"""Run jobs in this process, or on ranks in processes, of which several may share a GPU.

NCCL rejects two ranks on one GPU only if they are on one host too, so every process has a ``NCCL_HOSTID``, and sockets
as transport: groups, order of collectives, streams and overlap are NCCL's, speed and memory are not.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, spawn

from mcontroller.worker import RankEnvironment
from parallel_state.megatron import initialize_distributed

Job = tuple[Any, ...]
"""A function, the case that it computes, whose ranks call it, and further arguments."""
_TIMEOUT_S = 90.0
"""[s] Longest time of a collective."""
_JOB_S = 600.0
"""[s] Longest time of a job: a rank may hang outside of collectives."""
_INNERMOST = re.compile(r'most recent call first\):\n  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')


def ranks_on_one_gpu(host: str) -> dict[str, str]:
    """Return the variables with which NCCL takes a process beside others on a GPU; ``host`` differs between them."""
    sockets = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    return {"NCCL_HOSTID": host, **sockets}


def alone(jobs: Sequence[Job]) -> list[Any]:
    """Return what jobs of one rank return in this process."""
    with tempfile.TemporaryDirectory(prefix="ranks") as folder, RankEnvironment().activate():
        return [_run(0, job, f"{folder}/{number}") for number, job in enumerate(jobs)]


def on_ranks(jobs: Sequence[Job], job_s: float = _JOB_S) -> Iterator[list[Any] | str]:
    """Yield for each job what its ranks return, or the error of one of them; the next job then has new processes.

    An error has the line of each rank that was ended, because another one failed or the job took longer than ``job_s``.
    """
    first, count = 0, max(case.ranks for _, case, *_ in jobs)
    while first < len(jobs):
        with tempfile.TemporaryDirectory(prefix="ranks") as folder:
            processes, error = spawn(_be_rank, (folder, jobs[first:]), count, join=False), ""
            for number, (_, case, *_) in enumerate(jobs[first:]):
                first += 1
                files = [Path(folder, f"{number}.{rank}") for rank in range(case.ranks)]
                deadline = time.monotonic() + job_s
                while not error and not _are_written(files):
                    if time.monotonic() > deadline:
                        for process in processes.processes:
                            process.terminate()
                    error = _first_error(processes)
                if not _are_written(files):  # otherwise the ranks were faster than this process, and failed in the next
                    late = f"no result in {job_s:g} s: " if time.monotonic() > deadline else ""
                    yield late + "; ".join([error, *_ended_at(Path(folder), case.ranks)])
                    break
                yield [torch.load(file, weights_only=False) for file in files]


def _are_written(files: Sequence[Path]) -> bool:
    return all(file.exists() for file in files)


def _first_error(processes: Any) -> str:
    """Wait for a second, and return the error of a rank, which ends the others; empty without one."""
    try:
        processes.join(1.0)
    except (ProcessRaisedException, ProcessExitedException) as error:
        return f"rank {error.error_index}: {str(error).strip().splitlines()[-1]}"
    return ""


def _ended_at(folder: Path, ranks: int) -> Iterator[str]:
    """Yield where each rank was that was ended."""
    for rank in range(ranks):
        path = folder / f"stack.{rank}"
        if path.exists() and (at := _INNERMOST.search(path.read_text())):
            yield f"rank {rank} was ended in {at['function']}, {at['file']}:{at['line']}"


def _be_rank(rank: int, folder: str, jobs: Sequence[Job]) -> None:
    """Run the jobs that have this rank, and write what they return; wait for the others."""
    stack = open(Path(folder, f"stack.{rank}"), "w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.register(signal.SIGTERM, stack, all_threads=False, chain=True)  # in native code too
    os.environ |= ranks_on_one_gpu(f"rank{rank}")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    for number, job in enumerate(jobs):
        result, case = Path(folder, f"{number}.{rank}"), job[1]
        if rank < case.ranks:
            torch.save(_run(rank, job, f"{folder}/rendezvous{number}"), f"{result}.written")
            Path(f"{result}.written").rename(result)
        while not Path(folder, f"{number}.0").exists():
            time.sleep(0.05)


def _run(rank: int, job: Job, rendezvous: str) -> Any:
    function, case, *arguments = job
    init_method = f"file://{rendezvous}"
    initialize_distributed(rank=rank, world_size=case.ranks, init_method=init_method, timeout_s=_TIMEOUT_S)
    try:
        return function(case, *arguments)
    finally:
        dist.destroy_process_group()
