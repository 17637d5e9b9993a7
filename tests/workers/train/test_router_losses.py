"""Router losses are means over all tokens, by their definition and for all micro-batches and layouts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from mcontroller.errors import ConfigError
from tests.ranks import run_ranks
from tests.training import device
from tests.workers.roles import FOR_GRADIENTS, accumulated_gradients, actor, experience, largest_difference, own_shard
from workers.actor import ActorRolloutRefWorker
from workers.train.metrics import TOKENS, Rule
from workers.train.router_losses import prepare_routers

pytestmark = pytest.mark.simulated

ROWS, EXPERTS, TOPK = 16, 4, 2
Z, BALANCE = 0.01, 0.2
METRICS = {"aux_loss": "moe_aux_loss", "seq_aux_loss": "moe_seq_aux_loss", "global_aux_loss": "moe_global_aux_loss"}


def routed_actor(
    parallel: dict[str, Any],
    kind: str,
    worker_class: type[ActorRolloutRefWorker] = ActorRolloutRefWorker,
    **changes: Any,
) -> Any:
    """Return an actor with experts whose losses are ``kind`` and z, or without losses if ``kind`` is ``none``."""
    losses = {"moe_aux_loss_coeff": BALANCE, "moe_z_loss_coeff": Z} if kind != "none" else {}
    model = {
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOPK,
        "moe_ffn_hidden_size": 32,
        "transformer": {"moe_router_load_balancing_type": kind, **losses},
    }
    fixed = {"model": model, "optim": FOR_GRADIENTS, "ppo_mini_batch_size": ROWS, "ppo_epochs": 1}
    return actor(parallel, "actor", worker_class, **fixed, **changes)


def gradients(parallel: dict[str, Any], kind: str, **changes: Any) -> dict[str, Any]:
    """Return the gradients of one mini-batch, and the metrics of the routers."""
    worker = routed_actor(parallel, kind, **changes)
    metrics = worker.update_actor(own_shard(experience(ROWS), worker)).meta_info["metrics"]
    state = accumulated_gradients(worker)
    return {"gradients": state, "metrics": {name: value for name, value in metrics.items() if "/moe_" in name}}


class HalfACountForEachRow(ActorRolloutRefWorker):
    """A loss with a count that is neither tokens nor a whole number."""

    def loss(self, rows: Any, output: torch.Tensor) -> Any:
        first = rows.whole_mask.cumsum(1) == 1
        total = -(output[0] * rows.columns["advantages"] * rows.mask).sum()
        return total, 0.5 * (first * rows.mask).sum(), {TOKENS: rows.mask.sum()}

    def metrics(self) -> dict[str, Rule]:
        return {}


COUNTS: list[dict[str, Any]] = [
    {"loss_agg_mode": "token-mean"},
    {"loss_agg_mode": "seq-mean-token-mean"},
    {"loss_agg_mode": "seq-mean-token-sum"},
    {"policy_loss": "gspo"},
]


def gradients_of_routers(parallel: dict[str, Any]) -> list[dict[int, torch.Tensor]]:
    """Return the gradients of routers by layer, from router losses alone, for ``COUNTS`` and the loss above."""
    gradients = []
    for worker_class, counts in ((ActorRolloutRefWorker, COUNTS), (HalfACountForEachRow, [{}])):
        worker = routed_actor(parallel, "seq_aux_loss", worker_class, ppo_micro_batch_size=3)
        batch = own_shard(experience(ROWS), worker)
        batch.batch["advantages"].zero_()
        for count in counts:
            worker.config = dataclasses.replace(worker.config, **count)
            worker.update_actor(batch)
            routers = [module for module in worker.model[0].modules() if isinstance(module, TopKRouter)]
            gradients.append({router.layer_number: router.weight.main_grad.clone() for router in routers})
    return gradients


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [(4, {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}), (4, {"cp": 2, "pp": 2})],
    ids=["tp-dp-ep", "cp-pp"],
)
def test_router_gradient_does_not_depend_on_the_count_of_the_loss(world_size: int, parallel: dict[str, Any]) -> None:
    by_name = run_ranks(by_definition, 1, "seq_aux_loss", 1)[0]["gradients"]
    expected = [by_name[name] for name in sorted(by_name) if name.endswith("router.weight")]
    for rank in run_ranks(gradients_of_routers, world_size, parallel):
        for count, gradients in zip([*COUNTS, "halves"], rank, strict=True):
            assert len(gradients) == 4 // parallel.get("pp", 1)
            for layer, gradient in gradients.items():
                difference = float((gradient - expected[layer - 1]).abs().max())
                assert difference < 1e-6, f"{count}: {difference} of {float(expected[layer - 1].abs().max())}"


def computed_once_and_twice() -> list[dict[str, Any]]:
    """Return router gradients and metrics if the expected count is right, and if gradients are computed again."""
    results = []
    for worker_class in (ActorRolloutRefWorker, HalfACountForEachRow):
        worker = routed_actor({}, "global_aux_loss", worker_class, ppo_micro_batch_size=4)
        batch = experience(ROWS)
        batch.batch["advantages"].zero_()
        metrics = worker.update_actor(batch).meta_info["metrics"]
        routers = [module for module in worker.model[0].modules() if isinstance(module, TopKRouter)]
        results.append({str(router.layer_number): router.weight.main_grad.clone() for router in routers})
        results[-1] |= {name: torch.tensor(value) for name, value in metrics.items() if "/moe_" in name}
    return results


def test_gradients_that_are_computed_again_count_tokens_of_experts_once() -> None:
    once, twice = run_ranks(computed_once_and_twice, 1)[0]
    assert len(once) == 4 + 2
    assert largest_difference(once, twice) < 1e-7


def by_definition(kind: str, rows_together: int) -> dict[str, Any]:
    """Compute the same for the router losses alone, from logits of single unpadded rows."""
    worker = routed_actor({}, "none")
    [chunk] = worker.model
    logits: dict[str, list[torch.Tensor]] = {}
    for name, module in chunk.module.named_modules():
        if name.endswith("router"):
            module.register_forward_hook(
                lambda router, inputs, output, name=name: logits.setdefault(name, []).append(
                    (inputs[0] @ router.weight.t()).squeeze(1)
                )
            )
    batch = experience(ROWS).batch
    with worker.context.activate():
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            tokens = ids[mask != 0][None].to(device())
            chunk.module(tokens, torch.arange(tokens.size(1), device=device())[None], None)
    tokens = int(batch["attention_mask"].sum())
    z, balance = torch.zeros(2, device=device())
    for rows in logits.values():
        z = z + torch.cat(rows).logsumexp(-1).square().sum()
        for at in range(0, ROWS, rows_together):
            together = torch.cat(rows[at : at + rows_together])
            chosen = together.topk(TOPK).indices
            fractions = torch.bincount(chosen.flatten(), minlength=EXPERTS) / chosen.numel()
            balance = balance + EXPERTS * (together.softmax(-1) * fractions).sum()
    names = [name for name, _ in chunk.module.named_parameters()]
    gradients = torch.autograd.grad(
        (Z * z + BALANCE * balance) / tokens, list(chunk.module.parameters()), allow_unused=True
    )
    means = {f"actor/{METRICS[kind]}": float(balance) / tokens / len(logits), "actor/moe_z_loss": float(z) / tokens / 4}
    return {"gradients": {name: grad for name, grad in zip(names, gradients, strict=True) if grad is not None}} | {
        "metrics": means
    }


@functools.cache
def on_one_process(kind: str, micro_batch: int) -> dict[str, Any]:
    return run_ranks(functools.partial(gradients, ppo_micro_batch_size=micro_batch), 1, {}, kind)[0]


@pytest.mark.parametrize(
    ("kind", "micro_batch", "rows_together"),
    [("seq_aux_loss", 4, 1), ("aux_loss", 4, 4), ("aux_loss", 16, 16), ("global_aux_loss", 16, 16)],
)
def test_router_losses_match_their_definition(kind: str, micro_batch: int, rows_together: int) -> None:
    expected = run_ranks(by_definition, 1, kind, rows_together)[0]
    actual, without = on_one_process(kind, micro_batch), on_one_process("none", micro_batch)
    assert actual["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    assert without["metrics"] == {}
    names = [name for name in expected["gradients"] if "router" in name]
    assert len(names) == 4
    for name in names:
        added = actual["gradients"][name] - without["gradients"][name]
        assert float(added.abs().max()) > 1e-3
        torch.testing.assert_close(added, expected["gradients"][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("changes", [{"ppo_micro_batch_size": 8}, {"ppo_micro_batch_size": 16}, {"tokens": 40}])
def test_losses_by_row_do_not_depend_on_micro_batches(changes: dict[str, int]) -> None:
    if "tokens" in changes:
        changes = {"ppo_max_tokens_per_micro_batch": changes["tokens"]}
    expected = on_one_process("seq_aux_loss", 4)
    actual = run_ranks(functools.partial(gradients, **changes), 1, {}, "seq_aux_loss")[0]
    assert actual["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    assert largest_difference(actual["gradients"], expected["gradients"]) < 1e-6


@pytest.mark.parametrize(
    ("kind", "world_size", "parallel", "micro_batch"),
    [
        ("global_aux_loss", 4, {"ep": 2}, 4),
        ("seq_aux_loss", 4, {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, 3),
        ("aux_loss", 2, {"cp": 2}, 16),
    ],
)
def test_every_layout_has_the_gradients_of_one_process(
    kind: str, world_size: int, parallel: dict[str, Any], micro_batch: int
) -> None:
    expected = on_one_process(kind, 16)
    ranks = run_ranks(functools.partial(gradients, ppo_micro_batch_size=micro_batch), world_size, parallel, kind)
    assert largest_difference(ranks[0]["gradients"], expected["gradients"]) < 1e-6
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)


def unequal_gradients(parallel: dict[str, Any], kind: str) -> dict[str, torch.Tensor]:
    """Return the gradients of a mini-batch of 7 rows, three at a time; two data-parallel ranks have four and three."""
    worker = routed_actor(parallel, kind, ppo_micro_batch_size=3)
    rows, group = experience(7), worker.context.pg.dp
    worker.update_actor(rows.split(-(-7 // group.size()))[group.rank()])
    return accumulated_gradients(worker)


def test_losses_by_row_do_not_depend_on_unequal_micro_batches() -> None:
    gaps = {
        kind: largest_difference(
            run_ranks(unequal_gradients, 2, {}, kind)[0], run_ranks(unequal_gradients, 1, {}, kind)[0]
        )
        for kind in ("seq_aux_loss", "aux_loss")
    }
    assert gaps["seq_aux_loss"] < 1e-6
    assert gaps["aux_loss"] > 1e-4  # rows 4 to 7 are in other micro-batches: another loss by definition


def packed_gradients(parallel: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return gradients(parallel, "aux_loss", packed=True, **changes)


@pytest.mark.parametrize("parallel", [{}, {"cp": 2}])
def test_padding_of_packed_rows_does_not_count_in_a_router_loss(parallel: dict[str, int]) -> None:
    expected = on_one_process("aux_loss", 4)
    actual = run_ranks(functools.partial(packed_gradients, ppo_micro_batch_size=4), parallel.get("cp", 1), parallel)[0]
    assert actual["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    assert largest_difference(actual["gradients"], expected["gradients"]) < 1e-6


def biased(packed: bool) -> list[torch.Tensor]:
    """Return the bias of every expert in units of updates, which depends on the tokens of each expert."""
    extra = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    extra |= {"moe_router_load_balancing_type": "none", "moe_router_bias_update_rate": 1.0}
    model = {"num_moe_experts": EXPERTS, "moe_ffn_hidden_size": 32, "transformer": extra}
    worker = actor({}, "actor", model=model, ppo_epochs=1, ppo_mini_batch_size=ROWS, packed=packed)
    worker.update_actor(own_shard(experience(ROWS), worker))
    return [module.expert_bias for module in worker.model[0].modules() if hasattr(module, "expert_bias")]


def test_padding_does_not_move_the_bias_of_experts() -> None:
    expected, actual = run_ranks(biased, 1, True)[0], run_ranks(biased, 1, False)[0]
    assert len(expected) == 4
    assert any(bool(bias.abs().max() > 0) for bias in expected)
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


def custom_router_rejected() -> str:
    class CustomRouter(TopKRouter):
        pass

    worker = routed_actor({}, "aux_loss")
    for module in worker.model[0].modules():
        if isinstance(module, TopKRouter):
            module.__class__ = CustomRouter
    with pytest.raises(ConfigError) as caught:
        prepare_routers(worker.model)
    return str(caught.value)


def test_router_of_another_class_with_losses_is_rejected() -> None:
    assert "mlp.router, a CustomRouter, cannot be weighted by tokens" in run_ranks(custom_router_rejected, 1)[0]
