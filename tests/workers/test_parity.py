"""Layouts compute what one process computes in harder cases: several epochs, uneven shards, experts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.workers.roles import (
    FOR_GRADIENTS,
    MODEL,
    SAMPLED,
    actor,
    experience,
    largest_difference,
    own_shard,
    prompts,
    weights,
)
from trainer import PolicyLoss, register_policy_loss
from workers.actor import ActorRolloutRefWorker
from workers.losses.policy import clipped_policy_loss
from workers.weights.shards import named_shards
from workers.weights.whole_tensors import WholeTensors

pytestmark = pytest.mark.simulated

TOLERANCE = 1e-5
ROWS = 16


@functools.cache
def in_one_process(run: Callable[..., Any]) -> dict[str, Any]:
    return run_ranks(run, 1, {})[0]


def updated_unevenly(parallel: dict[str, Any], filled_at: list[int]) -> dict[str, torch.Tensor]:
    """Update on 13 rows and, at these positions, rows without loss, as dispatch fills shards; return the weights."""
    worker = actor(parallel, "actor", ppo_mini_batch_size=5, ppo_micro_batch_size=3)
    order = list(range(13))
    for position in filled_at:
        order.insert(position, 0)
    batch = experience(13).select_idxs(order)
    batch.batch["response_mask"][filled_at] = 0
    worker.update_actor(own_shard(batch, worker))
    return weights(worker)


@functools.cache
def updated_unevenly_in_one_process() -> dict[str, torch.Tensor]:
    return run_ranks(updated_unevenly, 1, {}, [])[0]


@pytest.mark.parametrize(
    ("pp", "filled_at"), [(2, []), (1, [3, 7, 15])], ids=["shards-of-unequal-size", "rows-without-loss"]
)
def test_mini_batches_do_not_depend_on_the_sizes_of_the_shards(pp: int, filled_at: list[int]) -> None:
    expected = updated_unevenly_in_one_process()
    actual = run_ranks(updated_unevenly, 4 * pp, {"pp": pp}, filled_at)
    assert largest_difference(expected, actual[0]) < TOLERANCE


def updated_on_three_rows(parallel: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Update on three rows; of four ranks, one has only a row without loss."""
    worker = actor(parallel, "actor", ppo_mini_batch_size=2)
    batch = experience(4)
    batch.batch["response_mask"][3] = 0
    worker.update_actor(own_shard(batch if worker.world_size > 1 else batch[:3], worker))
    return weights(worker)


def test_rank_without_rows_to_train_on_takes_part() -> None:
    expected, actual = run_ranks(updated_on_three_rows, 1, {})[0], run_ranks(updated_on_three_rows, 4, {})[0]
    assert largest_difference(expected, actual) < TOLERANCE


def updated_experts(parallel: dict[str, Any]) -> dict[str, Any]:
    """Generate with a mixture of experts, and update it."""
    experts = {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 32,
        "transformer": {"moe_router_load_balancing_type": "none"},
    }
    worker = actor(parallel, model=experts, ppo_epochs=1)
    generated = worker.generate_sequences(own_shard(prompts(ROWS, SAMPLED), worker))
    metrics = worker.update_actor(own_shard(experience(ROWS), worker)).meta_info["metrics"]
    responses = None if generated is None else generated.batch["responses"]
    return {"dp": worker.context.pg.dp.rank(), "responses": responses, "metrics": metrics, "weights": weights(worker)}


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [(4, {"ep": 2, "pp": 2}), (4, {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True})],
    ids=["ep2-pp2", "tp2-ep2-sp"],
)
def test_experts_divided_over_ranks_compute_what_one_process_computes(
    world_size: int, parallel: dict[str, Any]
) -> None:
    expected = in_one_process(updated_experts)
    ranks = run_ranks(updated_experts, world_size, parallel)
    assert largest_difference(expected["weights"], ranks[0]["weights"]) < TOLERANCE
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(expected["metrics"], abs=TOLERANCE, rel=TOLERANCE)
        if rank["responses"] is not None:
            assert torch.equal(rank["responses"], expected["responses"].chunk(2)[rank["dp"]])


@register_policy_loss("ppo_with_given_clips", columns=("clipped",))
def with_given_clips(
    log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any, *, columns: Any, **clip: Any
) -> PolicyLoss:
    """PPO's loss, in which a column says the tokens that are clipped."""
    ratio = torch.exp(log_probs - old_log_probs)
    clipped = columns["clipped"]
    return PolicyLoss(-advantages * torch.where(clipped > 0, ratio.detach(), ratio), ratio, clipped)


class NotingClips(ActorRolloutRefWorker):
    def loss(self, rows: Any, output: torch.Tensor) -> Any:
        old, advantages = rows.columns["old_log_probs"], rows.columns["advantages"]
        policy = clipped_policy_loss(output[0], old, advantages, rows.mask, clip_low=0.2, clip_high=0.2)
        self.clipped = policy.clipped * rows.mask
        return super().loss(rows, output)


def gradients_at_the_clip(
    parallel: dict[str, Any], policy_loss: str, columns: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the gradients of a model in bfloat16, and which tokens were clipped on this rank."""
    settings = {"ppo_mini_batch_size": ROWS, "ppo_micro_batch_size": ROWS, "ppo_epochs": 1, "optim": FOR_GRADIENTS}
    model = MODEL | {"dtype": "bfloat16"}
    worker = actor(parallel, "actor", NotingClips, model=model, policy_loss=policy_loss, **settings)
    worker.forward_backward(own_shard(experience(ROWS).with_tensors(columns), worker))

    def gradients() -> list[Any]:
        shards = named_shards(worker.model, worker.context)
        return [dataclasses.replace(shard, param=shard.param.main_grad) for shard in shards]

    with worker.context.activate():
        return {name: tensor.clone() for name, tensor in WholeTensors(gradients)}, worker.clipped


def scores_in_bfloat16() -> torch.Tensor:
    worker = actor({}, "actor", model=MODEL | {"dtype": "bfloat16"})
    return worker.compute_log_prob(experience(ROWS)).batch["old_log_probs"]


@functools.cache
def on_the_edge() -> dict[str, torch.Tensor]:
    """Return ``old_log_probs`` with which the ratio of every token is at the edge of its clip."""
    bound = torch.where(experience(ROWS).batch["advantages"] > 0, math.log(1.2), math.log(0.8))
    return {"old_log_probs": run_ranks(scores_in_bfloat16, 1)[0] - bound}


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"cp": 2}], ids=str)
def test_in_bfloat16_a_layout_has_the_gradients_of_one_process_if_the_same_tokens_are_clipped(
    parallel: dict[str, int],
) -> None:
    """Rounding moves tokens across the edge of a clip, and the gradient of one token may be 0.15."""
    ((_, clipped),) = run_ranks(gradients_at_the_clip, 1, {}, "ppo", on_the_edge())
    given = on_the_edge() | {"clipped": clipped}
    ((alone, _),) = run_ranks(gradients_at_the_clip, 1, {}, "ppo_with_given_clips", given)
    divided, _ = run_ranks(gradients_at_the_clip, 2, parallel, "ppo_with_given_clips", given)[0]
    assert largest_difference(divided, alone) < 0.05
