"""Search the layouts of training that fit in the memory of a GPU."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mcontroller.errors import MControllerError
from workers.config import ActorConfig, ParallelConfig
from workers.role_calls import Lengths, calls_of_run

MOST_OF_MEMORY = 0.9
"""The share of a GPU's memory that a layout may fill."""
SHOWN = 5
_GB = 2**30


@dataclass(frozen=True)
class LayoutMemory:
    """A layout of training, and the memory of a GPU in the call of the actor that needs the most [bytes]."""

    parallel: ParallelConfig
    world_size: int
    memory: int

    def __str__(self) -> str:
        layout = self.parallel.layout(self.world_size)
        sizes = {axis: getattr(layout, axis) for axis in ("tp", "pp", "cp", "ep", "dp")}
        shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        return f"{shown or 'one rank'}: {self.memory / _GB:.1f} GB"


@dataclass(frozen=True)
class LayoutSearch:
    """The layouts of training that were tried.

    Attributes:
        fitting: those that fit, by how many ranks share a copy of the model, the fewest first.
        too_large: those that need more than ``MOST_OF_MEMORY`` of a GPU, the smallest first.
        rejected: why the model cannot be trained in the others.
    """

    fitting: list[LayoutMemory]
    too_large: list[LayoutMemory]
    rejected: list[str]

    def lines(self, gpu_memory: float) -> list[str]:
        """Return the first layouts that fit, how many do, and why none does.

        Args:
            gpu_memory: [bytes] of a GPU.
        """
        limit = f"{MOST_OF_MEMORY:.0%} of the {gpu_memory / _GB:.1f} GB of a GPU"
        lines = [f"{len(self.fitting)} layouts of training fit in {limit}; the least divided first:"]
        lines += [f"  {layout}" for layout in self.fitting[:SHOWN]]
        if self.too_large and not self.fitting:
            lines.append(f"  {len(self.too_large)} need more, the least of them {self.too_large[0]}")
        if self.rejected and not self.fitting:
            reason, count = Counter(self.rejected).most_common(1)[0]
            lines.append(f"  {len(self.rejected)} cannot be used, {count} of them: {reason}")
        return lines


def search_layouts(
    actor: ActorConfig, world_size: int, lengths: Lengths, gpu_memory: float, *, fused: bool, gpus_per_node: int = 8
) -> LayoutSearch:
    """Estimate the memory of the actor in every layout whose sizes are powers of two.

    Context parallelism is that of the configuration.

    Args:
        actor: the actor.
        world_size: number of ranks.
        lengths: of the rows.
        gpu_memory: [bytes] of a GPU.
        fused: whether layers are Transformer Engine's.
        gpus_per_node: the largest size of tensor parallelism.
    """
    fitting, too_large, rejected = list[LayoutMemory](), list[LayoutMemory](), list[str]()
    for parallel in _layouts(actor, world_size, gpus_per_node):
        key = "actor_rollout_ref"
        try:
            calls = calls_of_run({key: replace(actor, parallel=parallel)}, {key: world_size}, lengths, fused=fused)
        except MControllerError as error:  # the layout does not fit the model
            rejected.append(str(error))
            continue
        layout = LayoutMemory(parallel, world_size, max(call.stages[call.most].total for call in calls))
        (fitting if layout.memory <= MOST_OF_MEMORY * gpu_memory else too_large).append(layout)
    fitting.sort(key=lambda layout: (math.prod(_sizes(layout.parallel)), layout.memory))
    too_large.sort(key=lambda layout: layout.memory)
    return LayoutSearch(fitting, too_large, rejected)


def _sizes(parallel: ParallelConfig) -> tuple[int, int, int]:
    return parallel.tp, parallel.pp, parallel.ep


def _layouts(actor: ActorConfig, world_size: int, gpus_per_node: int) -> Iterator[ParallelConfig]:
    given, experts = actor.parallel, actor.model.num_moe_experts or 1
    for tp in _powers_of_two(min(gpus_per_node, world_size)):
        for pp in _powers_of_two(min(actor.model.num_layers, world_size // tp)):
            for ep in _powers_of_two(min(experts, world_size // pp)):
                sequence = tp > 1 and (given.sequence_parallel or experts > 1 or given.tp == 1)
                etp = 1 if experts > 1 else None
                yield replace(given, tp=tp, pp=pp, ep=ep, etp=etp, vpp=None, sequence_parallel=sequence)


def _powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]
