"""Several ranks on this machine, each a new process with its own device.

``python -m workers.gpucheck.ranks FOLDER collectives|layouts DEVICE`` is the program of one rank; its coordinates are
in the variables of torch's rendezvous.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcontroller.devices import device_of_rank
from mcontroller.errors import ResourceError
from mcontroller.worker import RankEnvironment
from parallel_state.megatron import initialize_distributed
from workers.gpucheck.course import UPDATES, Case
from workers.gpucheck.policy import Policy, ppo_columns

__all__ = ["layouts_of", "run_processes", "run_rank"]

_TIMEOUT_S = 240.0


def layouts_of(world_size: int) -> dict[str, dict[str, int]]:
    """Return the layouts to check on this many ranks: sizes of the axes, by name."""
    if world_size >= 4:
        return {"tp 2 pp 2": {"tp": 2, "pp": 2}, "tp 2 dp 2": {"tp": 2}, "pp 2 dp 2": {"pp": 2}, "cp 2 dp 2": {"cp": 2}}
    return {"tp 2": {"tp": 2}, "pp 2": {"pp": 2}, "dp 2": {}}


def run_processes(folder: Path, task: str, device_type: str, world_size: int) -> list[Any]:
    """Run a task on new processes, one for each rank, and return their results by rank.

    Args:
        folder: for results and logs.
        task: ``collectives`` or ``layouts``.
        device_type: ``"cuda"`` or ``"cpu"``.
        world_size: number of ranks.

    Raises:
        ResourceError: a rank failed, or did not end in four minutes; all are ended first.
    """
    folder.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [_start(folder, task, device_type, rank, world_size, port) for rank in range(world_size)]
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline or any(process.poll() for process in processes):
                break
            time.sleep(0.05)
        for rank, process in enumerate(processes):
            if process.poll() not in (0, None) or time.monotonic() > deadline:
                raise _failure(folder, task, rank, process.poll())
        return [torch.load(folder / f"{task} {rank}.pt", weights_only=False) for rank in range(world_size)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _failure(folder: Path, task: str, rank: int, status: int | None) -> ResourceError:
    log = (folder / f"{task} {rank}.log").read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
    ending = f"did not end in {_TIMEOUT_S:g} s" if status is None else f"ended with status {status}"
    return ResourceError(f"{task}: rank {rank} {ending}: {log[-1]}", rank=rank, status=status, log=log)


def _start(folder: Path, task: str, device_type: str, rank: int, world_size: int, port: int) -> subprocess.Popen[bytes]:
    variables = RankEnvironment(rank, world_size, rank, world_size, "127.0.0.1", port).variables()
    if device_type == "cpu":
        variables |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    with open(folder / f"{task} {rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "workers.gpucheck.ranks", str(folder), task],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def run_rank(arguments: Sequence[str]) -> None:
    """Run the task of one rank, and write its result."""
    folder, task = Path(arguments[0]), arguments[1]
    environment = RankEnvironment.from_variables(os.environ)
    device = device_of_rank(environment.local_rank, environment.local_world_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    initialize_distributed(
        rank=environment.rank,
        world_size=environment.world_size,
        init_method=f"tcp://{environment.master_addr}:{environment.master_port}",
        timeout_s=_TIMEOUT_S / 2,
    )
    result = _all_reduce(device) if task == "collectives" else _layouts(environment.world_size)
    torch.save(result, folder / f"{task} {environment.rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _all_reduce(device: torch.device) -> dict[str, float]:
    """Sum a tensor over all ranks; return its largest error, its bytes, and the seconds of one reduction."""
    elements = 64 << 20 if device.type == "cuda" else 1 << 20
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(elements, device=device) % 251
    tensor = (pattern + rank).float()
    dist.all_reduce(tensor)
    expected = pattern.float() * world_size + world_size * (world_size - 1) / 2
    error = float((tensor - expected).abs().max())
    repeats = 10
    dist.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    torch.cuda.synchronize()
    return {"error": error, "bytes": elements * 4.0, "seconds": (time.perf_counter() - started) / repeats}


def _layouts(world_size: int) -> dict[str, dict[str, Any]]:
    """Score, generate and train the dense model on every layout; return this rank's rows of the results."""
    results = {}
    for name, sizes in layouts_of(world_size).items():
        with Case("dense").policy(sizes) as policy:
            results[name] = _scored_and_trained(policy)
    return results


def _scored_and_trained(policy: Policy) -> dict[str, Any]:
    info, total = policy.worker.context.rank_info(), policy.worker.context.global_info()
    batch = {key: column.chunk(total.dp_size)[info.dp_rank].contiguous() for key, column in ppo_columns().items()}
    scores = policy.scores(batch)
    greedy = policy.generate(batch, do_sample=False) if total.cp_size == 1 else None
    for _ in range(UPDATES):
        policy.update(batch)
    after = policy.scores(batch)
    returns = info.tp_rank == 0 and info.cp_rank == 0 and scores is not None
    return {
        "shard": info.dp_rank if returns else None,
        "scores": scores,
        "greedy": None if greedy is None else greedy.responses.cpu(),
        "after": after,
    }


if __name__ == "__main__":
    run_rank(sys.argv[1:])
