"""CPU seconds and memory of simulated ranks: groups, model and optimizer, two training steps of a tiny GPT.

Run ``python -m benchmarks.simulated 128 4 4`` (ranks, tp, pp); data-parallel ranks fill the rest.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from parallel_state import ParallelLayout
from parallel_state.megatron import initialize_distributed
from parallel_state.simulated import Simulation
from tests import training
from workers.config import ModelConfig, ParallelConfig

MODEL = ModelConfig(
    vocab_size=128,
    max_sequence_length=64,
    num_layers=8,
    hidden_size=32,
    num_attention_heads=8,
    num_query_groups=8,
    ffn_hidden_size=64,
)


def measure(ranks: int, tp: int, pp: int) -> None:
    """Print one line for each phase."""
    training.ROWS = ranks // (tp * pp) * max(2, pp)
    parallel = ParallelConfig(tp=tp, pp=pp)
    simulation = Simulation(ParallelLayout(ranks, tp=tp, pp=pp))

    def phase(name: str, function: Callable[[], Any]) -> dict[int, Any]:
        started, switches = time.process_time(), simulation.switches
        results = simulation.run(dict.fromkeys(range(ranks), function))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        used = time.process_time() - started
        sys.stdout.write(
            f"{name:22}{used:8.1f} s CPU{simulation.switches - switches:10} switches{peak:8} MiB at most\n"
        )
        return results

    phase("torch.distributed", lambda: initialize_distributed("gloo"))
    roles = phase("groups, model", lambda: training.Role(MODEL, parallel))
    norms = phase("two training steps", lambda: [roles[dist.get_rank()].train_step(step) for step in range(2)])
    simulation.close()
    sys.stdout.write(
        f"gradient norms {norms[0]}, equal on all ranks: {len({tuple(each) for each in norms.values()}) == 1}\n"
    )


if __name__ == "__main__":
    measure(*map(int, sys.argv[1:]))
