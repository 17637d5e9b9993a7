"""Memory of a role's calls on each stage of the pipeline, from dry runs of its own worker.

A model of many layers runs with few of them on each stage. Memory is linear in the number of layers of each kind, and
in the number of micro-batches in flight, so that of a stage follows from its own numbers.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mcontroller.errors import ConfigError, MControllerError
from parallel_state.dry_run.errors import DryRunError
from parallel_state.dry_run.outcome import Outcome, Use
from parallel_state.dry_run.ranks import pipeline_of
from parallel_state.dry_run.run import dry_run_of
from parallel_state.layout import ParallelLayout
from workers.config import ModelConfig, ParallelConfig
from workers.dry_run import RoleCall
from workers.model.local_spec import expert_layers, layers_of_stage
from workers.model.transformer_config import transformer_config
from workers.verify.roles import ModelRole, variant_of
from workers.verify.sizes import one_layer_a_stage

_uses: dict[tuple[type, str], tuple[Use, ...]] = {}
"""What each stage uses, by the class of the worker and the call."""


def estimated(call: RoleCall) -> Outcome:
    """Return the outcome of a call with the memory of the first rank of each stage, or why there is none.

    Raises:
        ConfigError: the worker rejects its configuration.
    """
    variant = call.role.variant
    outcome = Outcome(variant.text, variant.layout)
    try:
        outcome.uses = dict(zip(pipeline_of(variant.layout), stage_uses(call), strict=True))
    except ConfigError:
        raise
    except MControllerError as error:
        outcome.failure = f"{type(error).__name__}: {error}"
    return outcome


def stage_uses(call: RoleCall) -> tuple[Use, ...]:
    """Return what a rank of each stage uses in a call.

    Args:
        call: the call; its role has the layout.

    Raises:
        DryRunError: the call fails without data.
        MControllerError: the model cannot be built in the layout.
    """
    model, layout, count = call.role.config.model, call.role.variant.layout, call.rows[1]
    if call.method in call.role.updates and layout.vpp is None and layout.pp > 2 and count > 2:
        one, two = (stage_uses(replace(call, micro_batches=number)) for number in (1, 2))
        flying = [min(count, layout.pp - stage) for stage in range(layout.pp)]  # micro-batches: 1F1B
        return tuple(b.plus(max(0, more - 2), b, a) for a, b, more in zip(one, two, flying, strict=True))
    if model.hybrid_layer_pattern is not None or model.names_layers:
        return _run(call)
    chunks, stages = layout.vpp or 1, _layers_of_stages(model, call.role.config.parallel, layout)
    main = any(map(any, stages))
    kinds = {kind for stage in stages for kind in stage}
    first, second = _numbers_of_layers(call)
    short = _with_three_stages(call.role) if layout.vpp is None and layout.pp > 3 else call.role
    if short is call.role and max(map(len, stages)) <= chunks * (second + len(kinds) - 1):
        return _run(call)

    def run(*layers: bool) -> tuple[Use, ...]:
        few = _with_layers(model, short.variant.layout, stages, layers)
        uses = _run(replace(call, role=replace(short, config=replace(short.config, model=few))))
        return (uses[0], *uses[1:-1] * (layout.pp - 2), uses[-1]) if short is not call.role else uses

    base, more = run(*[main] * first), run(*[main] * second)
    other = run(*[main] * first, not main) if len(kinds) == 2 else base
    uses = []
    for stage, layers in enumerate(stages):
        added = (layers.count(main) / chunks - first) / (second - first)
        use = base[stage].plus(added, more[stage], base[stage])
        uses.append(use.plus(layers.count(not main) / chunks, other[stage], base[stage]))
    return tuple(uses)


def _with_three_stages(role: ModelRole) -> ModelRole:
    """Return a role whose pipeline has three stages: those between the first and the last one are alike."""
    parallel = replace(role.config.parallel, pp=3)
    layout = parallel.layout(3 * role.variant.layout.world_size // role.variant.layout.pp)
    config = replace(role.config, parallel=parallel, model=one_layer_a_stage(role.config.model, layout))
    return replace(role, config=config, variant=variant_of(config, layout))


def _layers_of_stages(model: ModelConfig, parallel: ParallelConfig, layout: ParallelLayout) -> list[list[bool]]:
    """Return for every layer of every stage whether it has experts."""
    config = transformer_config(model, parallel)
    with_experts = expert_layers(config)
    chunks: Sequence[int | None] = [None] if layout.vpp is None else range(layout.vpp)
    return [
        [bool(with_experts[layer]) for chunk in chunks for layer in layers_of_stage(config, stage, chunk)]
        for stage in range(layout.pp)
    ]


def _numbers_of_layers(call: RoleCall) -> tuple[int, int]:
    """Return two numbers of layers in a chunk from which memory is linear.

    With a single layer, the peak of an update may be where a stage of many layers does not have it: in the optimizer's
    step, or at the embedding. Of a score, the second layer's input exists beside the stage's.
    """
    recomputed = call.role.config.model.transformer  # in groups of layers
    if call.method not in call.role.updates or recomputed.get("recompute_granularity") != "full":
        return 2, 3
    group = recomputed.get("recompute_num_layers") or 1
    return (2 * group, 3 * group) if recomputed.get("recompute_method") == "uniform" else (group + 1, group + 2)


def _with_layers(
    model: ModelConfig, layout: ParallelLayout, stages: Sequence[Sequence[bool]], kinds: Sequence[bool]
) -> ModelConfig:
    """Return the model with layers of these kinds in every chunk; those that are listed are a layer's of its kind."""
    count = layout.pp * (layout.vpp or 1)
    flat = [kind for stage in stages for kind in stage]
    few = one_layer_a_stage(model, layout)
    transformer: dict[str, Any] = dict(few.transformer)
    for name, value in model.transformer.items():
        if isinstance(value, (list, tuple)) and len(value) == model.num_layers:
            transformer[name] = [value[flat.index(kind)] for kind in kinds] * count
    if "recompute_num_layers" in model.transformer:
        transformer["recompute_num_layers"] = model.transformer["recompute_num_layers"]
    if model.num_moe_experts is not None:
        transformer["moe_layer_freq"] = [int(kind) for kind in kinds] * count
    return replace(few, num_layers=len(kinds) * count, transformer=transformer)


def _run(call: RoleCall) -> tuple[Use, ...]:
    key = call.role.worker_class, repr(call)
    if key not in _uses:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # for whoever starts the run
            warnings.simplefilter("ignore")
            outcome = dry_run_of(call, call.role.variant, second=False)
        if outcome.failure:
            raise DryRunError(f"{call.method} fails in layout {outcome.text}: {outcome.failure}", layout=outcome.text)
        _uses[key] = tuple(outcome.uses[rank] for rank in outcome.stages.values())
    return _uses[key]
