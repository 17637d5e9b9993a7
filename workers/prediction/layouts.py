"""What a run will take, before it starts: the actor's update, generation, bytes and memory, and which layouts fit."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcontroller.errors import ConfigError, MControllerError
from mcontroller.files import replace_text
from mcontroller.trace.predicted import PREDICTION
from workers.communication.estimate import StepRows, Traffic, communication_of_step
from workers.config import ActorConfig, ParallelConfig
from workers.memory.estimate import Batch, PlannedRole
from workers.prediction.step_time import Hardware, generation_seconds, hardware_of, step_time, weight_seconds

DEFAULT = "h100"
SHOWN = 5
MOST_OF_MEMORY = 0.9
"""The share of a GPU's memory that a layout may fill to be one that fits."""
_GB = 2**30
# Settings whose communication is small or is not counted, and that would end the prediction.
_LEFT_OUT = (
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules", "cp_comm_type", "fp8"),
    *("moe_shared_expert_intermediate_size", "moe_z_loss_coeff", "moe_aux_loss_coeff"),
)


@dataclass(frozen=True)
class RunPrediction:
    """A step of a layout.

    Attributes:
        parallel: the layout of training.
        update: [s] of ``update_actor``.
        generate: [s] of generation in the workers.
        weights: [s] of a transfer of the weights to as many other GPUs.
        bubble: the share of the pipeline's time that is idle.
        traffic: the bytes of ``update_actor``.
        memory: [bytes] of a GPU in ``update_actor``.
    """

    parallel: ParallelConfig
    update: float
    generate: float
    weights: float
    bubble: float
    traffic: tuple[Traffic, ...]
    memory: int

    def __str__(self) -> str:
        sizes = {axis: getattr(self.parallel, axis) for axis in ("tp", "pp", "cp", "ep", "vpp")}
        layout = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size and size > 1) or "dp alone"
        moved = sum(each.nbytes for each in self.traffic) / _GB
        return (
            f"{layout}: update {self.update:.3g} s, bubble {self.bubble:.0%}, {moved:.3g} GB between ranks, "
            f"{self.memory / _GB:.1f} GB on a GPU"
        )


def predict_run(actor: ActorConfig, world_size: int, step: StepRows, hardware: Hardware) -> RunPrediction:
    """Predict a step of the actor, in which all rows have the largest length.

    Raises:
        LayoutError: the axes do not divide the world size.
        ConfigError: the rows do not fill micro-batches, or a setting is not counted.
    """
    length, size = step.length, actor.update_size
    planned = PlannedRole(actor.model, actor.parallel, world_size, actor.optim, ddp=actor.ddp, fused=True)
    rows = replace(step, rows=min(actor.ppo_mini_batch_size, step.rows))
    micro = max(1, size.tokens // length) if size.tokens else size.rows
    micro = max(1, min(micro, rows.rows // planned.layout.dp))
    transformer = {key: value for key, value in actor.model.transformer.items() if key not in _LEFT_OUT}
    if actor.model.num_moe_experts:
        transformer["moe_router_load_balancing_type"] = "none"
    model = replace(actor.model, transformer=transformer, add_bias_linear=False, add_qkv_bias=False, qk_layernorm=False)
    by_rows = replace(actor, ppo_micro_batch_size=micro, ppo_max_tokens_per_micro_batch=0, packed=False)
    optim = replace(planned.optim or actor.optim, optimizer="adam", megatron={})  # which moves the same bytes
    counted = replace(by_rows, model=model, optim=optim, sft_optim=None)
    traffic = communication_of_step(counted, world_size, rows)
    steps = math.ceil(step.rows / actor.ppo_mini_batch_size) * actor.ppo_epochs
    count = rows.rows // planned.layout.dp // micro
    batch = Batch(micro, length, step.targets, count, actor.log_prob_chunk_tokens)
    moved = [(each.axis, each.operation, each.nbytes) for each in traffic]
    fp8 = bool(actor.model.transformer.get("fp8"))
    update = step_time(actor.model, actor.parallel, world_size, count, micro, length, moved, hardware, fp8=fp8)
    again = 4 / 3 if actor.model.transformer.get("recompute_granularity") == "full" else 1.0
    engine, prompt = actor.parallel, length - step.targets
    rollout = actor.model, engine, world_size, step.rows, length, length, hardware
    return RunPrediction(
        actor.parallel,
        steps * (again * (update.seconds - update.once) + update.once),
        generation_seconds(*rollout, prompt=prompt, in_workers=actor.rollout.engine == "megatron"),
        weight_seconds(actor.model, world_size, world_size, hardware),
        update.bubble,
        tuple(replace(each, nbytes=steps * each.nbytes) for each in traffic),
        max(planned.train(stage, batch).total for stage in range(actor.parallel.pp)),
    )


@dataclass(frozen=True)
class LayoutSearch:
    """The layouts of training that were tried.

    Attributes:
        fitting: those that fit the model, the rows and the memory of a GPU, the fastest first.
        too_large: those that need more of a GPU's memory than ``MOST_OF_MEMORY``, the smallest first.
        rejected: why the others do not fit the model or the rows.
    """

    fitting: list[RunPrediction]
    too_large: list[RunPrediction]
    rejected: list[str]

    def summary(self, hardware: Hardware) -> str:
        """Return how many layouts fit, and why the others do not."""
        limit = f"{MOST_OF_MEMORY:.0%} of the {hardware.memory / _GB:.1f} GB of a GPU"
        text = f"{len(self.fitting)} layouts fit in {limit}"
        if len(self.fitting) > SHOWN:
            text += "; the fastest are above"
        if self.too_large:
            text += f"; {len(self.too_large)} need more, the least of them: {self.too_large[0]}"
        if self.rejected and not self.fitting:
            reason, count = Counter(self.rejected).most_common(1)[0]
            text += f"; {len(self.rejected)} cannot be used, {count} of them: {reason}"
        return text


def search_layouts(actor: ActorConfig, world_size: int, step: StepRows, hardware: Hardware) -> LayoutSearch:
    """Predict a step in every layout of training of so many ranks."""
    fitting, too_large, rejected = list[RunPrediction](), list[RunPrediction](), list[str]()
    for parallel in _layouts(actor, world_size, hardware):
        try:
            made = predict_run(replace(actor, parallel=parallel), world_size, step, hardware)
        except MControllerError as error:  # it does not fit the model or the rows
            rejected.append(str(error))
            continue
        (fitting if made.memory <= MOST_OF_MEMORY * hardware.memory else too_large).append(made)
    fitting.sort(key=lambda made: made.update)
    too_large.sort(key=lambda made: made.memory)
    return LayoutSearch(fitting, too_large, rejected)


def _layouts(actor: ActorConfig, world_size: int, hardware: Hardware) -> Iterator[ParallelConfig]:
    """Yield layouts of sizes that are powers of two, with the context parallelism of the configuration."""
    given, experts = actor.parallel, actor.model.num_moe_experts or 1
    for tp in _powers(min(hardware.gpus_per_node, world_size)):
        for pp in _powers(min(actor.model.num_layers, world_size // tp)):
            for ep in _powers(min(experts, world_size // pp)):
                sequence = tp > 1 and (given.sequence_parallel or experts > 1 or given.tp == 1)
                etp = 1 if experts > 1 else None
                yield replace(given, tp=tp, pp=pp, ep=ep, etp=etp, vpp=None, sequence_parallel=sequence)


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def prediction_lines(actor: ActorConfig, world_size: int, step: StepRows, name: str | None) -> list[str]:
    """Return what ``check`` prints: the layout of the configuration, and the ones that fit.

    Args:
        actor: the actor.
        world_size: number of ranks.
        step: the rows of a step of the run.
        name: of the hardware; None: the default.
    """
    name = name or DEFAULT
    hardware = hardware_of(name)
    lines = [f"prediction on {name}, for the order of layouts and not for milliseconds (docs/prediction.md):"]
    try:
        made = predict_run(actor, world_size, step, hardware)
        times = f"; generation in the workers {made.generate:.3g} s, weights to other GPUs {made.weights:.3g} s"
        lines.append(f"  this layout: {made}{times}")
    except ConfigError as error:
        lines.append(f"  this layout is not predicted: {error}")
    search = search_layouts(actor, world_size, step, hardware)
    lines += [f"  {place}. {made}" for place, made in enumerate(search.fitting[:SHOWN], 1)]
    return [*lines, f"  {search.summary(hardware)}"]


def write_prediction(
    directory: Path,
    actor: ActorConfig,
    world_size: int,
    prompts: int,
    name: str | None,
    *,
    on_gpu: bool,
    generates: bool = True,
) -> None:
    """Write the prediction of a run into its directory, for ``mcontroller trace``; without seconds on a CPU.

    Args:
        directory: of the run.
        actor: the actor.
        world_size: number of ranks.
        prompts: problems of a step.
        name: of the hardware; None: the default, on a GPU.
        on_gpu: whether the run uses GPUs.
        generates: whether the actor's group generates; the layout of another group is not predicted.
    """
    rollout = actor.rollout
    step = StepRows(prompts * rollout.n, rollout.prompt_length + rollout.response_length, rollout.response_length)
    try:
        made = predict_run(actor, world_size, step, hardware_of(name or DEFAULT))
    except ConfigError as error:
        replace_text(directory / PREDICTION, json.dumps({"error": str(error)}))
        return
    timed = on_gpu or name is not None
    seconds = {"update_actor": made.update} | ({"generate_sequences": made.generate} if generates else {})
    predicted: dict[str, Any] = {
        "hardware": name or (DEFAULT if on_gpu else "CPU"),
        "seconds": {f"actor.{method}": value for method, value in seconds.items()} if timed else {},
        "bubble": {"actor.update_actor": made.bubble} if made.parallel.pp > 1 else {},
        "bytes": {"actor.update_actor": _of_groups(made.traffic)},
        "memory": {"actor": made.memory} if on_gpu else {},
    }
    replace_text(directory / PREDICTION, json.dumps(predicted, indent=1))


def _of_groups(traffic: Sequence[Traffic]) -> dict[str, tuple[str, int]]:
    """Return the axis and the bytes of each group, by Megatron's name of it."""
    found: dict[str, tuple[str, int]] = {}
    for each in traffic:
        found[each.group] = each.axis, each.nbytes + found.get(each.group, ("", 0))[1]
    return found
