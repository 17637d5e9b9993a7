"""CPU seconds and memory of simulated ranks: groups, model and optimizer, two training steps of a tiny GPT.

Run ``python -m benchmarks.simulated 128 4 4`` (ranks, tp, pp); data-parallel ranks fill the rest. Without arguments it
measures 128 and 512 ranks, each in a separate process, and one hand-over between two ranks, with its parts.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from parallel_state import ParallelLayout
from parallel_state.megatron import initialize_distributed
from parallel_state.rank_state import Attributes, RankState, StateSwitch
from parallel_state.simulated import Simulation, SimulationError
from parallel_state.simulated.process_state import ProcessState
from parallel_state.simulated.scheduler import Scheduler
from tests import training
from workers.config import ModelConfig, ParallelConfig

SIZES = {(128, 4, 4): (40, 4096), (512, 8, 8): (240, 4096)}
"""(ranks, tp, pp) -> at most this many seconds of CPU and MiB of memory, imports included."""

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
    equal = len({tuple(each) for each in norms.values()}) == 1
    sys.stdout.write(f"gradient norms {norms[0]}, {'' if equal else 'not '}equal on all ranks\n")


def measure_all() -> int:
    """Measure every size in a separate process; return 1 if one is above its limits."""
    above = 0
    for size, (seconds, memory) in SIZES.items():
        sys.stdout.write("{} ranks, TP{} x PP{}\n".format(*size))
        sys.stdout.flush()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.simulated", *map(str, size)]
        subprocess.run(command, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used, peak = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, after.ru_maxrss >> 10
        sys.stdout.write(f"in all {used:.0f} s of CPU (limit {seconds}), {peak} MiB (limit {memory})\n\n")
        above += used > seconds or peak > memory
    return min(above, 1)


class _Never:
    done = False


def hand_over(count: int = 4000) -> None:
    """Print the microseconds of CPU of a hand-over, and of its parts."""
    simulation = Simulation(2)
    simulation.run(dict.fromkeys(range(2), lambda: initialize_distributed("gloo")))
    switches, started = simulation.switches, time.process_time()
    simulation.run(dict.fromkeys(range(2), lambda: [dist.barrier() for _ in range(count)][:0]))
    whole = (time.process_time() - started) / (simulation.switches - switches)
    simulation.close()

    def no_deadlock() -> SimulationError:
        raise AssertionError

    scheduler = Scheduler(2, None, lambda rank: None, no_deadlock, lambda rank, error: None)

    def alternate() -> None:
        for _ in range(count):
            scheduler.wake({})
            scheduler.give_way(_Never())

    started = time.process_time()
    scheduler.run({0: alternate, 1: alternate})
    baton = (time.process_time() - started) / scheduler.switches

    process = ProcessState({})
    switch, states = StateSwitch(process.parts), [RankState(process.parts) for _ in range(2)]
    state = _seconds(lambda turn: switch.to(states[turn % 2]), count)
    rows = {"whole hand-over, with a barrier": whole, "the baton: two threads": baton, "state, all parts": state}
    for part in process.parts:
        kind = "module and class attributes" if isinstance(part, Attributes) else _name(part)
        rows[f"  {kind}"] = rows.get(f"  {kind}", 0.0) + _seconds(
            lambda turn, part=part: part.write(part.read()), count
        )
    rows["the barrier: announcing, matching, waking"] = max(0.0, whole - baton - state)
    for name, seconds in rows.items():
        sys.stdout.write(f"{name:44}{seconds * 1e6:8.1f} us\n")


def _name(part: Any) -> str:
    return f"{getattr(part.read, '__module__', None) or 'numpy.random'}.{part.read.__name__}".replace("__main__.", "")


def _seconds(function: Callable[[int], Any], count: int) -> float:
    started = time.process_time()
    for turn in range(count):
        function(turn)
    return (time.process_time() - started) / count


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(*map(int, sys.argv[1:]))
    else:
        hand_over()
        sys.exit(measure_all())
