"""Checkpoints of local layers load into Transformer Engine's, and back, with the optimizer's state."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model

from tests.forking import run_ranks
from tests.workers.roles import MODEL, actor, experience, largest_difference, own_shard, weights

pytestmark = pytest.mark.processes

Weights = dict[str, torch.Tensor]
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"qk_layernorm": True},
    "experts": {"num_moe_experts": 4, "moe_ffn_hidden_size": 32},
}


def trained(
    parallel: dict[str, Any], model: dict[str, Any], implementation: str, load: str | None, save: str
) -> tuple[Weights, Weights]:
    """Load or train one update, save, and train one update more: the weights that were saved, and the last ones."""
    changes = {"transformer_impl": implementation, "seed": 99 if load else 1234}
    optim = {"distributed_optimizer": True}
    worker = actor(parallel, "actor_rollout_ref", optim=optim, model=MODEL | model | changes)
    batch = own_shard(experience(8), worker)
    if load is None:
        worker.update_actor(batch)
    else:
        worker.load_checkpoint(load)
    worker.save_checkpoint(save, global_step=1)
    saved = weights(worker)
    worker.update_actor(batch)
    return saved, weights(worker)


@pytest.mark.parametrize("model", MODELS)
def test_checkpoints_go_from_local_layers_to_transformer_engines_and_back(model: str, tmp_path: Path) -> None:
    first, second, third = (str(tmp_path / name) for name in "abc")
    sharded = {"tp": 2, "sequence_parallel": True}
    saved, expected = run_ranks(trained, 2, sharded, MODELS[model], "local", None, first)[0]
    assert largest_difference(saved, expected) > 1e-3
    for parallel, implementation, load, save in (
        ({"pp": 2}, "transformer_engine", first, second),
        (sharded, "local", second, third),
    ):
        loaded, later = run_ranks(trained, 2, parallel, MODELS[model], implementation, load, save)[0]
        assert largest_difference(loaded, saved) == 0
        assert largest_difference(later, expected) < 2e-5


FP8 = {"dtype": "bfloat16", "hidden_size": 64, "ffn_hidden_size": 128, "num_query_groups": 4}


def in_fp8(recipe: str, load: str | None, save: str | None) -> tuple[Weights, Weights, Weights]:
    """Load or train one update in FP8, save, train one more: weights and scales when saved, and the last weights."""
    torch.cuda.get_device_capability = lambda *_: (10, 0)  # type: ignore[method-assign]  # has every recipe
    transformer = {"fp8": "hybrid", "fp8_recipe": recipe}
    worker = actor({}, "actor", model=MODEL | FP8 | {"transformer": transformer})
    if load is None:
        worker.update_actor(experience(8))
    else:
        worker.load_checkpoint(load)
    if save is not None:
        worker.save_checkpoint(save, global_step=1)
    state = unwrap_model(worker.model[0]).state_dict()
    states = {name: value for name, value in state.items() if name.endswith("linear_proj._extra_state")}
    scales = {
        name: pickle.loads(value.cpu().numpy().tobytes())["scale_fwd"]
        for name, value in states.items()
        if recipe == "delayed"
    }
    saved = weights(worker)
    worker.update_actor(experience(8))
    return saved, scales, weights(worker)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_training_in_fp8_continues_from_a_checkpoint_with_its_scales(recipe: str, tmp_path: Path) -> None:
    [(saved, scales_saved, expected)] = run_ranks(in_fp8, 1, recipe, None, str(tmp_path))
    [(loaded, scales_loaded, later)] = run_ranks(in_fp8, 1, recipe, str(tmp_path), None)
    assert largest_difference(saved, loaded) == 0
    assert largest_difference(later, expected) == 0 < largest_difference(later, loaded)
    if recipe == "delayed":
        assert largest_difference(scales_saved, scales_loaded) == 0
        assert len(scales_saved) == MODEL["num_layers"] and all(scale[0] != 1 for scale in scales_saved.values())
