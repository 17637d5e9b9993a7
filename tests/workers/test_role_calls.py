"""The memory of a run's calls: an engine outside of the worker is not Megatron's layers."""

from __future__ import annotations

import pytest

from workers import ActorConfig, load_config
from workers.role_calls import Lengths, calls_of_run

KEY = "actor_rollout_ref"
MODEL = {
    "vocab_size": 64,
    "max_sequence_length": 64,
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
}


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("engine", "calls"), [("megatron", ["train", "score", "generate", "score"]), ("vllm", ["train", "score", "score"])]
)
def test_generation_is_estimated_for_engines_in_the_worker(engine: str, calls: list[str]) -> None:
    config = load_config(ActorConfig, {"model": MODEL, "rollout": {"engine": engine}})
    actual = calls_of_run({KEY: config}, {KEY: 1}, Lengths(prompt=16, response=16, rows=4), layers="local")
    assert [call.call for call in actual] == calls
    assert all(min(memory.total for memory in call.stages) > 0 for call in actual)
