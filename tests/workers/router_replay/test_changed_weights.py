"""Routers that have changed since the recording choose other experts, unless the recorded ones are replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from mcontroller.data.batch import DataProto
from tests.forking import run_ranks
from tests.workers.roles import SAMPLED, prompts
from tests.workers.router_replay.setup import EXPERTS, policy
from workers.actor import ActorRolloutRefWorker
from workers.train.batches import TokenBatch

pytestmark = pytest.mark.processes


class Watched(ActorRolloutRefWorker):
    """A policy that shows the rows of every pass of ``forward_step``."""

    before_pass: Callable[[TokenBatch], None] = staticmethod(lambda rows: None)

    def forward_step(self, model: nn.Module, rows: TokenBatch) -> torch.Tensor:
        self.before_pass(rows)
        return super().forward_step(model, rows)


def chosen_in_update(mode: str) -> dict[str, Any]:
    """Change the routers a little after the recording; return what was recorded, and what an update chose."""
    worker = policy({}, mode, "actor_rollout", Watched, ppo_epochs=1, ppo_micro_batch_size=1, packed=True)
    batch = worker.generate_sequences(prompts(8, SAMPLED))
    scores = worker.compute_log_prob(batch)
    batch = batch.union(scores).with_tensors({"advantages": torch.ones(batch.batch["responses"].shape)})
    rows: list[list[torch.Tensor]] = []

    def record(router: Any, inputs: Any, output: Any) -> None:
        rows[-1].append(output[1].cpu())

    routers = [module for module in worker.model[0].modules() if isinstance(module, TopKRouter)]
    for router in routers:
        noise = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1))
        router.weight.data.add_(noise.to(router.weight.device), alpha=0.02)
        router.register_forward_hook(record)
    worker.before_pass = lambda tokens: rows.append([tokens.tokens[0, : int(tokens.lengths[0])].cpu()])
    metrics = worker.update_actor(batch).meta_info["metrics"]
    return {"batch": batch, "rows": rows, "metrics": metrics}


def recorded_of(batch: DataProto, tokens: torch.Tensor) -> torch.Tensor:
    """Return what was recorded for a row of tokens: bool ``[tokens, layers, experts]``, none for a token without."""
    columns = batch.batch
    for ids, mask, experts in zip(
        columns["input_ids"], columns["attention_mask"] != 0, columns["routed_experts"], strict=True
    ):
        if torch.equal(ids[mask], tokens):
            return (experts[mask].long()[..., None] == torch.arange(EXPERTS)).any(-2)
    raise AssertionError("no such row")


@pytest.mark.parametrize("mode", ["old_log_probs", "rollout"])
def test_update_chooses_the_recorded_experts(mode: str) -> None:
    actual = run_ranks(chosen_in_update, 1, mode)[0]
    assert len(actual["rows"]) == 8
    for tokens, *layers in actual["rows"]:
        recorded = recorded_of(actual["batch"], tokens)
        chosen = torch.stack(layers, 1)
        known = recorded.any(-1).all(-1)
        assert int((~known).sum()) == (mode == "rollout")  # the last token of a response
        assert torch.equal(chosen[known], recorded[known])


def test_update_without_replay_chooses_other_experts() -> None:
    chosen, recorded_by = run_ranks(chosen_in_update, 1, "none")[0], run_ranks(chosen_in_update, 1, "rollout")[0]
    assert torch.equal(chosen["batch"].batch["responses"], recorded_by["batch"].batch["responses"])
    differing, tokens_of_all = 0, 0
    for tokens, *layers in chosen["rows"]:
        recorded = recorded_of(recorded_by["batch"], tokens)
        known = recorded.any(-1).all(-1)
        differing += int((torch.stack(layers, 1)[known] != recorded[known]).any(-1).sum())
        tokens_of_all += int(known.sum()) * len(layers)
    assert 0.02 < differing / tokens_of_all < 0.5
    for name in ("rollout_probs_diff_mean", "rollout_probs_diff_max"):
        assert chosen["metrics"][f"training/{name}"] > 1.5 * recorded_by["metrics"][f"training/{name}"]
