"""Losses of a program, sums of several, rows that stay together, and a teacher's distribution: as in one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from mcontroller.data.batch import DataProto
from mcontroller.errors import ConfigError, DataError
from tests.ranks import run_ranks
from tests.workers.roles import (
    FOR_GRADIENTS,
    OPTIM,
    RESPONSE,
    VOCAB,
    accumulated_gradients,
    actor,
    experience,
    largest_difference,
    own_shard,
    weights,
)
from trainer import supervised_rows
from workers import DISTILLATION, SFT, Rule, TokenBatch, TokenLoss
from workers.actor import ActorRolloutRefWorker
from workers.train.losses import masked_sum

pytestmark = pytest.mark.simulated

ROWS = 8
LAYOUTS: dict[str, Any] = {"tp2-dp2": (4, {"tp": 2}), "pp2-dp2": (4, {"pp": 2}), "cp2": (2, {"cp": 2})}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "transformer": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.2},
}
TOLERANCE = 1e-5  # of gradients up to 0.5: 3e-6 on one processor, less on another


def log_ratio_of_pairs(rows: TokenBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The loss of DPO without a reference; the column says which row of a pair was chosen."""
    wanted = rows.columns["advantages"][:, 0].view(-1, rows.together).sum(1)
    pairs = rows.mask.any(1).view(-1, 2).any(1)
    assert rows.together == 2 and bool((wanted == 0)[pairs].all())  # 1 and -1
    chosen, rejected = (output[0] * rows.mask).sum(1).view(-1, 2).T
    loss = -logsigmoid(chosen - rejected) * pairs
    return loss.sum(), pairs.sum(), {"right": ((chosen > rejected) * pairs).sum().float()}


PAIRS = TokenLoss("pairs", log_ratio_of_pairs, ("advantages",), {"right": Rule.SUM})


def of_pairs(worker: Any) -> DataProto:
    """The rows of ``experience`` as pairs, of which one has a response without a valid token."""
    batch = experience(ROWS)
    sign = torch.tensor([1.0, -1.0]).repeat(ROWS // 2)[:, None].expand_as(batch.batch["advantages"]).clone()
    mask = batch.batch["response_mask"].clone()
    mask[3] = 0
    batch = batch.with_tensors({"advantages": sign, "response_mask": mask})
    batch.meta_info["rows_together"] = 2
    return own_shard(batch, worker)


def in_rows(rows: TokenBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    return (output[0] * rows.mask).sum(1), rows.mask.sum(), {}


def detached(rows: TokenBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    return output.detach().sum(), rows.mask.sum(), {}


class OfDetachedLayers(ActorRolloutRefWorker):
    """Its first stage trains nothing."""

    def forward_step(self, model: torch.nn.Module, rows: TokenBatch) -> torch.Tensor:
        output = super().forward_step(model, rows)
        return output.detach() if self.context.pg.pp.rank() == 0 else output


def wrong_losses() -> list[str]:
    worker = actor({}, "actor", ppo_mini_batch_size=ROWS)
    no_count = TokenLoss("sum", lambda rows, output: output.sum())  # type: ignore[arg-type, return-value]
    no_report = dataclasses.replace(PAIRS, function=lambda rows, output: (output.sum(), rows.mask.sum(), {}))
    keys = []
    for wrong in (no_count, no_report, log_ratio_of_pairs, TokenLoss("r", in_rows), TokenLoss("d", detached)):
        with pytest.raises(ConfigError) as caught:
            worker.forward_backward(of_pairs(worker), loss=wrong)
        keys.append(caught.value.key)
    return keys


def without_first_stage() -> None:
    worker = actor({"pp": 2}, "actor", OfDetachedLayers)
    worker.update_actor(own_shard(experience(ROWS), worker))


def test_a_loss_that_would_train_nothing_or_returns_other_values_is_an_error() -> None:
    assert run_ranks(wrong_losses, 1) == [["loss"] * 5]
    with pytest.raises(ConfigError) as caught:
        run_ranks(without_first_stage, 2)
    assert caught.value.key == "forward_step"


@pytest.mark.parametrize("name", ["lr", "grad_norm", "moe_z_loss"])
def test_a_metric_with_the_name_of_one_of_every_update_is_an_error_before_it(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TokenLoss("mine", log_ratio_of_pairs, metrics={name: Rule.SUM})
    assert caught.value.fields == {"key": "metrics", "value": [name]}


class ConstantWithoutTargets(ActorRolloutRefWorker):
    def loss(self, rows: TokenBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        total, count, report = super().loss(rows, output)
        return total if bool(rows.mask.any()) else torch.zeros(()), count, report


class RootOfLogProbs(ActorRolloutRefWorker):
    """A loss whose derivative at a log-probability of 0, which targets that do not count have, is infinite."""

    def loss(self, rows: TokenBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        report = super().loss(rows, output)[2]
        return masked_sum((-output[0]).sqrt(), rows.mask), rows.mask.sum(), report


def with_masked_micro_batches(worker_class: type[ActorRolloutRefWorker]) -> dict[str, torch.Tensor]:
    optim = FOR_GRADIENTS | {"overlap_grad_reduce": True}
    worker = actor({}, "actor", worker_class, optim=optim, ppo_micro_batch_size=1)
    batch = experience(ROWS)
    batch.batch["response_mask"][5:] = 0
    worker.forward_backward(own_shard(batch, worker))
    return accumulated_gradients(worker)


def test_a_loss_of_rows_without_targets_may_be_a_constant() -> None:
    constant, zero = (
        run_ranks(with_masked_micro_batches, 2, cls)[0] for cls in (ConstantWithoutTargets, ActorRolloutRefWorker)
    )
    assert largest_difference(constant, zero) == 0 and any(bool(gradient.any()) for gradient in zero.values())


def test_rows_without_targets_have_no_gradient_of_nan() -> None:
    gradients = run_ranks(with_masked_micro_batches, 2, RootOfLogProbs)[0]
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())


Case = tuple[dict[str, torch.Tensor], dict[str, Any]]


def gradients(case: str, parallel: dict[str, Any], changes: dict[str, Any]) -> Case:
    """The gradients of a case, and the metrics of its last loss."""
    settings = {"ppo_mini_batch_size": ROWS, "ppo_micro_batch_size": ROWS, "ppo_epochs": 1}
    worker = actor(parallel, "actor", optim=FOR_GRADIENTS, **settings | changes)
    mine = own_shard(experience(ROWS), worker)
    metrics: dict[str, Any] = {}
    if case in ("policy", "both"):
        metrics = worker.forward_backward(mine).meta_info["metrics"]
    if case in ("sft", "both"):
        added = case == "both"
        metrics = worker.forward_backward(supervised_rows(mine), loss=SFT, accumulate=added).meta_info["metrics"]
    if case == "pairs":
        metrics = worker.forward_backward(of_pairs(worker), loss=PAIRS).meta_info["metrics"]
    if case == "distillation":
        mine = mine.union(own_shard(teacher(k=5), worker))
        metrics = worker.forward_backward(mine, loss=DISTILLATION).meta_info["metrics"]
    return accumulated_gradients(worker), metrics


def teacher(k: int) -> DataProto:
    log_probs = torch.randn(ROWS, RESPONSE, VOCAB, generator=torch.Generator().manual_seed(5)).log_softmax(-1)
    values, ids = log_probs.topk(k)
    return DataProto.from_dict({"top_ids": ids, "top_log_probs": values})


def check_layout(case: str, layout: str, expected: Case, **changes: Any) -> None:
    world_size, parallel = LAYOUTS.get(layout, (2, {"ep": 2} if layout == "ep2" else {}))
    for actual, metrics in run_ranks(gradients, world_size, case, parallel, changes):
        assert largest_difference(actual, expected[0]) < TOLERANCE
        assert metrics == pytest.approx(expected[1], rel=1e-5)


@pytest.mark.parametrize("layout", [*LAYOUTS, "ep2"])
def test_accumulated_gradients_are_the_sum_of_those_of_one_process(layout: str) -> None:
    changes: dict[str, Any] = {"model": EXPERTS} if layout == "ep2" else {}
    (policy, _), (sft, metrics) = (run_ranks(gradients, 1, case, {}, changes)[0] for case in ("policy", "sft"))
    assert metrics.keys() == {"sft/loss", "sft/entropy"}
    total = {name: policy[name] + sft[name] for name in policy}
    check_layout("both", layout, (total, metrics), **changes, ppo_micro_batch_size=2)


def stepped(distributed: bool) -> dict[str, torch.Tensor]:
    optim = OPTIM | {"warmup_steps": 0, "distributed_optimizer": distributed}
    worker = actor({}, "actor", optim=optim, ppo_epochs=1)
    mine = own_shard(experience(ROWS), worker)
    worker.forward_backward(mine)
    worker.forward_backward(supervised_rows(mine), loss=SFT, accumulate=True)
    worker.optim_step()
    return weights(worker)


def test_a_distributed_optimizer_makes_the_same_step_of_added_gradients() -> None:
    (expected,) = run_ranks(stepped, 1, False)
    assert all(largest_difference(actual, expected) < 1e-5 for actual in run_ranks(stepped, 2, True))


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("tp2-dp2", {"ppo_micro_batch_size": 2}),
        ("pp2-dp2", {"ppo_micro_batch_size": 3}),
        ("cp2", {"ppo_max_tokens_per_micro_batch": 40}),
        ("dp2", {"ppo_max_tokens_per_micro_batch": 40, "packed": True}),
    ],
)
def test_rows_together_have_the_gradients_of_one_micro_batch(layout: str, changes: dict[str, Any]) -> None:
    expected = run_ranks(gradients, 1, "pairs", {}, {})[0]
    assert expected[1].keys() == {"pairs/loss", "pairs/right"} and 0 < expected[1]["pairs/right"] < ROWS // 2
    check_layout("pairs", layout, expected, **changes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_distillation_has_the_gradients_of_one_process(layout: str) -> None:
    check_layout("distillation", layout, run_ranks(gradients, 1, "distillation", {}, {})[0], ppo_micro_batch_size=2)


def most_likely(parallel: dict[str, Any], k: int) -> tuple[int, DataProto | None]:
    worker = actor(parallel, "actor", log_prob_chunk_tokens=3)
    return worker.context.pg.dp.rank(), worker.compute_top_log_probs(own_shard(experience(ROWS), worker), k)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_most_likely_tokens_are_those_of_one_process(layout: str) -> None:
    ((_, expected),) = run_ranks(most_likely, 1, {}, 5)
    world_size, parallel = LAYOUTS[layout]
    by_rank = dict(result for result in run_ranks(most_likely, world_size, parallel, 5) if result[1] is not None)
    joined = DataProto.concat([by_rank[rank] for rank in sorted(by_rank)])
    assert torch.equal(joined.batch["top_ids"], expected.batch["top_ids"])
    torch.testing.assert_close(joined.batch["top_log_probs"], expected.batch["top_log_probs"], rtol=0, atol=1e-5)


def whole_vocabulary() -> tuple[float, float, float, float]:
    student, other = (actor({}, "actor", model={"seed": seed}, optim=FOR_GRADIENTS) for seed in (0, 1))
    batch = experience(ROWS)
    mask = batch.batch["response_mask"]
    mine, of_teacher = (worker.compute_top_log_probs(batch, VOCAB) for worker in (student, other))
    every = [top.batch["top_log_probs"].gather(-1, top.batch["top_ids"].argsort(-1)) for top in (mine, of_teacher)]
    scored = student.compute_log_prob(batch).batch["old_log_probs"]
    chosen = every[0].gather(-1, batch.batch["responses"][..., None])[..., 0] * mask
    by_hand = ((every[1].exp() * (every[1] - every[0])).sum(-1) * mask).sum() / mask.sum()
    metrics = student.forward_backward(batch.union(of_teacher), loss=DISTILLATION).meta_info["metrics"]
    same = student.forward_backward(batch.union(mine), loss=DISTILLATION).meta_info["metrics"]
    off = (scored - chosen).abs().max()
    return float(off), float(by_hand), metrics["distillation/loss"], same["distillation/loss"]


def test_the_whole_vocabulary_gives_the_exact_divergence() -> None:
    off, by_hand, loss, of_itself = run_ranks(whole_vocabulary, 1)[0]
    assert off < 1e-5 and by_hand > 0.1
    assert loss == pytest.approx(by_hand, abs=1e-5) and of_itself == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("fields", [{"columns": "advantages"}, {"metrics": {"right": "sum"}}, {"metrics": ["right"]}])
def test_columns_and_metrics_of_a_loss_are_names_and_rules(fields: Any) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(PAIRS, **fields)


def rejections() -> list[dict[str, Any]]:
    worker = actor({}, "actor", ppo_micro_batch_size=1)
    ids = {"top_ids": torch.full((ROWS, RESPONSE, 2), VOCAB), "top_log_probs": torch.zeros(ROWS, RESPONSE, 2)}
    calls: list[Any] = [
        lambda: worker.compute_top_log_probs(experience(ROWS), VOCAB + 1),
        lambda: worker.forward_backward(of_pairs(worker), loss=PAIRS),
        lambda: worker.forward_backward(of_pairs(worker).slice(0, 3), loss=PAIRS),
        lambda: worker.forward_backward(experience(ROWS).union(DataProto.from_dict(ids)), loss=DISTILLATION),
        lambda: worker.forward_backward(experience(ROWS), loss=DISTILLATION),
        lambda: worker.forward_backward(experience(ROWS), loss=SFT),
        lambda: worker.compute_log_prob(DataProto.from_dict(experience(ROWS).tensors(), meta_info={"row_together": 2})),
    ]
    errors = []
    for call in calls:
        with pytest.raises((ConfigError, DataError)) as caught:
            call()
        errors.append(caught.value.fields)
    return errors


def test_what_does_not_fit_is_rejected() -> None:
    [[too_many, too_few_rows, no_multiple, unknown_ids, no_columns, no_mask, unknown_setting]] = run_ranks(
        rejections, 1
    )
    assert too_many == {"key": "k", "value": 62}
    assert too_few_rows == {"rows_together": 2}
    assert no_multiple == {"key": "rows_together", "value": 2, "rows": 3}
    assert unknown_ids == {"method": "forward_backward", "column": "top_ids"}
    assert no_columns["missing"] == ["top_ids", "top_log_probs"]
    assert (no_mask["missing"], no_mask["method"]) == (["loss_mask"], "forward_backward")
    assert unknown_setting == {"key": "row_together", "value": 2}
