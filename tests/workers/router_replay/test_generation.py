"""Generation records the experts that a whole pass over the same tokens chooses, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel_state.agreement import all_gather_values
from tests.ranks import run_ranks
from tests.workers.roles import PROMPT, SAMPLED, own_shard, prompts
from tests.workers.router_replay.setup import EXPERTS, LAYERS, TOPK, policy

pytestmark = pytest.mark.simulated

N = 2
TP2 = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "passes": (1, {}, {"rollout": {"max_rows": 5}}),
    "tp2-pp2-ep2": (4, TP2 | {"pp": 2, "ep": 2, "etp": 1}, {}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}, {}),
    "pp2-many-experts": (2, {"pp": 2}, {"model": {"num_moe_experts": 200}}),
}


def generated_and_scored(parallel: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any] | None:
    """Return generated responses, the scores that replay their experts, and those that record experts."""
    worker = policy(parallel, "rollout", "actor_rollout", **changes)
    batch = own_shard(prompts(6, SAMPLED | {"n": N}), worker)
    generated = all_gather_values(worker.generate_sequences(batch), worker.context.pg.pp)[-1]
    replayed = worker.compute_log_prob(generated)
    recording = policy(parallel, "old_log_probs", "actor", **changes)
    recorded = recording.compute_log_prob(generated)
    if replayed is None:
        return None
    return {"generated": generated.batch, "replayed": replayed.batch, "recorded": recorded.batch}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generation_records_the_experts_of_its_tokens(layout: str) -> None:
    ranks, parallel, changes = LAYOUTS[layout]
    experts = changes.get("model", {}).get("num_moe_experts", EXPERTS)
    for result in filter(None, run_ranks(generated_and_scored, ranks, parallel, changes)):
        generated, scored = result["generated"], result["recorded"]
        column, whole = generated["routed_experts"], scored["routed_experts"]
        assert column.shape == (*generated["input_ids"].shape, LAYERS, TOPK)
        assert column.dtype == whole.dtype == (torch.int8 if experts <= 128 else torch.int16)
        attention, mask = generated["attention_mask"], generated["response_mask"]
        fed = attention.clone()
        fed[:, PROMPT:-1], fed[:, -1] = mask[:, 1:], 0  # the last token of a response is not fed
        assert torch.equal((column != -1).all(-1).all(-1), fed != 0)
        assert torch.equal((whole != -1).all(-1).all(-1), attention != 0)
        inside = fed != 0
        assert torch.equal(column[inside].sort(-1).values, whole[inside].sort(-1).values)
        assert int(whole.max()) > experts // 2
        for scores in (result["replayed"], scored):
            assert float((scores["old_log_probs"] - generated["rollout_log_probs"]).abs().max()) < 1e-5
