"""Layouts compute what one process computes in harder cases: several epochs, uneven shards, experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.workers.roles import (
    FOR_GRADIENTS,
    SAMPLED,
    accumulated_gradients,
    actor,
    critic,
    experience,
    largest_difference,
    own_shard,
    prompts,
    weights,
)

pytestmark = pytest.mark.simulated

TOLERANCE = 1e-5
ROWS = 16
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-pp2-dp2": (8, {"tp": 2, "pp": 2}),
    "dp2-distributed-optimizer": (2, {}),
    "pp2-dp2-distributed-optimizer-overlap": (4, {"pp": 2}),
    "tp2-pp2-dp2-micro-batches-by-tokens": (8, {"tp": 2, "pp": 2}),
    "pp2-vpp2-dp2-micro-batches-by-tokens": (4, {"pp": 2, "vpp": 2}),
    "cp2-dp2-packed-by-tokens": (4, {"cp": 2}),
}
"""What an update of several mini-batches and epochs depends on: dp, micro-batches, stages and the optimizer.

The parity matrix has the axes alone.
"""
OPTIM = {
    "dp2-distributed-optimizer": ["distributed_optimizer"],
    "pp2-dp2-distributed-optimizer-overlap": ["distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"],
}


@functools.cache
def in_one_process(run: Callable[..., Any]) -> dict[str, Any]:
    return run_ranks(run, 1, {})[0]


def on(layout: str, run: Callable[..., Any]) -> list[dict[str, Any]]:
    world_size, parallel = LAYOUTS[layout]
    return run_ranks(run, world_size, parallel, *OPTIM.get(layout, []))


def updated(parallel: dict[str, Any], *optim: str, max_tokens: int = 0, packed: bool = False) -> dict[str, Any]:
    """Return weights and metrics after several epochs of shuffled mini-batches."""
    change: dict[str, Any] = {"optim": dict.fromkeys(optim, True), "packed": packed}
    change["ppo_max_tokens_per_micro_batch"] = max_tokens
    roles = actor(parallel, "actor", use_kl_loss=True, entropy_coeff=0.01, **change), critic(parallel, **change)
    batch = experience(ROWS)
    metrics = roles[0].update_actor(own_shard(batch, roles[0])).meta_info["metrics"]
    metrics |= roles[1].update_critic(own_shard(batch, roles[1])).meta_info["metrics"]
    state = {f"{index}.{name}": tensor for index, role in enumerate(roles) for name, tensor in weights(role).items()}
    return {"weights": state, "metrics": metrics}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_update_has_the_weights_and_metrics_of_one_process(layout: str) -> None:
    expected = in_one_process(updated)
    max_tokens = 37 if layout.endswith("by-tokens") else 0
    run = functools.partial(updated, max_tokens=max_tokens, packed="packed" in layout)
    ranks = on(layout, run)
    assert largest_difference(expected["weights"], ranks[0]["weights"]) < TOLERANCE
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(expected["metrics"], abs=TOLERANCE, rel=TOLERANCE)


def gradients(parallel: dict[str, Any]) -> dict[str, Any]:
    """Return the gradient of one mini-batch and its norm; the learning rate is 0."""
    worker = actor(parallel, "actor", ppo_mini_batch_size=ROWS, ppo_epochs=1, optim=FOR_GRADIENTS)
    metrics = worker.update_actor(own_shard(experience(ROWS), worker)).meta_info["metrics"]
    return {"gradients": accumulated_gradients(worker), "norm": metrics["actor/grad_norm"]}


def test_gradients_equal_those_of_one_process() -> None:
    expected = in_one_process(gradients)
    found = on("tp2-pp2-dp2", gradients)[0]
    assert found["norm"] == pytest.approx(expected["norm"], abs=TOLERANCE)
    assert max(float(gradient.abs().max()) for gradient in expected["gradients"].values()) > 1e-3
    assert largest_difference(expected["gradients"], found["gradients"]) < TOLERANCE


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
    found = run_ranks(updated_unevenly, 4 * pp, {"pp": pp}, filled_at)
    assert largest_difference(expected, found[0]) < TOLERANCE


def updated_on_three_rows(parallel: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Update on three rows; of four ranks, one has only a row without loss."""
    worker = actor(parallel, "actor", ppo_mini_batch_size=2)
    batch = experience(4)
    batch.batch["response_mask"][3] = 0
    worker.update_actor(own_shard(batch if worker.world_size > 1 else batch[:3], worker))
    return weights(worker)


def test_rank_without_rows_to_train_on_takes_part() -> None:
    expected, found = run_ranks(updated_on_three_rows, 1, {})[0], run_ranks(updated_on_three_rows, 4, {})[0]
    assert largest_difference(expected, found) < TOLERANCE


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
