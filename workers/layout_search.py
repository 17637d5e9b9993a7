"""Search the layouts of training that fit in the memory of a GPU."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mcontroller.errors import MControllerError
from parallel_state.dry_run.outcome import Use
from parallel_state.layout import ParallelLayout
from parallel_state.verify.layouts import Variant
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, ParallelConfig
from workers.config.fit import check_fit
from workers.dry_run import RoleCall
from workers.memory.nccl import nccl_bytes
from workers.memory.planned import stage_uses
from workers.memory.without_gpus import without_gpus
from workers.role_calls import Lengths
from workers.verify.roles import ModelRole, variant_of

MOST_OF_MEMORY = 0.9
"""The share of a GPU's memory that a layout may fill."""
SHOWN = 5
_GB = 2**30


@dataclass(frozen=True)
class LayoutMemory:
    """A layout of training, and the memory of a GPU in an update of the actor [bytes]."""

    parallel: ParallelConfig
    layout: ParallelLayout
    memory: int

    def __str__(self) -> str:
        sizes = {axis: self.layout.sizes[axis] for axis in ("tp", "pp", "cp", "ep", "dp")}
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


@without_gpus
def search_layouts(
    actor: ActorConfig, ranks_on_nodes: Sequence[int], lengths: Lengths, gpu_memory: float, *, layers: str
) -> LayoutSearch:
    """Estimate the memory of an update of the actor in every layout whose tensor-parallel ranks are on one node.

    Context parallelism is that of the configuration. Dry runs of few ranks are scaled; see ``_update``.

    Args:
        actor: the actor.
        ranks_on_nodes: number of ranks of each node.
        lengths: of the rows.
        gpu_memory: [bytes] of a GPU.
        layers: ``transformer_engine`` or ``local``.
    """
    world_size = sum(ranks_on_nodes)
    fitting, too_large, rejected = list[LayoutMemory](), list[LayoutMemory](), list[str]()
    actor = replace(actor, model=replace(actor.model, transformer_impl=layers))
    for parallel in _layouts(actor, world_size, math.gcd(*ranks_on_nodes)):
        try:
            memory = _update(replace(actor, parallel=parallel), world_size, lengths)
        except MControllerError as error:  # the layout does not fit the model
            rejected.append(str(error))
            continue
        tried = LayoutMemory(parallel, parallel.layout(world_size), memory)
        (fitting if memory <= MOST_OF_MEMORY * gpu_memory else too_large).append(tried)
    fitting.sort(key=lambda tried: (tried.layout.tp * tried.layout.pp * tried.layout.ep, tried.memory))
    too_large.sort(key=lambda tried: tried.memory)
    return LayoutSearch(fitting, too_large, rejected)


def _update(actor: ActorConfig, world_size: int, lengths: Lengths) -> int:
    """Return the bytes of an update on the stage that needs the most.

    A layout with at most 2 ranks of the axes pp, ep and dp runs: the first and the last stage, with one and with two
    micro-batches in flight. More in flight add as much each. Experts are divided over ep, and the optimizer's state
    over dp and edp. All stages run of a model whose layers are named by their numbers, or written as a pattern: with
    fewer layers it is not the same.

    Raises:
        MControllerError: the layout does not fit the model.
    """
    parallel, layout = actor.parallel, actor.parallel.layout(world_size)
    check_fit(actor.model, parallel)
    model, copies = actor.model, min(world_size, 2)
    small = replace(parallel, ep=min(model.num_moe_experts or 1, copies))
    if not model.names_layers and model.hybrid_layer_pattern is None:
        small = replace(small, pp=min(parallel.pp, 2))
        layers = model.num_layers // parallel.pp
        transformer = {
            name: [*value[:layers], *value[-layers:]] if small.pp == 2 and isinstance(value, (list, tuple)) else value
            for name, value in model.transformer.items()
        }
        model = replace(model, num_layers=layers * small.pp, transformer=transformer)
    config = replace(actor, parallel=small, model=model)
    variant = variant_of(config, small.layout(small.tp * small.cp * small.pp * copies))
    role = ModelRole(ActorRolloutRefWorker, config, "actor", variant)
    call = RoleCall(role, "update_actor", lengths.prompt, lengths.response)
    rows = call.rows[0]
    count = math.ceil(actor.ppo_mini_batch_size / layout.dp / rows)
    uses = list(stage_uses(replace(call, micro_batches=min(count, 2 * small.pp - 1))))
    if small.pp == 2 and count > 1:
        one = stage_uses(replace(call, micro_batches=1))
        uses[0] = uses[0].plus(min(count, parallel.pp) - 2, uses[0], one[0])
    variant = variant_of(actor, layout)
    sharded = variant.distributed_optimizer
    nccl = nccl_bytes(layout, experts=model.num_moe_experts is not None, sharded=sharded)
    return max(_scaled_peak(use, role.variant, variant) for use in uses) + nccl


def _scaled_peak(use: Use, ran: Variant, other: Variant) -> int:
    """Return the peak of a rank in another layout that has the same tp, cp and etp."""
    fewer = ran.layout.ep / other.layout.ep
    trained_experts = fewer * use.trained_experts
    weights = use.weights - use.experts + fewer * use.experts
    trained = use.trained - use.trained_experts + trained_experts

    def states(variant: Variant, dense: float, experts: float) -> float:
        layout = variant.layout
        if not variant.distributed_optimizer:
            return dense + experts
        return dense / (layout.dp * layout.cp) + experts / layout.sizes["edp"]

    before = states(ran, use.trained - use.trained_experts, use.trained_experts)
    after = states(other, trained - trained_experts, trained_experts)
    scales = {"parameters": (weights, use.weights), "gradients": (trained, use.trained), "optimizer": (after, before)}
    # A stage may train nothing: adapters of some layers.
    changes = [(new / old - 1) * use.by_kind.get(kind, 0) for kind, (new, old) in scales.items() if old]
    return round(use.peak + sum(changes))


def _layouts(actor: ActorConfig, world_size: int, most_tp: int) -> Iterator[ParallelConfig]:
    given, experts = actor.parallel, actor.model.num_moe_experts or 1
    for tp in _divisors(most_tp):
        for pp in _divisors(world_size // tp):
            for ep in _divisors(math.gcd(experts, world_size // pp)):
                sequence = tp > 1 and (given.sequence_parallel or experts > 1 or given.tp == 1)
                etp = 1 if experts > 1 else None
                yield replace(given, tp=tp, pp=pp, ep=ep, etp=etp, vpp=None, sequence_parallel=sequence)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
