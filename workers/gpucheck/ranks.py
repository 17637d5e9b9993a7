"""Run jobs on ranks in processes, of which several may share a GPU.

NCCL rejects two ranks on one GPU only if they are on one host too, so every process has a ``NCCL_HOSTID``, and sockets
as transport: groups, order of collectives, streams and overlap are NCCL's, speed and memory are not.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from parallel_state.megatron import initialize_distributed

Job = tuple[Any, ...]
"""A function, the case that it computes, whose ranks call it, and further arguments."""
_TIMEOUT_S = 90.0
"""[s] Longest time of a collective."""
_JOB_S = 600.0
"""[s] Longest time of a job: a rank may hang outside of collectives."""


def ranks_on_one_gpu(host: str) -> dict[str, str]:
    """Return the variables with which NCCL takes a process beside others on a GPU; ``host`` differs between them."""
    sockets = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    return {"NCCL_HOSTID": host, **sockets}


def on_ranks(jobs: Sequence[Job], job_s: float = _JOB_S) -> Iterator[list[Any] | str]:
    """Yield for each job what its ranks return, or the error of one of them; the next job then has new processes.

    A rank that takes longer than ``job_s`` writes the stacks of its threads to standard error, and ends.
    """
    ranks: list[_Rank] = []
    try:
        for job in jobs:
            ranks = ranks or [_Rank(rank) for rank in range(max(case.ranks for _, case, *_ in jobs))]
            results = _results(ranks[: job[1].ranks], job, job_s)
            yield results
            if isinstance(results, str):
                _end(ranks)
                ranks = []
    finally:
        _end(ranks)


def results_of(jobs: Sequence[Job]) -> list[list[Any] | str]:
    """Return what ``on_ranks`` yields."""
    return list(on_ranks(jobs))


class _Rank:
    """A process, and the connection to it."""

    def __init__(self, rank: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.connection, of_rank = spawn.Pipe()
        self.process = spawn.Process(target=_be_rank, args=(rank, of_rank))
        self.process.start()
        of_rank.close()


def _results(ranks: Sequence[_Rank], job: Job, job_s: float) -> list[Any] | str:
    results = dict[int, Any]()
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        for rank in ranks:
            rank.connection.send((job, f"file://{folder}/rendezvous", job_s))
        while len(results) < len(ranks):
            for number, rank in enumerate(ranks):
                if number not in results and rank.connection.poll(0.02):
                    try:
                        results[number], error = pickle.loads(rank.connection.recv_bytes())
                    except EOFError:
                        error = f"it died, or took {job_s:g} s; see standard error"
                    if error:
                        return f"rank {number}: {error}"
    return [results[number] for number in range(len(ranks))]


def _end(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.process.kill()
        rank.process.join()


def _be_rank(rank: int, connection: Connection) -> None:
    """Run jobs until this process is killed, or the other one ends."""
    os.environ |= ranks_on_one_gpu(f"rank{rank}")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    while True:
        (function, case, *arguments), init_method, job_s = connection.recv()
        faulthandler.dump_traceback_later(job_s, exit=True)
        result, error = None, ""
        try:
            initialize_distributed(rank=rank, world_size=case.ranks, init_method=init_method, timeout_s=_TIMEOUT_S)
            result = function(case, *arguments)
            dist.destroy_process_group()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        connection.send_bytes(pickle.dumps((result, error)))
        faulthandler.cancel_dump_traceback_later()
