"""The memory of a run's calls: an engine outside of the worker is not Megatron's layers."""

from __future__ import annotations

import pytest

from workers import ActorConfig, ActorRolloutRefWorker, load_config
from workers.role_calls import Lengths, calls_of_roles, estimates
from workers.verify.roles import ModelRole

KEY = "actor_rollout_ref"
MODEL = {
    "vocab_size": 64,
    "max_sequence_length": 64,
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "transformer_impl": "local",
}


@pytest.mark.simulated
@pytest.mark.parametrize(("engine", "last"), [("megatron", ["generate_sequences"]), ("vllm", [])])
def test_generation_is_estimated_for_engines_in_the_worker(engine: str, last: list[str]) -> None:
    config = load_config(ActorConfig, {"model": MODEL, "rollout": {"engine": engine}})
    role = ModelRole.of(ActorRolloutRefWorker, config, "actor_rollout_ref", 1)
    calls = calls_of_roles({KEY: role}, Lengths(prompt=16, response=16, rows=4))
    sends = {name for name, call in calls.items() if call.method == "rollout_weights"}
    assert bool(sends) == (engine == "vllm")
    outcomes = estimates(calls)
    expected = ["update_actor", "compute_log_prob", "compute_ref_log_prob", *last]
    assert [*outcomes] == [f"{KEY}.{method}" for method in expected]
    assert all(outcome.peak > 0 for outcome in outcomes.values())


@pytest.mark.simulated
def test_weights_whose_parts_are_on_several_ranks_are_sent_where_every_rank_runs() -> None:
    sections = {"model": MODEL, "rollout": {"engine": "vllm"}, "parallel": {"tp": 2}}
    role = ModelRole.of(ActorRolloutRefWorker, load_config(ActorConfig, sections), "actor_rollout", 2)
    call = calls_of_roles({KEY: role}, Lengths(prompt=16, response=16, rows=4))[f"{KEY}.rollout_weights"]
    assert call.needs_every_rank
    outcome = call.outcome(every_rank=True)
    assert outcome.failure == "" and [*outcome.uses] == [0, 1]
