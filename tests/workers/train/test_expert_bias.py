"""The bias of experts moves with the step of the optimizer, by the tokens of all gradients that the step applies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcontroller import DataProto
from tests.ranks import run_ranks
from tests.workers.roles import actor, experience, own_shard
from workers.train.nonfinite import NonFiniteGradient
from workers.weights.shards import model_shards

pytestmark = pytest.mark.simulated

ROWS, EXPERTS = 16, 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"one process": (1, {}), "dp2": (2, {}), "pp2": (2, {"pp": 2})}


def biased_actor(
    parallel: dict[str, Any], balancing: str = "none", dtype: str = "float32", on_nonfinite: str = "raise"
) -> Any:
    """Return an actor whose bias of experts moves by 1 in a step; equal tokens for all experts leave it."""
    routing = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    routing |= {"moe_router_load_balancing_type": balancing, "moe_router_bias_update_rate": 1.0}
    routing |= {"moe_aux_loss_coeff": 0.2} if balancing != "none" else {}
    model = {"num_moe_experts": EXPERTS, "moe_ffn_hidden_size": 32, "dtype": dtype, "transformer": routing}
    optim: dict[str, Any] = {"lr": 1e-3, "warmup_steps": 0, "on_nonfinite": on_nonfinite}
    if dtype == "float16":
        optim["megatron"] = {"initial_loss_scale": 16.0}
    return actor(parallel, "actor", model=model, optim=optim, ppo_epochs=1, ppo_mini_batch_size=ROWS)


def bias(worker: Any) -> torch.Tensor:
    """Return the bias of all experts of this rank's layers, ``[layers, experts]``."""
    routers = [module for chunk in worker.model for module in chunk.modules() if hasattr(module, "expert_bias")]
    return torch.stack([router.expert_bias for router in routers]).clone()


def moved(parallel: dict[str, Any], accumulated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bias after a step on the first half of the rows, and after one on all rows."""
    rows, states = experience(ROWS), []
    halves = rows[:8], rows[8:]
    for parts in (halves[:1], halves):
        worker = biased_actor(parallel)
        if accumulated:
            worker.forward_backward(own_shard(rows[12:], worker))  # dropped
            for index, part in enumerate(parts):
                worker.forward_backward(own_shard(part, worker), accumulate=index > 0)
            worker.optim_step()
        else:
            worker.update_actor(own_shard(DataProto.concat(list(parts)), worker))
        states.append(bias(worker))
    return states[0], states[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_several_calls_move_the_bias_once_by_all_their_tokens(layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    updated, accumulated = (run_ranks(moved, world_size, parallel, path) for path in (False, True))
    for expected, actual in zip(updated, accumulated, strict=True):
        assert not torch.equal(*expected)
        assert set(expected[1].flatten().tolist()) <= {-1.0, 0.0, 1.0}
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


def kept() -> tuple[list[str], list[str], bool]:
    """Return the names of biases, and of what gradients changed; whether the version of the weights is the same."""
    worker = biased_actor({})
    named = {shard.part.name: shard.param for shard in model_shards(worker.model, worker.context)}
    before, version = {name: tensor.clone() for name, tensor in named.items()}, worker.state.weights_version
    worker.forward_backward(own_shard(experience(ROWS), worker))
    changed = [name for name, tensor in named.items() if not torch.equal(tensor, before[name])]
    return [name for name in named if "expert_bias" in name], changed, worker.state.weights_version == version


def test_gradients_that_no_step_applies_leave_the_weights_and_their_version() -> None:
    buffers, changed, same_version = run_ranks(kept, 1)[0]
    assert len(buffers) == 4 and changed == [] and same_version


def spoiled(how: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the bias after a step that was not made and after the next, and the bias after the latter alone."""
    settings: dict[str, Any] = {"dtype": "float16"} if how == "overflow" else {}
    settings |= {"on_nonfinite": "raise" if how == "raise" else "skip"}
    worker, other = biased_actor({}, **settings), biased_actor({}, **settings)
    rows = experience(ROWS)
    column, scale = ("advantages", 1e6) if how == "overflow" else ("old_log_probs", torch.nan)
    worker.forward_backward(rows.with_tensors({column: rows.batch[column] * scale}))
    if how == "raise":
        with pytest.raises(NonFiniteGradient):
            worker.optim_step()
    else:
        assert worker.optim_step()["skipped_steps"] == 1
    states = [bias(worker)]
    for role in (worker, other):
        role.update_actor(rows)
    return [*states, bias(worker)], bias(other)


@pytest.mark.parametrize("how", ["skip", "raise", "overflow"])
def test_a_step_that_is_not_made_leaves_the_bias_and_no_counted_tokens(how: str) -> None:
    (((skipped, made), expected),) = run_ranks(spoiled, 1, how)
    assert torch.equal(skipped, torch.zeros_like(skipped))
    assert torch.equal(made, expected) and float(expected.abs().max()) == 1.0


def losses_of_parts(spoil: bool) -> tuple[dict[str, float], list[list[float]]]:
    """Return the metrics of a step with gradients of two calls, and the tokens that the routers counted in it."""
    worker = biased_actor({}, "global_aux_loss", on_nonfinite="skip")
    rows = experience(ROWS)
    second = rows.with_tensors({"old_log_probs": rows.batch["old_log_probs"] * torch.nan}) if spoil else rows
    worker.forward_backward(rows)
    worker.forward_backward(second, accumulate=True)
    routers = [module for module in worker.model[0].modules() if hasattr(module, "global_tokens_per_expert")]
    counted = [router.global_tokens_per_expert.tolist() for router in routers]
    assert all(router.global_tokens_per_expert.equal(router.local_tokens_per_expert) for router in routers)
    return worker.optim_step(), counted


def test_losses_of_routers_count_all_parts_of_a_step_or_none() -> None:
    ((metrics, counted),) = run_ranks(losses_of_parts, 1, False)
    tokens = 2 * int(experience(ROWS).batch["attention_mask"].sum())
    assert [sum(layer) for layer in counted] == [tokens * 2] * len(counted)  # two experts for a token
    assert metrics["moe_global_aux_loss"] > 0
    ((metrics, _),) = run_ranks(losses_of_parts, 1, True)
    assert metrics["skipped_steps"] == 1 and "moe_global_aux_loss" not in metrics
