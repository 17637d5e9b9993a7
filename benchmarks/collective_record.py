"""CPU that the record of collectives costs a training step: the cost of an event, times the events of a step.

    python benchmarks/collective_record.py [--hidden 512] [--layers 8] [--length 128]

Two gloo ranks (TP2 with sequence parallelism, and PP2) train a GPT. The events of a step are the ones that a rank
records, and the CPU of a step is the time of the rank's process, without the record. The cost of an event is the CPU of
an all-reduce and its wait on a group of one rank with the record, less that without; rounds of both alternate, and the
median of the differences counts. The calls come from the depth of Megatron's layers, because the line of the program is
searched through the stack.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from parallel_state import cpu

cpu.install()

from parallel_state.hangs.record import RecordMemory, read_rank_record  # noqa: E402
from parallel_state.hangs.recorder import record_calls  # noqa: E402
from tests import training  # noqa: E402
from tests.forking import run_ranks  # noqa: E402
from workers.config import ModelConfig, ParallelConfig  # noqa: E402

AT_MOST = 0.01
ROUNDS, CALLS, DEPTH, STEPS = 31, 300, 40, 3


def events_of_step(role: training.Role) -> int:
    """Return the number of calls that this rank records in a step."""
    memory = RecordMemory()
    stop = record_calls(memory)
    role.train_step(0)
    stop()
    record = read_rank_record(os.getpid(), memory.descriptor)
    assert record is not None
    return sum(record.counts.values())


def cpu_of_step(role: training.Role) -> float:
    """Return the CPU seconds of this rank's process in a step."""
    role.train_step(1)
    before = time.process_time()
    for step in range(STEPS):
        role.train_step(step)
    return (time.process_time() - before) / STEPS


def cost_of_event() -> float:
    """Return the CPU seconds that the record adds to one call with its wait."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    tensor = torch.ones(1)

    def calls() -> float:
        before = time.thread_time()
        for _ in range(CALLS):
            dist.all_reduce(tensor, group=alone)
        return (time.thread_time() - before) / CALLS

    def deep(depth: int, function: Callable[[], float]) -> float:
        return deep(depth - 1, function) if depth else function()

    differences = []
    memory = RecordMemory()
    for _ in range(ROUNDS):
        without = deep(DEPTH, calls)
        stop = record_calls(memory)
        differences.append(deep(DEPTH, calls) - without)
        stop()
    return statistics.median(differences)


def measured(model: ModelConfig, parallel: ParallelConfig) -> tuple[int, float, float]:
    """Return the events of a step, its CPU seconds, and the CPU seconds of an event."""
    torch.set_num_threads(1)
    role = training.Role(model, parallel)
    return events_of_step(role), cpu_of_step(role), cost_of_event()


def main() -> int:
    """Print a row for each layout; return 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    arguments = parser.parse_args()
    training.LENGTH = arguments.length
    model = ModelConfig(
        vocab_size=1024,
        max_sequence_length=arguments.length,
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_attention_heads=8,
        num_query_groups=8,
    )
    layouts = {"TP2 with SP": ParallelConfig(tp=2, sequence_parallel=True), "PP2": ParallelConfig(pp=2)}
    exceeded = False
    sys.stdout.write(f"{'layout':14}{'events':>8}{'us an event':>13}{'ms a step':>11}{'share':>9}{'limit':>7}\n")
    for name, parallel in layouts.items():
        events, step, cost = max(run_ranks(measured, 2, model, parallel))
        share = events * cost / step
        exceeded = exceeded or share > AT_MOST
        sys.stdout.write(f"{name:14}{events:8}{cost * 1e6:13.2f}{step * 1e3:11.1f}{share:9.3%}{AT_MOST:7.0%}\n")
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
