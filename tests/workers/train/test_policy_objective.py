"""Updates with the policy losses and averages by name, in several layouts, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.errors import DataError
from tests.ranks import run_ranks
from tests.workers.roles import RESPONSE, actor, critic, experience, largest_difference, own_shard, weights

pytestmark = pytest.mark.simulated

CHOICES = (
    {"policy_loss": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
    {"policy_loss": "gmpo", "clip_ratio": 0.01},
    {"policy_loss": "cispo", "loss_agg_mode": "seq-mean-token-sum"},
    {"policy_loss": "ppo", "loss_agg_mode": "seq-mean-token-mean"},
    {"policy_loss": "gpg", "loss_agg_mode": "seq-mean-token-sum-norm"},
)
ROWS = 12
TOLERANCE = 1e-5


def batch() -> DataProto:
    data = experience(ROWS)
    generator = torch.Generator().manual_seed(5)
    data.batch["old_log_probs"] += 0.05 * torch.randn(data.batch["old_log_probs"].shape, generator=generator)
    data.batch["importance_weights"] = torch.rand(data.batch["advantages"].shape, generator=generator)
    return data


def updated(parallel: dict[str, Any], micro_batch: int) -> list[dict[str, torch.Tensor]]:
    results = []
    for choice in CHOICES:
        worker = actor(parallel, "actor", ppo_micro_batch_size=micro_batch, ppo_mini_batch_size=6, **choice)
        worker.update_actor(own_shard(batch(), worker))
        results.append(weights(worker))
    return results


def test_an_update_does_not_depend_on_layout_or_micro_batches() -> None:
    alone = run_ranks(updated, 1, {}, ROWS)[0]
    divided = run_ranks(updated, 4, {"cp": 2}, 2)
    for number, choice in enumerate(CHOICES):
        difference = max(largest_difference(rank[number], alone[number]) for rank in divided)
        assert difference < TOLERANCE, f"{choice}: weights differ by {difference}"


def policy_losses() -> dict[str, float]:
    """Return the reported policy loss of one step at a ratio of 1, by average."""
    losses = {}
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        worker = actor({}, "actor", loss_agg_mode=mode, ppo_mini_batch_size=ROWS, ppo_epochs=1)
        data = experience(ROWS)
        metrics = worker.update_actor(data.select(exclude("old_log_probs", data))).meta_info["metrics"]
        losses[mode] = metrics["actor/pg_loss"]
    return losses


def test_the_reported_policy_loss_is_averaged_as_it_is_optimized() -> None:
    data = experience(ROWS).batch
    sums, lengths = (-data["advantages"] * data["response_mask"]).sum(1), data["response_mask"].sum(1)
    expected = {
        "token-mean": float(sums.sum() / lengths.sum()),
        "seq-mean-token-mean": float((sums / lengths).mean()),
        "seq-mean-token-sum": float(sums.mean()),
        "seq-mean-token-sum-norm": float(sums.mean()) / RESPONSE,
    }
    assert run_ranks(policy_losses, 1)[0] == pytest.approx(expected, rel=1e-5)


def in_prompts(n: int | None) -> int:
    worker = actor({}, ppo_mini_batch_size=256, ppo_mini_batch_prompts=2)
    data = experience(ROWS)
    data.meta_info |= {} if n is None else {"n": n}
    worker.update_actor(data)
    return worker.state.counters["optimizer_steps"]


def test_mini_batches_can_be_counted_in_prompts() -> None:
    assert run_ranks(in_prompts, 1, 3) == [4]  # 12 responses, 2 x 3 in a mini-batch, 2 epochs
    # A forked rank's DataError arrives as the text of an AssertionError.
    with pytest.raises((DataError, AssertionError)) as caught:
        run_ranks(in_prompts, 1, None)
    assert caught.value.value is None


def with_and_without_old_log_probs(parallel: dict[str, Any]) -> list[Any]:
    results: list[Any] = []
    for kept in (True, False):
        worker = actor(parallel, "actor", ppo_micro_batch_size=3, ppo_mini_batch_size=ROWS, ppo_epochs=1)
        data = own_shard(experience(ROWS), worker)
        data = data.select(exclude("old_log_probs", data))
        data = data.union(worker.compute_log_prob(data)) if kept else data
        metrics = worker.update_actor(data).meta_info["metrics"]
        results.append((weights(worker), metrics))
    with pytest.raises(DataError) as caught:
        actor(parallel, "actor", ppo_mini_batch_size=ROWS // 2, ppo_epochs=1).update_actor(data)
    assert (caught.value.method, caught.value.missing) == ("update_actor", ["old_log_probs"])
    return results


def exclude(name: str, data: DataProto) -> list[str]:
    return [column for column in data.tensors() if column != name]


def test_one_optimizer_step_needs_no_pass_for_old_log_probabilities() -> None:
    for rank in run_ranks(with_and_without_old_log_probs, 2, {"cp": 2}):
        (with_pass, metrics), (without, of_step) = rank
        assert largest_difference(with_pass, without) < TOLERANCE
        assert metrics["actor/pg_loss"] == pytest.approx(of_step["actor/pg_loss"], abs=TOLERANCE)
        assert of_step["actor/ppo_kl"] == 0.0
        assert not torch.equal(torch.tensor(of_step["actor/grad_norm"]), torch.tensor(0.0))


def updates_with(at_masked: float) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the weights and metrics of updates of actor and critic, with a value in the tokens that do not count."""
    data = batch()
    data.batch["ref_log_prob"], data.batch["rollout_log_probs"] = (data.batch["old_log_probs"] - 0.1 for _ in range(2))
    data.batch["values"], data.batch["returns"] = torch.ones(2, *data.batch["advantages"].shape)
    data.batch["response_mask"][:, 1] = 0  # of a tool
    mask = data.batch["response_mask"].bool()
    for name, column in data.batch.items():
        if column.is_floating_point():
            data.batch[name] = torch.where(mask, column, at_masked)
    policies = [actor({}, "actor", policy_loss=loss, use_kl_loss=True, ppo_epochs=1) for loss in ("ppo", "gspo")]
    metrics: dict[str, float] = {}
    for name, policy in zip(("ppo", "gspo"), policies, strict=True):
        reported = policy.update_actor(data).meta_info["metrics"]
        metrics |= {f"{name}/{key}": value for key, value in reported.items() if not key.endswith("mfu")}
    model = critic({}, ppo_epochs=1)
    metrics |= {key: value for key, value in model.update_critic(data).meta_info["metrics"].items() if "mfu" not in key}
    changed = {"ppo": policies[0], "gspo": policies[1], "critic": model}
    return {f"{name}/{key}": value for name, role in changed.items() for key, value in weights(role).items()}, metrics


def test_values_of_tokens_that_do_not_count_reach_no_gradient_and_no_metric() -> None:
    expected, metrics = run_ranks(updates_with, 1, 0.0)[0]
    for value in (float("nan"), float("inf"), 3.0):
        actual, reported = run_ranks(updates_with, 1, value)[0]
        assert largest_difference(actual, expected) == 0.0 and reported == metrics
