"""Invalid input is rejected with names and numbers, before a collective or on every rank at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mcontroller.errors import ConfigError, DataError, LayoutError
from tests.ranks import run_ranks
from tests.workers.roles import (
    GREEDY,
    MODEL,
    PROMPT,
    RESPONSE,
    actor,
    callable_directly,
    critic,
    experience,
    largest_difference,
    own_shard,
    prompts,
    weights,
)
from trainer import register_kl_estimator
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, CriticConfig, RewardConfig, load_config
from workers.critic import CriticWorker
from workers.model.build import build_model
from workers.reward import RewardModelWorker
from workers.train.nonfinite import NonFiniteGradient


def missing_column(role: str, without: str) -> DataError | None:
    """Update on rank 0 only: the other rank of its pipeline never takes part."""
    worker = {"actor": actor, "critic": critic}[role]({"pp": 2})
    if worker.rank == 1:
        return None
    batch = experience(4)
    batch.batch.pop(without)
    with pytest.raises(DataError) as caught:
        worker.update_actor(batch) if role == "actor" else worker.update_critic(batch)
    return caught.value


@pytest.mark.simulated
@pytest.mark.parametrize(("role", "column"), [("actor", "advantages"), ("critic", "returns"), ("actor", "responses")])
def test_missing_column_is_reported_before_the_first_collective(role: str, column: str) -> None:
    error = run_ranks(missing_column, 2, role, column)[0]
    assert (error.method, error.missing) == (f"update_{role}", [column]) and "input_ids" in error.present


def calls_without_a_model() -> list[str]:
    keys = []
    lengths = {"rollout": {"prompt_length": RESPONSE, "response_length": RESPONSE}}
    for worker, methods in (
        (
            callable_directly(ActorRolloutRefWorker(load_config(ActorConfig, {"model": MODEL} | lengths))),
            ("generate_sequences", "compute_log_prob", "update_actor", "update_sft"),
        ),
        (
            callable_directly(CriticWorker(load_config(CriticConfig, {"model": MODEL}))),
            ("compute_values", "update_critic"),
        ),
    ):
        for method in methods:
            with pytest.raises(ConfigError) as caught:
                getattr(worker, method)(experience(4))
            keys.append(caught.value.key)
    return keys


@pytest.mark.simulated
def test_calls_before_init_model_are_rejected() -> None:
    assert run_ranks(calls_without_a_model, 1) == [["init_model"] * 6]


def rejected_in_one_process() -> list[dict[str, Any]]:
    worker = actor({}, "actor")
    batch = experience(4)
    errors = []
    for change in (
        {name: torch.cat((batch.batch[name], batch.batch[name]), 1) for name in ("responses", "response_mask")},
        {"attention_mask": torch.zeros_like(batch.batch["attention_mask"])},
    ):
        with pytest.raises(DataError) as caught:
            worker.compute_log_prob(type(batch)(batch.batch.clone().update(change)))
        errors.append(caught.value.fields)
    for call in (worker.generate_sequences, worker.compute_ref_log_prob):
        with pytest.raises(ConfigError) as caught_config:
            call(batch)
        errors.append(caught_config.value.fields)
    return errors


@pytest.mark.simulated
def test_batches_and_calls_that_do_not_match_the_role_are_rejected() -> None:
    too_long, padding, no_rollout, no_reference = run_ranks(rejected_in_one_process, 1)[0]
    assert too_long == {"method": "compute_log_prob", "column": "responses", "row": 0}
    assert padding == {"method": "compute_log_prob", "row": 0, "length": 0, "rows": [0, 1, 2, 3]}
    assert no_rollout == no_reference == {"key": "role", "value": "actor"}


def padding_only_on_one_shard() -> list[tuple[int, int]]:
    """Call every method that computes with a row of padding only, on dp rank 1."""
    policy, value, batch = actor({}), critic({}), experience(4)
    reward = callable_directly(RewardModelWorker(load_config(RewardConfig, {"model": MODEL})))
    reward.init_model()
    batch.batch["attention_mask"][3] = 0
    batch.batch["loss_mask"] = torch.zeros_like(batch.batch["attention_mask"])
    rows = []
    for call in (
        policy.compute_log_prob,
        policy.compute_ref_log_prob,
        policy.update_actor,
        policy.update_sft,
        value.compute_values,
        value.update_critic,
        reward.compute_rm_score,
    ):
        with pytest.raises(DataError) as caught:
            call(own_shard(batch, policy))
        rows.append((caught.value.row, caught.value.length))
    return rows


@pytest.mark.simulated
def test_invalid_row_of_one_shard_raises_on_every_rank() -> None:
    assert run_ranks(padding_only_on_one_shard, 2) == [[(1, 0)] * 7] * 2


def scored_at_temperature(temperature: Any) -> tuple[str, Any]:
    worker, batch = actor({}, "actor"), experience(4)
    batch.meta_info["temperature"] = temperature
    with pytest.raises(ConfigError) as caught:
        worker.compute_log_prob(batch)
    return caught.value.key, caught.value.value


@pytest.mark.simulated
@pytest.mark.parametrize("temperature", [0.0, float("inf"), True, "1"])
def test_a_temperature_that_is_no_finite_number_above_0_is_rejected_for_scores(temperature: Any) -> None:
    assert run_ranks(scored_at_temperature, 1, temperature) == [("temperature", temperature)]


def updated_with_nan(parallel: dict[str, Any], on_nonfinite: str) -> dict[str, Any]:
    """Update on a batch with an old log-probability of NaN in one row, on dp rank 1 and in one mini-batch only."""
    worker = actor(parallel, "actor", ppo_epochs=1, optim={"on_nonfinite": on_nonfinite, "warmup_steps": 0})
    before = weights(worker)
    batch = experience(16)
    batch.batch["old_log_probs"][9, 0] = float("nan")
    try:
        metrics = worker.update_actor(own_shard(batch, worker)).meta_info["metrics"]
    except NonFiniteGradient as error:
        return {"error": error, "moved": largest_difference(before, weights(worker))}
    return {"metrics": metrics, "finite": all(bool(w.isfinite().all()) for w in weights(worker).values())}


@pytest.mark.simulated
def test_nan_in_a_loss_raises_on_every_rank_and_names_its_origin() -> None:
    for rank in run_ranks(updated_with_nan, 8, {"tp": 2, "pp": 2}, "raise"):
        error = rank["error"]
        assert error.ranks == [6, 7]  # dp 1 on the last stage
        assert "pg_loss" in str(error) and "update_actor, optimizer step" in str(error)
        assert set(error.parameters) == {2, 3, 6, 7}  # not dp 0, whose gradients are finite without reduction
        assert f"the gradient of {error.parameters[6]} on rank 6" in str(error) and error.origin == 6
        assert error.step < 2


@register_kl_estimator("inf_with_finite_gradient")
def inf_with_finite_gradient(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the log ratio with the gradient of its limited square, which is finite if the ratio is not."""
    limited = log_ratio.clamp(-1.0, 1.0).square()
    return log_ratio.detach() + limited - limited.detach()


def updated_with_inf(on_nonfinite: str) -> dict[str, Any]:
    """Update with a reference probability of 0 for a token of dp rank 1: the loss is Inf, all gradients are finite."""
    optim = {"on_nonfinite": on_nonfinite, "warmup_steps": 0}
    worker = actor({}, "actor", use_kl_loss=True, kl_loss_type="inf_with_finite_gradient", ppo_epochs=1, optim=optim)
    before = weights(worker)
    batch = experience(16)
    batch.batch["ref_log_prob"][9, 0] = -torch.inf
    try:
        metrics = worker.update_actor(own_shard(batch, worker)).meta_info["metrics"]
    except NonFiniteGradient as error:
        return {"error": error}
    return {"skipped": metrics["actor/skipped_steps"], "moved": largest_difference(before, weights(worker))}


@pytest.mark.simulated
def test_no_step_is_made_if_the_loss_is_inf_and_its_gradient_finite() -> None:
    for rank in run_ranks(updated_with_inf, 2, "raise"):
        assert rank["error"].ranks == [1]
        assert "kl_loss on rank 1" in str(rank["error"])
    for rank in run_ranks(updated_with_inf, 2, "skip"):
        assert rank["skipped"] == 1 and 0 < rank["moved"] < 1


def updated_in_float16() -> list[str]:
    worker = actor({}, "actor", model={"dtype": "float16"}, ppo_epochs=1)
    batch = experience(16)
    batch.batch["old_log_probs"][9, 0] = float("nan")
    with pytest.raises(NonFiniteGradient) as caught:
        worker.update_actor(own_shard(batch, worker))
    return [str(caught.value), *(name for name in caught.value.parameters.values() if not name)]


@pytest.mark.simulated
def test_nan_in_a_float16_loss_is_not_an_overflow() -> None:
    for rank in run_ranks(updated_in_float16, 2):
        assert "pg_loss" in rank[0] and "on rank 1" in rank[0]


@pytest.mark.simulated
def test_step_with_nan_can_be_skipped() -> None:
    for rank in run_ranks(updated_with_nan, 4, {"pp": 2}, "skip"):
        assert rank["metrics"]["actor/skipped_steps"] == 1
        assert rank["metrics"]["actor/grad_norm"] > 0
        assert rank["finite"]


def updated_with_nothing_but_nan(parallel: dict[str, Any]) -> dict[str, float]:
    """Update on a batch of which all old log-probabilities are NaN, so that no step can be made."""
    model = MODEL | {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "transformer": {"moe_z_loss_coeff": 0.01}}
    worker = actor(parallel, "actor", model=model, ppo_epochs=1, optim={"on_nonfinite": "skip"})
    batch = experience(16)
    batch.batch["old_log_probs"][:] = float("nan")
    return worker.update_actor(own_shard(batch, worker)).meta_info["metrics"]


@pytest.mark.simulated
def test_update_without_a_step_reports_neither_means_nor_largest_values() -> None:
    for metrics in run_ranks(updated_with_nothing_but_nan, 4, {"pp": 2}):
        # the warm-up has not begun
        assert metrics == {"actor/lr": 0.0, "actor/skipped_steps": 2.0, "actor/optimizer_steps": 0.0}


def updated_until_a_step_is_made(parallel: dict[str, Any]) -> dict[str, Any]:
    """Update in float16 from Megatron's first loss scale, which is too large, until a step is made."""
    worker = actor(parallel, "actor", model={"dtype": "float16"}, ppo_epochs=1, optim={"on_nonfinite": "raise"})
    shard = own_shard(experience(16), worker)
    before, scales, skipped = weights(worker), [], []
    while not skipped or skipped[-1] > 0:
        assert len(skipped) < 30
        scales.append(float(worker.state.optimizer.get_loss_scale()))
        skipped.append(worker.update_actor(shard).meta_info["metrics"]["actor/skipped_steps"])
        if skipped == [2.0]:
            assert largest_difference(before, weights(worker)) == 0.0
            assert worker.state.counters["optimizer_steps"] == 0
    return {"scales": scales, "skipped": skipped, "moved": largest_difference(before, weights(worker))}


@pytest.mark.simulated
def test_overflow_of_float16_skips_the_step_and_lowers_the_loss_scale() -> None:
    for rank in run_ranks(updated_until_a_step_is_made, 2, {"pp": 2}):
        assert rank["skipped"][0] == 2.0  # both mini-batches
        assert rank["scales"] == sorted(rank["scales"], reverse=True)
        assert rank["scales"][-1] < rank["scales"][0] == 2.0**32
        assert 0 < rank["moved"] < 1


def rejected_layout(parallel: dict[str, Any]) -> dict[str, Any]:
    with pytest.raises((LayoutError, ConfigError)) as caught:
        actor(parallel)
    return caught.value.fields


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("parallel", "fields"),
    [
        ({"tp": 2, "pp": 2}, {"world_size": 2, "product": 4, "sizes": {"tp": 2, "pp": 2, "cp": 1}}),
        ({"pp": 3}, {"key": "model.num_layers", "value": 4}),
        ({"cp": 2}, {"key": "parallel.cp", "value": 2}),
    ],
)
def test_axes_that_do_not_divide_are_rejected_with_the_numbers(
    parallel: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert run_ranks(rejected_layout, 2, parallel)[0] == fields


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optim.lr=-1", "optim.lr", -1.0),
        ("optim.decay_style=cosine", "optim.total_steps", 0),
        ("rollout.top_p=1.5", "rollout.top_p", 1.5),
        ("ppo_minibatch_size=4", "ppo_minibatch_size", None),
        ("sft_optim.distributed_optimizer=true", "sft_optim.distributed_optimizer", True),
        ("clip_ratio_c=0.5", "clip_ratio_c", 0.5),
        ("optim.betas=[0.9,1.5]", "optim.betas", 1.5),
        ("kl_loss_type=k4", "kl_loss_type", "k4"),
    ],
)
def test_invalid_configuration_is_rejected_with_key_and_value(override: str, key: str, value: Any) -> None:
    base = {"model": MODEL, "rollout": {"prompt_length": 10, "response_length": 6}}
    with pytest.raises(ConfigError) as caught:
        load_config(ActorConfig, base, overrides=[override])
    assert (caught.value.key, caught.value.value) == (key, value)


def test_unknown_role_is_rejected() -> None:
    config = load_config(ActorConfig, {"model": MODEL, "rollout": {"prompt_length": 10, "response_length": 6}})
    with pytest.raises(ConfigError) as caught:
        ActorRolloutRefWorker(config, "actor_critic")
    assert (caught.value.key, caught.value.value) == ("role", "actor_critic")


def too_long_sequences() -> tuple[str, int]:
    worker = actor({}, rollout={"prompt_length": PROMPT, "response_length": 40})
    with pytest.raises(ConfigError) as raised:
        worker.generate_sequences(prompts(4, GREEDY))
    return raised.value.key, raised.value.value


@pytest.mark.simulated
def test_lengths_are_checked_when_an_actor_generates() -> None:
    assert run_ranks(too_long_sequences, 1) == [("model.max_sequence_length", 32)]


class OfOtherSizes(ActorRolloutRefWorker):
    def build_model(self) -> list[Any]:
        sizes = {"ffn_hidden_size": 96, "rotary_base": 500}
        return build_model(dataclasses.replace(self.config.model, **sizes), self.config.parallel, self.context)


class OfAnotherLayout(ActorRolloutRefWorker):
    def build_model(self) -> list[Any]:
        chunks = super().build_model()
        for chunk in chunks:
            chunk.config = dataclasses.replace(chunk.config, sequence_parallel=False)
        return chunks


def differing_models() -> list[dict[str, Any]]:
    differing = []
    for worker_class, parallel in ((OfOtherSizes, {"tp": 2}), (OfAnotherLayout, {"tp": 2, "sequence_parallel": True})):
        with pytest.raises(ConfigError) as raised:
            actor(parallel, "actor", worker_class)
        differing.append(raised.value.differing)
    return differing


@pytest.mark.simulated
def test_a_model_that_is_not_the_configurations_is_rejected_before_training() -> None:
    sizes, layout = run_ranks(differing_models, 2)[0]
    assert sizes == {"ffn_hidden_size": (96, 64), "rotary_base": (500, 10_000)}
    assert layout == {"sequence_parallel": (False, True)}
