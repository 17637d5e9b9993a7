"""Measure moving weights from a training layout to a generation layout and back, on 8 CPU ranks over gloo.

    python benchmarks/resharding.py [--hidden 512] [--rounds 3]

The bytes sent are compared with the least possible: what ranks need in the new layout and do not have in the old one.
The seconds are compared with one plain all-to-all of as many bytes, evenly between the same ranks, and with the
verification of the received weights (``rollout.verify_weights``), whose share of an update is printed too.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing

from parallel_state import ParallelLayout
from parallel_state.megatron import MegatronContext, initialize_distributed
from workers.config import ModelConfig, ParallelConfig, RolloutConfig
from workers.generate.engine_weights import EngineWeights
from workers.generate.rollout_protocol import HeldWeights, PolicyWeights
from workers.model.build import build_model
from workers.weights.fingerprints import shard_fingerprints
from workers.weights.resharding import Resharding, ReshardingReport
from workers.weights.shards import model_shards, named_shards

WORLD_SIZE = 8
TRAINING: dict[str, Any] = {"tp": 2, "pp": 2}
MOVES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (TRAINING, {}),
    ({}, TRAINING),
    (TRAINING, {"tp": 4}),
    ({"tp": 4}, TRAINING),
    ({"tp": 2, "pp": 2, "vpp": 2}, {"tp": 2}),
    (TRAINING, TRAINING),
]
EXPERTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"ep": 2, "pp": 2}, {"ep": 4}),
    ({"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}, {"ep": 8}),
]


class Row(NamedTuple):
    from_axes: str
    to_axes: str
    model_bytes: int
    schedule_seconds: float
    report: ReshardingReport
    most_sent: int
    all_to_all_seconds: float
    verify_seconds: float


class Copy:
    """The copy of the weights that a resharding fills, as far as it is verified."""

    holds_weights = True

    def __init__(self, chunks: Any, context: MegatronContext) -> None:
        self.chunks, self.context = chunks, context

    def update_weights(self, weights: PolicyWeights) -> dict[str, float]:
        return {}

    def fingerprints(self) -> HeldWeights:
        return HeldWeights("megatron", shard_fingerprints(model_shards(self.chunks, self.context)))


def size_of(hidden: int) -> ModelConfig:
    """Return a model with about 100 MB of float32 weights at a hidden size of 512."""
    return ModelConfig(
        vocab_size=8_000,
        max_sequence_length=128,
        num_layers=8,
        hidden_size=hidden,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=2 * hidden,
        tie_embeddings=True,
    )


def with_experts(hidden: int) -> ModelConfig:
    """Return the same model with 8 experts in each of 4 layers."""
    dense = size_of(hidden)
    fields = {name: getattr(dense, name) for name in dense.__slots__}
    return ModelConfig(**fields | {"num_layers": 4, "num_moe_experts": 8, "moe_ffn_hidden_size": hidden // 2})


def measured(model: ModelConfig, from_axes: dict[str, Any], to_axes: dict[str, Any], rounds: int) -> Row:
    """Measure one move on this rank; report the fastest of the rounds."""
    sides: list[Any] = []
    for axes in (from_axes, to_axes):
        parallel = ParallelConfig(**axes)
        layout = {name: size for name, size in axes.items() if name != "sequence_parallel"}
        context = MegatronContext(ParallelLayout(WORLD_SIZE, **layout))
        sides += [build_model(model, parallel, context, initialize=False), context]
    model_bytes = bytes_of_model(*sides[:2])
    dist.barrier()
    start = time.perf_counter()
    resharding = Resharding(*sides)
    schedule_seconds = time.perf_counter() - start
    copy: Any = Copy(*sides[2:])
    weights, policy = EngineWeights(RolloutConfig(), copy), PolicyWeights(*sides[:2])
    reports, verified = [], []
    for update in range(rounds):
        dist.barrier()
        reports.append(resharding.run())
        verified.append(weights.update(copy, policy, update)["verify_seconds"])
    fastest = min(reports, key=lambda report: report.seconds)
    exchange_seconds = all_to_all_seconds(fastest.bytes_sent, rounds)
    sent = Counter[int]()
    for move in itertools.chain(*resharding.schedule.buckets):
        sent[move.source_rank] += move.nbytes
    names = named(from_axes), named(to_axes)
    most = max(sent.values(), default=0)
    return Row(*names, model_bytes, schedule_seconds, fastest, most, exchange_seconds, min(verified))


def bytes_of_model(chunks: Any, context: MegatronContext) -> int:
    """Return the bytes of the whole model, each tensor counted once."""
    mine = {shard.name: torch.Size(shard.full_shape).numel() * 4 for shard in named_shards(chunks, context)}
    sizes: list[dict[str, int]] = [{} for _ in range(WORLD_SIZE)]
    dist.all_gather_object(sizes, mine)
    return sum({name: nbytes for of_rank in sizes for name, nbytes in of_rank.items()}.values())


def named(axes: dict[str, Any]) -> str:
    sizes = {name: size for name, size in axes.items() if name != "sequence_parallel"}
    return " ".join(f"{axis.upper()}{size}" for axis, size in sizes.items()) or f"DP{WORLD_SIZE}"


def all_to_all_seconds(nbytes: int, rounds: int) -> float:
    """Return the seconds of one all-to-all of as many bytes, evenly over all ranks."""
    each = nbytes // (WORLD_SIZE * (WORLD_SIZE - 1))
    sizes = [0 if rank == dist.get_rank() else each for rank in range(WORLD_SIZE)]
    outgoing, incoming = (torch.zeros(sum(sizes), dtype=torch.uint8) for _ in range(2))
    times = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        dist.all_to_all_single(incoming, outgoing, sizes, sizes)
        dist.barrier()
        times.append(time.perf_counter() - start)
    return min(times)


def table(rows: list[Row]) -> str:
    columns = [
        "model MB",
        "sent MB",
        "least MB",
        "busiest MB",
        "plan s",
        "reshard s",
        "exchange s",
        "verify s",
        "share",
    ]
    lines = [f"{'from':<14}{'to':<14}" + "".join(f"{column:>11}" for column in columns)]
    for row in rows:
        report = row.report
        sizes = [row.model_bytes, report.bytes_sent, report.least_bytes, row.most_sent]
        figures = [f"{size / 1e6:.1f}" for size in sizes]
        seconds = (row.schedule_seconds, report.seconds, row.all_to_all_seconds, row.verify_seconds)
        figures += [f"{each:.2f}" for each in seconds]
        figures.append(f"{row.verify_seconds / (row.verify_seconds + report.seconds):.0%}")
        lines.append(f"{row.from_axes:<14}{row.to_axes:<14}" + "".join(f"{figure:>11}" for figure in figures))
    return "\n".join(lines)


def on_rank(rank: int, rendezvous: str, hidden: int, rounds: int) -> None:
    torch.set_num_threads(1)
    initialize_distributed("gloo", rank=rank, world_size=WORLD_SIZE, init_method=f"file://{rendezvous}")
    rows = [measured(size_of(hidden), from_axes, to_axes, rounds) for from_axes, to_axes in MOVES]
    rows += [measured(with_experts(hidden), from_axes, to_axes, rounds) for from_axes, to_axes in EXPERTS]
    if rank == 0:
        print(table(rows))
        wasted = [row for row in rows if row.report.bytes_sent > row.report.least_bytes]
        print(f"{len(rows) - len(wasted)} of {len(rows)} moves send the least possible number of bytes", flush=True)
    dist.barrier()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the model (a multiple of 64)")
    parser.add_argument("--rounds", type=int, default=3, help="copies of each move; the fastest is reported")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.start_processes(
            on_rank,
            args=(f"{directory}/rendezvous", arguments.hidden, arguments.rounds),
            nprocs=WORLD_SIZE,
            start_method="fork",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
