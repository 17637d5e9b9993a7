"""Training in FP8: which products are in it, with which recipe and which numbers of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model
from safetensors.torch import load_file
from transformer_engine import received

from tests.forking import run_ranks
from tests.workers.roles import MODEL, actor, experience, largest_difference, own_shard, prompts, weights

pytestmark = pytest.mark.processes

SIZES = {"hidden_size": 64, "ffn_hidden_size": 256, "num_query_groups": 4, "dtype": "bfloat16"}
SAMPLED = {"do_sample": False, "eos_token_id": 1, "pad_token_id": 0}


def trained(parallel: dict[str, Any], packed: bool, extra: dict[str, Any]) -> dict[str, Any]:
    # The fake CUDA device is a Hopper; these recipes run on the next generation too.
    torch.cuda.get_device_capability = lambda *_: (10, 0)  # type: ignore[method-assign]
    role = "actor" if "cp" in parallel else "actor_rollout_ref"
    model = MODEL | SIZES | (EXPERTS if "ep" in parallel else {}) | {"transformer": extra}
    worker = actor(parallel, role, packed=packed, model=model, ppo_epochs=1)
    before = weights(worker)
    worker.update_actor(own_shard(experience(16), worker))
    recipes = Counter(type(call["recipe"]).__name__ for call in received.calls["fp8_autocast"] if call["enabled"])
    shapes = [call["query"] for call in received.calls["DotProductAttention.forward"]]
    received.calls.clear()
    if role != "actor":  # generation runs with cp=1
        worker.generate_sequences(own_shard(prompts(16, SAMPLED), worker))
    return {
        "change": largest_difference(weights(worker), before),
        "weights": weights(worker),
        "recipes": recipes,
        "shapes": shapes,
        "while generating": len(received.calls["fp8_autocast"]),
    }


RECIPES = {
    "delayed": "TEDelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "cp2": (2, {"cp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    "experts on ep2": (2, {"ep": 2}),
}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 64}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_packed_rows_train_in_fp8_with_whole_blocks_of_tokens(recipe: str, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    result = run_ranks(trained, world_size, parallel, True, {"fp8": "hybrid", "fp8_recipe": recipe})[0]
    assert set(result["recipes"]) == {RECIPES[recipe]} and result["while generating"] == 0
    block = 32 if recipe == "mxfp8" else 16
    assert {shape[0] % block for shape in result["shapes"]} == {0}
    assert result["change"] > 1e-3


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_changes_the_products_and_trains_to_nearly_the_same_weights(recipe: str) -> None:
    [plain] = run_ranks(trained, 1, {}, False, {})
    [fp8] = run_ranks(trained, 1, {}, False, {"fp8": "hybrid", "fp8_recipe": recipe})
    assert not plain["recipes"] and set(fp8["recipes"]) == {RECIPES[recipe]}
    assert 0 < largest_difference(plain["weights"], fp8["weights"]) < 3 * plain["change"]


def moved(parallel: dict[str, Any], recipe: str, path: str) -> dict[str, Any]:
    """The weights after an update in FP8, what is exported, and the optimizer's copies in float32."""
    torch.cuda.get_device_capability = lambda *_: (10, 0)  # type: ignore[method-assign]
    fields = SIZES | {"hidden_size": 64, "transformer": {"fp8": "hybrid", "fp8_recipe": recipe}}
    worker = actor(parallel, "actor_rollout", model=MODEL | fields, ppo_epochs=1)
    worker.update_actor(own_shard(experience(16), worker))
    worker.generate_sequences(own_shard(prompts(8, SAMPLED), worker))
    in_fp8 = sum(len(each._fp8_workspaces) for each in unwrap_model(worker.model[0]).modules() if hasattr(each, "fp8"))
    worker.export_hf(path)
    rounded = [
        torch.equal(copy.bfloat16(), parameter)
        for copies, parameters in copies_in_float32(worker.state.optimizer)
        for copy, parameter in zip(copies, parameters, strict=True)
    ]
    return {"weights": weights(worker), "rounded": rounded, "in fp8": in_fp8}


def copies_in_float32(optimizer: Any) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        yield from zip(part.fp32_from_float16_groups, part.float16_groups, strict=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_move_to_files_from_masters_and_not_from_fp8(recipe: str, tmp_path: Path) -> None:
    result = run_ranks(moved, 2, {"tp": 2, "sequence_parallel": True}, recipe, str(tmp_path / "out"))
    trained = result[0]["weights"]
    assert all(rank["in fp8"] > 0 and rank["rounded"] and all(rank["rounded"]) for rank in result)
    exported = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        exported |= load_file(file)
    assert torch.equal(exported["lm_head.weight"], trained["output_layer.weight"])
    for layer in range(MODEL["num_layers"]):
        name = f"layers.{layer}.mlp"
        assert torch.equal(exported[f"model.{name}.down_proj.weight"], trained[f"decoder.{name}.linear_fc2.weight"])
        values = trained[f"decoder.{name}.linear_fc2.weight"].float()
        assert len((values / values.abs().amax() * 448).unique()) > 256  # more values than FP8 has


def offloaded_between_updates(offloads: bool) -> dict[str, Any]:
    """Train, offload and train again: what is left on the GPU, what was reported as freed, and the last weights."""
    transformer = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    worker = actor({}, "actor", model=MODEL | SIZES | {"transformer": transformer}, ppo_epochs=1)
    batch = own_shard(experience(16), worker)
    worker.update_actor(batch)
    held = torch.cuda.memory_allocated()
    freed = worker.offload() if offloads else 0
    left = torch.cuda.memory_allocated()
    in_fp8 = sum(module._fp8_workspaces != {} for module in worker.model[0].modules() if hasattr(module, "fp8"))
    worker.update_actor(batch)
    return {"freed": freed, "held": held, "left": left, "in fp8": in_fp8, "weights": weights(worker)}


def test_an_offload_frees_the_weights_in_fp8_and_training_goes_on_the_same() -> None:
    [stayed] = run_ranks(offloaded_between_updates, 1, False)
    [offloaded] = run_ranks(offloaded_between_updates, 1, True)
    assert stayed["in fp8"] > 0 == offloaded["in fp8"]
    assert offloaded["left"] < 1e-3 * offloaded["held"]
    assert offloaded["freed"] == pytest.approx(offloaded["held"] - offloaded["left"], rel=1e-3)
    assert largest_difference(stayed["weights"], offloaded["weights"]) == 0
