"""The gradient of an update with replayed experts equals Megatron's layers' under a routing of the test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from mcontroller.data.batch import DataProto
from tests.forking import run_ranks
from tests.training import device
from tests.workers.roles import FOR_GRADIENTS, VOCAB, accumulated_gradients, largest_difference, weights
from tests.workers.router_replay.setup import ROWS, batch_with_experts, policy

pytestmark = pytest.mark.processes

ONE_STEP = {
    "ppo_mini_batch_size": ROWS,
    "ppo_epochs": 1,
    "policy_loss": "gpg",
    "optim": FOR_GRADIENTS,
}


def batch_with_all_experts() -> DataProto:
    """Return a batch whose tokens all have experts, apart from padding, as a plain routing needs them."""
    batch = batch_with_experts()
    experts = batch.batch["routed_experts"]
    missing = (experts == -1) & (batch.batch["attention_mask"] != 0)[:, :, None, None]
    return batch.with_tensors({"routed_experts": torch.where(missing, torch.tensor([3, 6]), experts).to(torch.int8)})


def replayed() -> dict[str, torch.Tensor]:
    worker = policy({}, "rollout", **ONE_STEP)
    worker.update_actor(batch_with_all_experts())
    return accumulated_gradients(worker)


def by_definition() -> dict[str, torch.Tensor]:
    """Return the gradients of ``-mean(advantage * log-probability)``, from single unpadded rows."""
    worker = policy({}, "none", **ONE_STEP)
    chunk = worker.model[0].module
    routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    batch = batch_with_all_experts().batch
    total, tokens = torch.zeros((), device=device()), int(batch["response_mask"].sum())
    for row in range(ROWS):
        inside = batch["attention_mask"][row] != 0
        ids = batch["input_ids"][row][inside].to(device())
        for layer, router in enumerate(routers):
            router.routing = _routing(batch["routed_experts"][row][inside][:, layer].long().to(device()))
        with worker.context.activate():
            logits = chunk(ids[None], torch.arange(len(ids), device=device())[None], None)[0, :, :VOCAB]
        log_probs = logits.float().log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        length = int(batch["response_mask"][row].sum())
        total = total - (log_probs[-length:] * batch["advantages"][row, :length].to(device())).sum()
    worker.model[0].zero_grad_buffer()
    with worker.context.activate():
        (total / tokens).backward()
    return accumulated_gradients(worker)


def _routing(chosen: torch.Tensor) -> Any:
    """Return what replaces ``TopKRouter.routing``: a softmax over the logits of the chosen experts."""

    def routing(logits: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.flatten(0, 1)
        selected = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
        return logits.masked_fill(~selected, -torch.inf).softmax(-1), selected

    return routing


def test_gradients_equal_those_of_a_routing_with_the_same_experts() -> None:
    actual, expected = run_ranks(replayed, 1)[0], run_ranks(by_definition, 1)[0]
    assert largest_difference(actual, expected) < 1e-6
    of_routers = [gradient for name, gradient in actual.items() if "router" in name]
    assert len(of_routers) == 4 and all(float(gradient.abs().max()) > 1e-3 for gradient in of_routers)


def scores(mode: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    worker = policy({}, mode, "actor_ref")
    batch = batch_with_experts()
    log_probs = worker.compute_log_prob(batch).batch["old_log_probs"]
    return log_probs, worker.compute_ref_log_prob(batch).batch["ref_log_prob"], weights(worker)


def test_reference_is_not_affected() -> None:
    given, reference, _ = run_ranks(scores, 1, "rollout")[0]
    log_probs, expected, _ = run_ranks(scores, 1, "none")[0]
    assert torch.equal(reference, expected) and torch.equal(log_probs, expected)
    assert float((given - reference).abs().max()) > 0.1


def updates_and_replayed_scores(how: str) -> dict[str, Any]:
    """Return the weights after an update by one call, or by two."""
    worker = policy({}, "rollout", **ONE_STEP | {"optim": {"lr": 1e-2}})
    if how == "one call":
        worker.update_actor(batch_with_experts())
    else:
        worker.forward_backward(batch_with_experts())
        worker.optim_step()
    return weights(worker)


def test_update_in_two_calls_replays_the_same_experts() -> None:
    one, two = (run_ranks(updates_and_replayed_scores, 1, how)[0] for how in ("one call", "two calls"))
    assert largest_difference(one, two) == 0.0


def test_nothing_of_a_failed_pass_is_left() -> None:
    """A pass that fails between forward and backward must not give its experts to the next one."""
    assert run_ranks(after_a_failure, 1)[0] == 0.0


def after_a_failure() -> float:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    weights_of_runs = []
    for fails in (False, True):
        worker = policy({}, "rollout", transformer=recompute, **ONE_STEP | {"optim": {"lr": 1e-2}})
        if fails:
            loss, worker.loss = worker.loss, _fail
            with pytest.raises(ArithmeticError):
                worker.update_actor(batch_with_experts())
            worker.loss = loss
        worker.update_actor(batch_with_experts())
        weights_of_runs.append(weights(worker))
    return largest_difference(*weights_of_runs)


def _fail(*unused: Any) -> Any:
    raise ArithmeticError
