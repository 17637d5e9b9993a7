"""The optimizer's state in a checkpoint, loaded by an optimizer that is divided into other parts.

If experts are divided over other ranks than the other weights (ep, or etp unlike tp), Megatron chains two optimizers,
and saves the state that belongs to no tensor for each of them. Tensors are found by their names, in whatever part they
are. Of the remaining state only the number of steps and the scale of the loss come from the checkpoint. Learning rates,
betas and weight decay are those of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["merge_optimizer_state"]


def merge_optimizer_state(tensors: dict[Any, Any], own: Mapping[Any, Any], saved: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the argument for ``load_state_dict`` of this rank's optimizer.

    Args:
        tensors: the loaded tensors, in the structure of ``own``.
        own: the optimizer's sharded state before loading.
        saved: the checkpoint's state that is not in tensors, in the parts of the optimizer that was saved.
    """
    if 0 in own:  # chained
        return {part: merge_optimizer_state(tensors.get(part, {}), own[part], saved) for part in own}
    if "optimizer" in own:
        state = dict(tensors, optimizer=merge_optimizer_state(tensors.get("optimizer", {}), own["optimizer"], saved))
        if "grad_scaler" in own:
            state["grad_scaler"] = _first(saved, "grad_scaler") or own["grad_scaler"]
        if "param_state_sharding_type" in own:
            state["param_state_sharding_type"] = own["param_state_sharding_type"]
        return state
    loaded_groups = tensors.get("param_groups", [{} for _ in own["param_groups"]])
    step, common_step = _first(saved, "step"), _first(saved, "common_step")
    steps = {} if step is None else {"step": step}  # of fused optimizers; torch's own have it for every parameter
    groups = [group | loaded | steps for group, loaded in zip(own["param_groups"], loaded_groups, strict=True)]
    state = dict(tensors, param_groups=groups)
    if common_step is not None:
        state["state"] = dict(tensors["state"], common_step=common_step)
    return state


def _first(saved: Any, key: str) -> Any:
    """The first value of ``key`` at any depth of ``saved``, since all parts have the same; None if there is none."""
    if isinstance(saved, Mapping) and key in saved:
        return saved[key]
    inner = saved.values() if isinstance(saved, Mapping) else saved if isinstance(saved, list) else ()
    return next((found for each in inner if (found := _first(each, key)) is not None), None)
