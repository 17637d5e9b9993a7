"""Recording and replay are the same in every layout as in one process, also if layers are computed again."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.workers.roles import largest_difference, own_shard, weights
from tests.workers.router_replay.setup import ROWS, batch_with_experts, policy

pytestmark = pytest.mark.simulated

TOLERANCE = 1e-5
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SOME_LAYERS = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
EXPERTS_ONLY = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
DENSE_FIRST = {"moe_layer_freq": [0, 1, 1, 1]}
TP2_SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "recompute-some": (1, {}, {"transformer": SOME_LAYERS}),
    "ep2": (2, {"ep": 2}, {}),
    "pp2-recompute": (2, {"pp": 2}, {"transformer": UNIFORM}),
    "pp2-vpp2-recompute-some": (2, {"pp": 2, "vpp": 2}, {"transformer": SOME_LAYERS}),
    "tp2-pp2-cp2-packed-by-tokens": (
        8,
        TP2_SP | {"pp": 2, "cp": 2, "ep": 2},
        {"packed": True, "ppo_max_tokens_per_micro_batch": 40, "transformer": EXPERTS_ONLY},
    ),
}


def replayed(parallel: dict[str, Any], changes: dict[str, Any], mode: str = "rollout") -> dict[str, Any]:
    """Return log-probabilities, and the metrics and weights of an update of several steps, with the experts given."""
    worker = policy(parallel, mode, **changes)
    shard = own_shard(batch_with_experts(3 if "moe_layer_freq" in changes.get("transformer", {}) else 4), worker)
    scores = worker.compute_log_prob(shard)
    metrics = worker.update_actor(shard).meta_info["metrics"]
    result = {"metrics": metrics, "weights": weights(worker), "dp": worker.context.pg.dp.rank()}
    return result | {"log_probs": None if scores is None else scores.batch["old_log_probs"]}


def recorded(parallel: dict[str, Any], changes: dict[str, Any]) -> tuple[int, torch.Tensor] | None:
    """Return the experts that the pass of the old log-probabilities records."""
    worker = policy(parallel, "old_log_probs", **changes)
    scores = worker.compute_log_prob(own_shard(batch_with_experts(), worker))
    return None if scores is None else (worker.context.pg.dp.rank(), scores.batch["routed_experts"])


@functools.cache
def alone(kind: str, dense_first: bool = False) -> Any:
    changes = {"transformer": DENSE_FIRST} if dense_first else {}
    if kind == "recorded":
        return run_ranks(recorded, 1, {}, changes)[0][1]
    return run_ranks(replayed, 1, {}, changes, kind)[0]


def assert_equal_to_one_process(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    shards = 1 + max(rank["dp"] for rank in ranks)
    assert largest_difference(expected["weights"], ranks[0]["weights"]) < TOLERANCE
    for rank in ranks:
        names = expected["metrics"].keys() - {"actor/mfu"}
        assert {name: rank["metrics"][name] for name in names} == pytest.approx(
            {name: expected["metrics"][name] for name in names}, abs=TOLERANCE, rel=TOLERANCE
        )
        if rank["log_probs"] is not None:
            mine = expected["log_probs"].chunk(shards)[rank["dp"]]
            assert float((rank["log_probs"] - mine).abs().max()) < TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replay_equals_that_of_one_process(layout: str) -> None:
    ranks, parallel, changes = LAYOUTS[layout]
    assert_equal_to_one_process(run_ranks(replayed, ranks, parallel, changes), alone("rollout"))


def test_given_experts_change_scores_and_updates() -> None:
    given, chosen = alone("rollout"), alone("none")
    assert float((given["log_probs"] - chosen["log_probs"]).abs().max()) > 0.1
    assert largest_difference(given["weights"], chosen["weights"]) > 1e-3


def test_stages_may_have_different_numbers_of_layers_with_experts() -> None:
    expected = alone("rollout", dense_first=True)
    changes = {"transformer": DENSE_FIRST | UNIFORM}
    assert_equal_to_one_process(run_ranks(replayed, 4, {"pp": 4}, changes), expected)


@pytest.mark.parametrize("layout", ["tp2-pp2-cp2-packed-by-tokens", "pp2-vpp2-recompute-some"])
def test_recorded_experts_equal_those_of_one_process(layout: str) -> None:
    ranks, parallel, changes = LAYOUTS[layout]
    by_shard = dict(filter(None, run_ranks(recorded, ranks, parallel, changes)))
    whole = torch.cat([by_shard[shard] for shard in sorted(by_shard)])
    batch = batch_with_experts().batch
    assert whole.shape == batch["routed_experts"].shape and whole.dtype == torch.int8
    assert torch.equal((whole == -1).all(-1).all(-1), batch["attention_mask"] == 0)  # all but padding is recorded
    assert torch.equal(whole.sort(-1).values, alone("recorded").sort(-1).values)
    assert len(whole) == ROWS
