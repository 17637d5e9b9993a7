"""The optimizer's state in a checkpoint, loaded by an optimizer that is divided into other parts.

If experts are divided over other ranks than the other weights (ep, or etp unlike tp), Megatron chains two optimizers,
and saves the state that belongs to no tensor for each of them. Tensors are found by their names, in whatever part they
are. Of the remaining state only the number of steps and the scale of the loss come from the checkpoint. Learning rates,
betas and weight decay are the run's.

A distributed optimizer is saved by weights (Megatron's ``fully_reshardable``), or in its buckets (``dp_reshardable``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer

from mcontroller.errors import DataError
from parallel_state.agreement import all_gather_values, raise_on_every_rank
from workers.checkpoint.manifest import Buckets, Manifest


def buckets_to_save(optimizer: MegatronOptimizer) -> Buckets | None:
    """Return the buckets of a distributed optimizer on all ranks (a collective).

    Returns:
        None if it is not distributed, or if a rank's part of a bucket has no weight, which Megatron cannot save: a
        bucket of few elements over many ranks.
    """
    if not optimizer.config.use_distributed_optimizer:
        return None
    has_weights = all(
        bucket["param_map"]
        for _, part in _parts(optimizer)
        for buffer in part.gbuf_ranges
        for buckets in buffer.values()
        for bucket in buckets
    )
    ranks = all_gather_values(_buckets(optimizer) if has_weights else None)
    if any(buckets is None for buckets in ranks):
        return None
    return {name: buffers for buckets in ranks for name, buffers in (buckets or {}).items()}


def check_buckets(
    optimizer: MegatronOptimizer, layout: Mapping[str, Any], manifest: Manifest, checkpoint: Path
) -> None:
    """Compare the optimizer's buckets with the buckets of a checkpoint (a collective).

    Args:
        optimizer: a distributed one, to load into.
        layout: of this run, as in the manifest.
        manifest: of the checkpoint, with buckets.
        checkpoint: its directory.

    Raises:
        DataError: on every rank, if axes other than dp and cp, or the buckets of a rank, differ.
    """
    saved, saved_layout = manifest["optimizer_buckets"] or {}, manifest["layout"] or {}
    axes = {axis: size for axis, size in saved_layout.items() if axis not in ("world_size", "cp")}
    differing = [f"{axis} is {layout[axis]}, saved with {size}" for axis, size in axes.items() if layout[axis] != size]

    def check() -> None:
        reasons = differing or [
            f"the buckets of {name} are {buffers}, saved as {saved.get(name)}"
            for name, buffers in _buckets(optimizer).items()
            if saved.get(name) != buffers
        ]
        if reasons:
            raise DataError(
                f"the optimizer of the checkpoint {str(checkpoint)!r} was saved in buckets (save_checkpoint with "
                f"reshardable=False), and cannot be loaded into others: {'; '.join(reasons):.500}. Load it with the "
                "axes it was saved with, and save it with reshardable=True, or with trainer.save_reshardable=true",
                path=str(checkpoint),
                differing=reasons,
            )

    raise_on_every_rank(check)


def _parts(optimizer: MegatronOptimizer) -> Iterator[tuple[int, Any]]:
    for index, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        if not part.is_stub_optimizer:
            yield index, part


def _buckets(optimizer: MegatronOptimizer) -> dict[str, list[list[Any]]]:
    """Return the buckets of this rank's optimizers, as a manifest has them."""
    return {
        f"optimizer {index} of model-parallel rank {part.data_parallel_group_idx}": [
            [str(buffer.param_dtype), str(buffer.grad_dtype), *(bucket.numel_unpadded for bucket in buffer.buckets)]
            for buffer in part.buffers
        ]
        for index, part in _parts(optimizer)
    }


def merge_optimizer_state(
    tensors: dict[Any, Any], sharded: Mapping[Any, Any], saved: Mapping[Any, Any]
) -> dict[Any, Any]:
    """Return the argument for ``load_state_dict`` of this rank's optimizer.

    Args:
        tensors: the loaded tensors, in the structure of ``sharded``.
        sharded: the optimizer's sharded state before loading.
        saved: the checkpoint's state that is not in tensors, in the parts of the optimizer that was saved.
    """
    if 0 in sharded:  # chained
        return {part: merge_optimizer_state(tensors.get(part, {}), sharded[part], saved) for part in sharded}
    if isinstance(sharded.get("optimizer"), ShardedObject):  # saved in buckets: the rest of the state is an object too
        objects = {name: value for name, value in sharded.items() if isinstance(value, ShardedObject)}
        saved = {name: tensors[name] for name in objects}
        tensors = {name: value for name, value in tensors.items() if name not in objects}
        sharded = {**sharded, **{name: value.data for name, value in objects.items()}}
    if "optimizer" in sharded:
        state = dict(
            tensors, optimizer=merge_optimizer_state(tensors.get("optimizer", {}), sharded["optimizer"], saved)
        )
        if "grad_scaler" in sharded:
            state["grad_scaler"] = _first(saved, "grad_scaler") or sharded["grad_scaler"]
        if "param_state_sharding_type" in sharded:
            state["param_state_sharding_type"] = sharded["param_state_sharding_type"]
        return state
    loaded_groups = tensors.get("param_groups", [{} for _ in sharded["param_groups"]])
    step, common_step = _first(saved, "step"), _first(saved, "common_step")
    steps = (
        {} if step is None else {"step": step}
    )  # of fused optimizers; torch's optimizers have it for every parameter
    groups = [group | loaded | steps for group, loaded in zip(sharded["param_groups"], loaded_groups, strict=True)]
    state = dict(tensors, param_groups=groups)
    if "state" in sharded:  # without tensors if the stage has no weights that are trained
        state["state"] = tensors.get("state", {}) | ({} if common_step is None else {"common_step": common_step})
    return state


def _first(saved: Any, key: str) -> Any:
    """The first value of ``key`` at any depth of ``saved``, since all parts have the same; None if there is none."""
    if isinstance(saved, Mapping) and key in saved:
        return saved[key]
    inner = saved.values() if isinstance(saved, Mapping) else saved if isinstance(saved, list) else ()
    return next((value for nested in inner if (value := _first(nested, key)) is not None), None)
