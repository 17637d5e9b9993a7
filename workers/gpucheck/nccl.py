"""Part e: the layouts of the parity table over NCCL, each rank a process; several ranks share a GPU if there are fewer.

NCCL rejects two ranks on one GPU only if they are on one host too, so every process has a ``NCCL_HOSTID`` of its own,
and sockets as transport: groups, order of collectives, streams and overlap are NCCL's, speed and memory are not.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcontroller.errors import MControllerError
from parallel_state.megatron import initialize_distributed
from workers.gpucheck.cases import SMALL, Case
from workers.gpucheck.layouts import LAYOUTS, TOLERANCES, call, computed, differences, shard_of, workers_of
from workers.gpucheck.parity import HAVE_TE, Session
from workers.gpucheck.rows import Row, at_most, judged

SIZES = SMALL | {"hidden_size": 128, "ffn_hidden_size": 256}
"""Fields of ModelConfig: widths that kernels of a GPU accept, and a vocabulary that tp does not divide."""
_OVERLAP, _DISTRIBUTED = "PP2 x DP2, distributed optimizer with overlap", "DP2, distributed optimizer"
CHECKED = {
    "float32": ("TP2", "PP2", "TP2 with SP, packed", _DISTRIBUTED, _OVERLAP, "CP2", "EP2", "TP2 x PP2 x DP2"),
    "bfloat16": ("TP2 with SP, packed", _OVERLAP, "CP2", "EP2, decisive routers"),
}
"""Layouts by dtype: float32 with local layers, bfloat16 with Transformer Engine if it is installed."""
_TIMEOUT_S = 90.0
_START_S = 180.0


class RankProcesses:
    """Processes that compute as the ranks of one layout after another.

    Args:
        count: the most ranks of a layout.
    """

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._ranks = [ProcessPoolExecutor(1, context, _prepare, (rank,)) for rank in range(count)]
        self._pids: list[int] = []
        for started in [rank.submit(os.getpid) for rank in self._ranks]:
            self._pids.append(started.result(_START_S))

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the results of ``function`` by rank; torch.distributed runs during the call.

        Raises:
            RankError: a rank raised an exception, died or did not finish in time; the processes are ended.
        """
        with tempfile.TemporaryDirectory(prefix="ranks") as folder:
            common = (world_size, f"file://{folder}/rendezvous", function, arguments)
            calls = [rank.submit(_on_rank, number, *common) for number, rank in enumerate(self._ranks[:world_size])]
            wait(calls, _TIMEOUT_S, FIRST_EXCEPTION)
        failed = {rank: error for rank, made in enumerate(calls) if made.done() and (error := made.exception())}
        late = [rank for rank, made in enumerate(calls) if not made.done()]
        if not failed and not late:
            return [made.result() for made in calls]
        self.close()
        cause = "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in failed.items())
        raise RankError(cause or f"ranks {late} of {world_size} did not finish in {_TIMEOUT_S:g} s", ranks=late)

    def close(self) -> None:
        """End the processes."""
        for rank, pid in zip(self._ranks, self._pids, strict=False):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            rank.shutdown(wait=False, cancel_futures=True)
        self._pids = []


class RankError(MControllerError):
    """Ranks that failed; ``ranks`` are those that did not finish."""

    ranks: list[int]


def ranks_on_one_gpu(host: str) -> dict[str, str]:
    """Return the variables with which NCCL takes a process beside others on a GPU; ``host`` differs between them."""
    sockets = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    return {"NCCL_HOSTID": host, **sockets}


def _prepare(rank: int) -> None:
    os.environ |= ranks_on_one_gpu(f"rank{rank}")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def _on_rank(rank: int, world_size: int, rendezvous: str, function: Callable[..., Any], arguments: Any) -> Any:
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    initialize_distributed(rank=rank, world_size=world_size, init_method=rendezvous, timeout_s=_TIMEOUT_S)
    try:
        return _on_host(function(*arguments)), dist.get_backend()
    finally:
        dist.destroy_process_group()


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return {name: _on_host(item) for name, item in value.items()} if isinstance(value, dict) else value


def layouts(session: Session) -> Iterator[Row]:
    """Compare layouts with one process, and read the checkpoint of one layout in another."""
    checked = {"float32": ("TP2",)} if session.tiny else CHECKED
    count = max(LAYOUTS[name].ranks for names in checked.values() for name in names)
    ranks = RankProcesses(count)
    try:
        for dtype, names in checked.items():
            layers = "transformer_engine" if HAVE_TE and dtype == "bfloat16" else "local"
            sizes, single = SIZES | {"transformer_impl": layers}, dict[str, Any]()
            for name in names:
                row, layout = f"{name} {dtype} {layers}", LAYOUTS[name]
                try:
                    if layout.model not in single:
                        alone = Case(1, {}, layout.model)
                        single[layout.model] = ranks.run(1, computed, alone, dtype, sizes)[0][0]
                    results = ranks.run(layout.ranks, computed, layout, dtype, sizes)
                except RankError as error:
                    yield judged(row, False, "equal to one process", str(error)[:400])
                    ranks = RankProcesses(count)
                    continue
                largest = differences(single[layout.model], [result for result, _ in results])
                advice = f"this layout computes something else over {results[0][1]} than one process"
                figures = {quantity.replace(" ", "_"): value for quantity, value in largest.items()}
                worst = max(largest.values(), key=lambda value: float("inf") if value != value else value)
                yield at_most(row, worst, TOLERANCES[dtype], advice, backend=results[0][1], **figures)
        if not session.tiny:
            yield from _checkpoints(ranks, session.folder)
    finally:
        ranks.close()


def _checkpoints(ranks: RankProcesses, folder: Path) -> Iterator[Row]:
    for saved, loaded in ((_OVERLAP, _DISTRIBUTED), (_DISTRIBUTED, _OVERLAP)):
        path, scores = str(folder / f"layout{time.monotonic_ns()}"), []
        for name, load in ((saved, False), (loaded, True)):
            results = ranks.run(LAYOUTS[name].ranks, _scores_at_checkpoint, LAYOUTS[name], path, load)
            by_shard = {rank["dp"]: rank["scores"] for rank, _ in results if rank["scores"] is not None}
            scores.append(torch.cat([by_shard[shard] for shard in sorted(by_shard)], 1))
        advice = "a checkpoint of one layout is another model in the other"
        difference = float((scores[0] - scores[1]).abs().max())
        yield at_most(f"{saved}, read by {loaded}", difference, TOLERANCES["float32"], advice)


def _scores_at_checkpoint(layout: Case, path: str, load: bool) -> dict[str, Any]:
    """Save after an update, or load; return the scores ``[2, rows, response]`` then, and after another update."""
    policy, _ = workers_of(layout, "float32", SIZES | {"transformer_impl": "local"})
    shard, scores = shard_of(policy, SIZES), []
    if load:
        call(policy, "load_checkpoint", path)
    else:
        call(policy, "update_actor", shard)
        call(policy, "save_checkpoint", path, 1)
    for _ in range(2):
        scored = call(policy, "compute_log_prob", shard)
        scores += [] if scored is None else [scored.batch["old_log_probs"]]
        call(policy, "update_actor", shard)
    return {"dp": policy.context.pg.dp.rank(), "scores": torch.stack(scores) if scores else None}
