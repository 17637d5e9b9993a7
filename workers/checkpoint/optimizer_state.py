"""The optimizer's state in a checkpoint, read by one that has its weights in other parts.

Megatron chains an optimizer for experts to that of the other weights where they are divided over other ranks (ep, or
etp unlike tp), and saves what belongs to no tensor part by part. Tensors are found by their names, whatever part they
are in; of the rest only the number of steps and the scale of the loss are the checkpoint's. Rates, betas and weight
decay are those of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["with_own_groups"]


def with_own_groups(tensors: dict[Any, Any], own: Mapping[Any, Any], saved: Mapping[Any, Any]) -> dict[Any, Any]:
    """What ``load_state_dict`` of this rank's optimizer takes.

    Args:
        tensors: as they were loaded, in the structure of ``own``.
        own: the optimizer's sharded state before loading.
        saved: what the checkpoint holds beside tensors, in the parts of the optimizer that was saved.
    """
    if 0 in own:  # chained
        return {part: with_own_groups(tensors.get(part, {}), own[part], saved) for part in own}
    if "optimizer" in own:
        state = dict(tensors, optimizer=with_own_groups(tensors.get("optimizer", {}), own["optimizer"], saved))
        if "grad_scaler" in own:
            state["grad_scaler"] = _first(saved, "grad_scaler") or own["grad_scaler"]
        if "param_state_sharding_type" in own:
            state["param_state_sharding_type"] = own["param_state_sharding_type"]
        return state
    places = tensors.get("param_groups", [{} for _ in own["param_groups"]])
    step, common_step = _first(saved, "step"), _first(saved, "common_step")
    steps = {} if step is None else {"step": step}  # of fused optimizers; torch's own have it for every parameter
    groups = [group | place | steps for group, place in zip(own["param_groups"], places, strict=True)]
    state = dict(tensors, param_groups=groups)
    if common_step is not None:
        state["state"] = dict(tensors["state"], common_step=common_step)
    return state


def _first(held: Any, key: str) -> Any:
    """The value of ``key`` wherever in ``held`` it is first: all parts have the same; None where there is none."""
    if isinstance(held, Mapping) and key in held:
        return held[key]
    inner = held.values() if isinstance(held, Mapping) else held if isinstance(held, list) else ()
    return next((found for each in inner if (found := _first(each, key)) is not None), None)
