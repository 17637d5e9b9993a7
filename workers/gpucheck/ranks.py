"""Run the cases of the parity tests on ranks in processes, of which several may share a GPU.

NCCL rejects two ranks on one GPU only if they are on one host too. So if there are fewer GPUs than ranks, every process
has a ``NCCL_HOSTID``, and sockets as transport: groups, order of collectives, streams and overlap are NCCL's then,
speed and memory are not.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from parallel_state.megatron import initialize_distributed
from workers.parity.cases import LAYOUTS, Case

_COLLECTIVE_S = 90.0
"""[s] Longest time of a collective."""
_PR_SET_PDEATHSIG = 1
"""The signal that a process gets when its parent ends."""


def ranks_on_one_gpu(host: str) -> dict[str, str]:
    """Return the variables with which NCCL takes a process beside others on a GPU; ``host`` differs between them."""
    sockets = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    return {"NCCL_HOSTID": host, **sockets}


class Ranks:
    """Processes that compute cases together, one for each rank; they start with the first case that needs them.

    Args:
        limit_s: [s] a rank that computes for longer, maybe outside of collectives, writes the stacks of its threads to
            standard error, and ends.
        gpus: whether they see the GPUs.
    """

    def __init__(self, limit_s: float = 600.0, *, gpus: bool = True) -> None:
        self._limit_s = limit_s
        self._variables = {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
        self._ranks: list[ProcessPoolExecutor] = []
        self._processes: set[BaseProcess] = set()

    def run(self, function: Callable[..., Any], case: Case, *arguments: Any) -> list[Any]:
        """Return what ``function(case, *arguments)`` returns on each of the ranks of the case.

        Raises:
            RuntimeError: a rank raised or died. All processes are killed; the next case has new ones.
        """
        spawn, others = multiprocessing.get_context("spawn"), {*multiprocessing.active_children()} - self._processes
        for rank in range(len(self._ranks), case.ranks):
            self._ranks.append(ProcessPoolExecutor(1, spawn, _be_rank, (rank,)))
        with tempfile.TemporaryDirectory(prefix="ranks") as folder, patch.dict(os.environ, self._variables):
            call = f"file://{folder}/rendezvous", self._limit_s, function, case, *arguments
            ranks = {self._ranks[rank].submit(_compute, rank, *call): rank for rank in range(case.ranks)}
            self._processes = {*multiprocessing.active_children()} - others
            for future in as_completed(ranks):
                if error := future.exception():
                    self.close()
                    raise RuntimeError(f"rank {ranks[future]}: {type(error).__name__}: {error}") from error
        return [pickle.loads(future.result()) for future in ranks]

    def close(self) -> None:
        """Kill the processes, which may wait for each other."""
        for process in self._processes:
            process.kill()
        for rank in self._ranks:
            rank.shutdown()
        self._ranks, self._processes = [], set()


def _be_rank(rank: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # or it would wait for the next case for ever
    if torch.cuda.device_count() < max(case.ranks for case in LAYOUTS.values()):
        os.environ |= ranks_on_one_gpu(f"rank{rank}")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())


def _compute(
    rank: int, init_method: str, limit_s: float, function: Callable[..., Any], case: Case, *arguments: Any
) -> bytes:
    """Return the pickled result: the tensors of an unpickled one would need this process to be alive."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    initialize_distributed(_COLLECTIVE_S, rank=rank, world_size=case.ranks, init_method=init_method)
    result = pickle.dumps(function(case, *arguments))
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    return result
