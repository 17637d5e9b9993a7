"""Training in FP8: which products are in it, with which recipe and which numbers of tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformer_engine import received

from tests.forking import run_ranks
from tests.workers.roles import MODEL, actor, experience, largest_difference, own_shard, prompts, weights

SIZES = {"hidden_size": 64, "ffn_hidden_size": 256, "num_query_groups": 4, "dtype": "bfloat16"}
SAMPLED = {"do_sample": False, "eos_token_id": 1, "pad_token_id": 0}


def trained(parallel: dict[str, Any], packed: bool, further: dict[str, Any]) -> dict[str, Any]:
    # The pretended device is a Hopper; these recipes run on the next generation too.
    torch.cuda.get_device_capability = lambda *_: (10, 0)  # type: ignore[method-assign]
    role = "actor" if "cp" in parallel else "actor_rollout_ref"
    worker = actor(parallel, role, packed=packed, model=MODEL | SIZES | {"transformer": further}, ppo_epochs=1)
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
}
CASES = [(recipe, "one process") for recipe in RECIPES] + [
    ("mxfp8", name) for name, (ranks, _) in LAYOUTS.items() if ranks > 1
]


@pytest.mark.parametrize(("recipe", "layout"), CASES)
def test_packed_rows_train_in_fp8_with_whole_blocks_of_tokens(recipe: str, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    found = run_ranks(trained, world_size, parallel, True, {"fp8": "hybrid", "fp8_recipe": recipe})[0]
    assert set(found["recipes"]) == {RECIPES[recipe]} and found["while generating"] == 0
    block = 32 if recipe == "mxfp8" else 16
    assert {shape[0] % block for shape in found["shapes"]} == {0}
    assert found["change"] > 1e-3


def test_fp8_changes_the_products_and_trains_to_nearly_the_same_weights() -> None:
    [plain] = run_ranks(trained, 1, {}, False, {})
    [fp8] = run_ranks(trained, 1, {}, False, {"fp8": "hybrid"})
    assert not plain["recipes"]
    assert 0 < largest_difference(plain["weights"], fp8["weights"]) < 3 * plain["change"]
