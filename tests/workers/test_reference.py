"""The reference that moves towards the policy by a share, in bfloat16 and after a resume."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.workers.roles import actor, weights

pytestmark = pytest.mark.simulated

EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "transformer": {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
}
EXPERTS["transformer"] |= {"moe_router_load_balancing_type": "none"}  # type: ignore[index]


def values(chunks: Any) -> dict[str, torch.Tensor]:
    """Return copies of the weights and buffers of the only chunk."""
    state = getattr(chunks[0], "module", chunks[0]).state_dict()
    return {name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}


@torch.no_grad()
def move_policy(worker: Any) -> None:
    """Add a tenth to every weight, and 1 to the bias of every expert."""
    for name, value in worker.model[0].module.state_dict().items():
        if isinstance(value, torch.Tensor):
            value.add_(1.0 if name.endswith("expert_bias") else 0.1)


def mixed(dtype: str, times: int, share: float) -> list[dict[str, torch.Tensor]]:
    """Return the reference, the policy, and the reference after it was moved ``times``."""
    worker = actor({}, "actor_ref", model=EXPERTS | {"dtype": dtype})
    move_policy(worker)
    before, policy = values(worker.reference), values(worker.model)
    for _ in range(times):
        worker.sync_reference(share)
    return [before, policy, values(worker.reference)]


@pytest.mark.parametrize(("dtype", "rounding"), [("bfloat16", 2.0**-8), ("float32", 1e-5)])
def test_100_small_moves_of_a_reference_add_up(dtype: str, rounding: float) -> None:
    before, policy, after = run_ranks(mixed, 1, dtype, 100, 0.01)[0]
    left = 0.99**100
    assert any(name.endswith("expert_bias") for name in after)
    for name, value in after.items():
        expected = left * before[name].double() + (1 - left) * policy[name].double()
        assert float((value.double() - expected).abs().max()) <= rounding * float(expected.abs().max()), name


def moved_on(path: str | None, parallel: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Move a reference five times; with a path, the last two times by another worker that resumes."""
    model = {"dtype": "bfloat16"}
    worker = actor(parallel, "actor_ref", model=model)
    move = functools.partial(worker.sync_reference, 0.01)
    for index in range(5):
        if index < 3:
            move_policy(worker)
        worker.offload()
        if index == 3 and path is not None:
            worker.save_checkpoint(path)
            worker = actor(parallel, "actor_ref", model=model | {"seed": 99})
            worker.load_checkpoint(path)
            move = functools.partial(worker.sync_reference, 0.01)
        move()
    worker.state.models["model"] = worker.reference
    return weights(worker)


@pytest.mark.parametrize(("world_size", "parallel"), [(1, {}), (2, {"tp": 2})], ids=["one-process", "tp"])
def test_moves_of_a_resumed_reference_are_exact(world_size: int, parallel: dict[str, Any], tmp_path: Path) -> None:
    expected = run_ranks(moved_on, world_size, None, parallel)[0]
    actual = run_ranks(moved_on, world_size, str(tmp_path), parallel)[0]
    differing = {name: float((actual[name] - expected[name]).abs().max()) for name in expected}
    assert {name: gap for name, gap in differing.items() if gap} == {}


def reference_alone(path: str) -> list[str]:
    """Return the names of the weights that a reference policy in a separate role loads with other values."""
    worker = actor({}, "actor_ref", model={"dtype": "bfloat16"})
    move_policy(worker)
    worker.sync_reference(0.3)
    worker.save_checkpoint(path)
    alone = actor({}, "ref", model={"dtype": "bfloat16", "seed": 99})
    alone.load_checkpoint(path)
    expected, actual = values(worker.reference), values(alone.reference)
    return [name for name in expected if not torch.equal(expected[name], actual[name])]


def test_a_reference_alone_loads_the_moved_values_rounded(tmp_path: Path) -> None:
    assert run_ranks(reference_alone, 1, str(tmp_path)) == [[]]


def copied_after_moves() -> bool:
    worker = actor({}, "actor_ref", model={"dtype": "bfloat16"})
    move_policy(worker)
    worker.sync_reference(0.01)
    worker.sync_reference()
    move_policy(worker)
    worker.sync_reference(0.5)
    policy, after = values(worker.model), values(worker.reference)
    return all(float((after[name] - policy[name]).abs().max()) < 0.06 for name in after)


def test_a_copy_of_the_policy_ends_earlier_moves() -> None:
    assert run_ranks(copied_after_moves, 1) == [True]
