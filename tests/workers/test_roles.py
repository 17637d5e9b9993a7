"""Supervised training, the reference, scores of responses, reports of ranks, a custom loss, the context of calls."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state as mpu

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError
from mcontroller.local import LocalWorkerGroup
from parallel_state import DistGlobalInfo, DistRankInfo
from parallel_state.errors import ParallelStateError
from tests.ranks import run_ranks
from tests.training import device
from tests.workers.roles import (
    MODEL,
    PROMPT,
    RESPONSE,
    SAMPLED,
    actor,
    callable_directly,
    critic,
    experience,
    largest_difference,
    own_shard,
    prompts,
    weights,
)
from workers.actor import ActorRolloutRefWorker
from workers.config import ParallelConfig, RewardConfig, load_config
from workers.megatron_worker import MegatronWorker
from workers.reward import RewardModelWorker
from workers.train.metrics import Rule

pytestmark = pytest.mark.simulated


def demonstrations(rows: int) -> DataProto:
    batch = experience(rows)
    columns = {name: batch.batch[name] for name in ("input_ids", "attention_mask")}
    nothing = torch.zeros(rows, PROMPT, dtype=torch.long)
    return DataProto.from_dict(columns | {"loss_mask": torch.cat((nothing, batch.batch["response_mask"]), 1)})


def learn(parallel: dict[str, Any]) -> dict[str, Any]:
    worker = actor(parallel, sft_optim={"lr": 5e-3})
    batch = own_shard(demonstrations(12), worker)
    losses = [worker.update_sft(batch).meta_info["metrics"]["sft/loss"] for _ in range(7)]
    lr_of_phase = worker.update_sft(batch).meta_info["metrics"]["sft/lr"]
    steps = worker.state.counters["optimizer_steps"]
    worker.update_actor(own_shard(experience(12), worker))
    return {
        "losses": losses,
        "lr": lr_of_phase,
        "steps": (steps, worker.state.counters["optimizer_steps"]),
        "weights": weights(worker),
    }


def test_supervised_steps_learn_the_demonstrations_equally_in_every_layout() -> None:
    alone, divided = run_ranks(learn, 1, {})[0], run_ranks(learn, 4, {"tp": 2, "pp": 2})[0]
    assert alone["losses"][-1] < 0.8 * alone["losses"][0]
    assert divided["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    assert alone["lr"] == 5e-3
    assert alone["steps"] == (8, 4)  # PPO began with a new optimizer


def alternating(path: str) -> tuple[list[dict[str, Any]], int]:
    """Train in one phase, in the other, and in the first again; then the last of these in a worker that resumes."""
    worker, errors = actor({}, sft_optim={"lr": 5e-3}), []
    worker.update_sft(demonstrations(8))
    worker.update_actor(experience(8))
    worker.save_checkpoint(path)
    before = weights(worker)
    resumed = actor({}, sft_optim={"lr": 5e-3})
    resumed.load_checkpoint(path)
    for policy in (worker, resumed):
        with pytest.raises(ConfigError) as caught:
            policy.update_sft(demonstrations(8))
        errors.append(caught.value.fields)
    assert largest_difference(before, weights(worker)) == 0.0
    worker.update_actor(experience(8))
    return errors, worker.state.counters["optimizer_steps"]


def test_a_phase_whose_optimizer_was_replaced_cannot_go_on(tmp_path: Path) -> None:
    [(errors, steps)] = run_ranks(alternating, 1, str(tmp_path))
    assert errors == [{"key": "sft_optim", "value": "sft"}] * 2
    assert steps == 4  # two updates of two epochs


def rates() -> list[float]:
    worker = actor({}, "actor", optim={"lr": 1e-2, "warmup_steps": 2}, ppo_epochs=1)
    return [worker.update_actor(experience(8)).meta_info["metrics"]["actor/lr"] for _ in range(3)]


def test_the_reported_learning_rate_is_that_of_the_step() -> None:
    assert run_ranks(rates, 1)[0] == pytest.approx([0.0, 5e-3, 1e-2])


class CountsOfRows(ActorRolloutRefWorker):
    """A loss whose count is a share of the rows."""

    share = 1.0

    def loss(self, rows: Any, output: torch.Tensor) -> Any:
        count = self.share * rows.mask.any(1).sum()
        return -(output[0] * rows.columns["advantages"] * rows.mask).sum(), count, {"tokens": rows.mask.sum()}

    def metrics(self) -> dict[str, Rule]:
        return {}


class TenthOfRows(CountsOfRows):
    share = 0.1


def norms_of_counts() -> list[float]:
    norms = []
    for worker_class in (CountsOfRows, TenthOfRows):
        worker = actor({}, "actor", worker_class, ppo_epochs=1)
        norms.append(worker.update_actor(experience(8)).meta_info["metrics"]["actor/grad_norm"])
    return norms


def test_a_count_of_a_loss_can_be_a_fraction() -> None:
    rows, tenths = run_ranks(norms_of_counts, 1)[0]
    assert tenths == pytest.approx(10 * rows, rel=1e-5)


def reference_after_learning() -> list[bool]:
    worker = actor({})
    batch = experience(8)

    def same() -> bool:
        policy = worker.compute_log_prob(batch).batch["old_log_probs"]
        return bool(torch.equal(policy, worker.compute_ref_log_prob(batch).batch["ref_log_prob"]))

    answers = [same()]
    for _ in range(3):  # the first steps of the warm-up have a rate of 0
        worker.update_sft(demonstrations(8))
    answers.append(same())
    before = worker.compute_ref_log_prob(batch).batch["ref_log_prob"]
    worker.sync_reference(0.5)
    mixed = worker.compute_ref_log_prob(batch).batch["ref_log_prob"]
    answers.append(same() or bool(torch.equal(mixed, before)))
    worker.sync_reference()
    return [*answers, same()]


class OtherWeightsAtEachCall(ActorRolloutRefWorker):
    """Its ``build_model`` returns other weights at each call, as a model provider without a seed does."""

    calls = 0

    def build_model(self) -> Any:
        chunks = super().build_model()
        self.calls += 1
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data *= self.calls
        return chunks


def difference_of_a_new_reference() -> float:
    worker = actor({}, "actor_ref", OtherWeightsAtEachCall)
    batch = experience(8)
    policy = worker.compute_log_prob(batch).batch["old_log_probs"]
    return float((policy - worker.compute_ref_log_prob(batch).batch["ref_log_prob"]).abs().max())


def test_a_reference_begins_as_a_copy_of_the_policy() -> None:
    assert run_ranks(difference_of_a_new_reference, 1) == [0.0]


def test_the_reference_does_not_change_before_sync_reference() -> None:
    assert run_ranks(reference_after_learning, 1)[0] == [True, False, False, True]


def difference_to_a_reference_group() -> float:
    """The largest KL term between an actor that samples at 0.7 and a separate reference with the same weights."""
    rollout = {"prompt_length": PROMPT, "response_length": RESPONSE, "seed": 3}
    worker, other = actor({}, rollout=rollout | {"temperature": 0.7, "n": 2}), actor({}, "ref", rollout=rollout)
    generated = worker.generate_sequences(prompts(4, SAMPLED))
    assert generated.meta_info["n"] == 2
    old = worker.compute_log_prob(generated).batch["old_log_probs"]
    return float((old - other.compute_ref_log_prob(generated).batch["ref_log_prob"]).abs().max())


def test_a_reference_group_scores_at_the_temperature_of_the_rollout() -> None:
    assert run_ranks(difference_to_a_reference_group, 1)[0] < 1e-6


def scored() -> dict[str, torch.Tensor]:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    worker = callable_directly(RewardModelWorker(load_config(RewardConfig, {"model": MODEL, "micro_batch_size": 3})))
    worker.init_model()
    batch = experience(5)
    last = []
    with worker.context.activate(), torch.no_grad():
        for row in batch.batch:
            ids = row["input_ids"][row["attention_mask"] == 1].to(device())
            last.append(worker.model[0](ids[None], torch.arange(len(ids), device=device())[None], None)[0, -1, 0])
    return {"scores": worker.compute_rm_score(batch).batch["rm_scores"], "last": torch.stack(last)} | dict(batch.batch)


def test_a_reward_model_scores_the_last_token_of_a_response() -> None:
    result = run_ranks(scored, 1)[0]
    lengths = result["response_mask"].sum(1)
    torch.testing.assert_close(
        result["scores"].gather(1, lengths[:, None] - 1)[:, 0], result["last"], atol=1e-5, rtol=0
    )
    assert (result["scores"] != 0).sum(1).tolist() == [1] * 5


def infos(parallel: dict[str, Any]) -> tuple[DistRankInfo, DistGlobalInfo]:
    worker = actor(parallel, "rollout")
    return worker.get_megatron_rank_info(), worker.get_megatron_global_info()


def test_a_worker_reports_its_coordinates() -> None:
    ranks = run_ranks(infos, 4, {"tp": 2})
    assert [(rank.tp_rank, rank.dp_rank, rank.pp_rank) for rank, _ in ranks] == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (1, 1, 0),
    ]
    assert {(sizes.tp_size, sizes.dp_size, sizes.pp_size) for _, sizes in ranks} == {(2, 2, 1)}


class Reinforce(ActorRolloutRefWorker):
    """A custom loss with a custom metric."""

    def loss(self, rows: Any, output: torch.Tensor) -> Any:
        total = -(output[0] * rows.columns["advantages"] * rows.mask).sum()
        count = rows.mask.sum()
        longest = rows.mask.sum(1).max()
        return (
            total,
            count,
            {"loss": total.detach(), "longest": longest, "rows": rows.mask.any(1).sum(), "tokens": count},
        )

    def metrics(self) -> dict[str, Rule]:
        return {"loss": Rule.TOKEN_MEAN, "longest": Rule.MAX, "rows": Rule.SUM}


def own_loss(parallel: dict[str, Any]) -> dict[str, Any]:
    template = actor(parallel, "actor", ppo_epochs=1)
    worker = callable_directly(Reinforce(template.config, "actor"))
    worker.init_model()
    batch = own_shard(experience(16), worker)
    return {"metrics": worker.update_actor(batch).meta_info["metrics"], "weights": weights(worker)}


def test_a_subclass_changes_the_loss_and_its_metrics() -> None:
    alone, divided = run_ranks(own_loss, 1, {})[0], run_ranks(own_loss, 4, {"pp": 2})
    assert alone["metrics"]["actor/rows"] == 16
    assert alone["metrics"]["actor/longest"] == RESPONSE
    for rank in divided:
        assert rank["metrics"] == pytest.approx(alone["metrics"], abs=1e-5)
    assert largest_difference(alone["weights"], divided[0]["weights"]) < 1e-5


def test_a_custom_loss_is_independent_of_context_parallelism() -> None:
    alone, divided = run_ranks(own_loss, 1, {})[0], run_ranks(own_loss, 4, {"cp": 2, "pp": 2})
    for rank in divided:
        for name in ("actor/loss", "actor/grad_norm"):
            assert rank["metrics"][name] == pytest.approx(alone["metrics"][name], abs=1e-5)
    assert largest_difference(alone["weights"], divided[0]["weights"]) < 1e-5


def outside_a_group() -> None:
    template = actor({}, "actor")
    worker, batch = ActorRolloutRefWorker(template.config, "actor"), experience(4)

    def rejected(method: str, *args: Any) -> None:
        with pytest.raises(ParallelStateError):
            getattr(worker, method)(*args)

    rejected("init_model")
    with worker.call_context("init_model"):
        worker.init_model()
    rejected("compute_log_prob", batch)
    rejected("update_actor", batch)
    with worker.call_context("compute_log_prob"):
        alone = worker.compute_log_prob(batch)
    assert torch.equal(alone.batch["old_log_probs"], template.compute_log_prob(batch).batch["old_log_probs"])


def test_a_method_outside_its_context_is_rejected() -> None:
    run_ranks(outside_a_group, 1)


class Asking(MegatronWorker):
    """A worker whose constructor computes; each method returns whether it runs in the worker's own context."""

    def __init__(self) -> None:
        super().__init__(ParallelConfig())
        self.sizes = (mpu.get_tensor_model_parallel_world_size(), mpu.get_data_parallel_rank())
        self.constructed_inside = self.context.is_active

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def plain(self) -> bool:
        return self.context.is_active

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def coroutine(self) -> bool:
        return self.context.is_active

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def overridden(self) -> bool:
        raise NotImplementedError


class AskingAgain(Asking):
    def __init__(self) -> None:
        super().__init__()
        self.constructed_inside &= self.context.is_active

    def overridden(self) -> bool:
        return self.context.is_active


def answers_of_calls() -> list[bool]:
    groups = [LocalWorkerGroup(AskingAgain), LocalWorkerGroup(AskingAgain)]  # each worker has a separate layout
    answers = [getattr(group, name)() for group in groups for name in ("plain", "coroutine", "overridden")]
    assert not any(group.workers[0].context.is_active for group in groups)
    assert all(group.workers[0].constructed_inside and group.workers[0].sizes == (1, 0) for group in groups)
    return [answer for [answer] in answers]


def test_every_call_through_a_group_runs_in_the_context_of_its_worker() -> None:
    assert run_ranks(answers_of_calls, 1) == [[True] * 6]


def without_descriptions_of_checkpoints() -> bool:
    worker = actor({}, "actor")
    worker.training = None  # scoring asks whether there is a model, and not what a checkpoint of it contains
    return worker.compute_log_prob(experience(4)) is not None


def test_scoring_does_not_describe_a_checkpoint() -> None:
    assert run_ranks(without_descriptions_of_checkpoints, 1) == [True]


def both_layouts_at_once() -> dict[str, Any]:
    """An actor on TP2 x PP2 and a critic on DP4 in the same processes, one call after another."""
    policy, value = actor({"tp": 2, "pp": 2}, "actor", ppo_epochs=1), critic({}, ppo_epochs=1)
    for _ in range(2):
        policy.update_actor(own_shard(experience(16), policy))
        value.update_critic(own_shard(experience(16), value))
    return {"actor": weights(policy), "critic": weights(value)}


def one_layout() -> dict[str, Any]:
    policy, value = actor({}, "actor", ppo_epochs=1), critic({}, ppo_epochs=1)
    for _ in range(2):
        policy.update_actor(experience(16))
    for _ in range(2):
        value.update_critic(experience(16))
    return {"actor": weights(policy), "critic": weights(value)}


def test_two_roles_of_different_layouts_share_processes() -> None:
    expected, actual = run_ranks(one_layout, 1)[0], run_ranks(both_layouts_at_once, 4)[0]
    for role in ("actor", "critic"):
        assert largest_difference(expected[role], actual[role]) < 1e-5
