"""A group that only serves engines holds no model: shards of the actor become Hugging Face tensors in the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller.errors import CallRejected
from mcontroller.testing import simulated_worker_group
from tests.ranks import run_ranks
from tests.workers.generate.vllm.stand_in import StandInLLM, standing_in
from tests.workers.roles import MODEL, OPTIM, PROMPT, RESPONSE, SAMPLED, actor, experience, prompts
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config
from workers.generate.vllm import start
from workers.weights.fingerprints import WeightsNotArrived
from workers.weights.transfer.weight_transfer import WeightTransfer

SIZES = MODEL | {"num_attention_heads": 4, "hidden_size": 128, "num_query_groups": 2, "family": "qwen2"}
DENSE = SIZES | {"add_qkv_bias": True, "tie_embeddings": True}
EXPERTS = SIZES | {
    "family": "qwen3_moe",
    "qk_layernorm": True,
    "num_layers": 2,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "transformer": {"moe_router_load_balancing_type": "none"},
}


@pytest.fixture(autouse=True)
def engines() -> Iterator[type[StandInLLM]]:
    with standing_in() as llm:
        yield llm


def group(role: str, ranks: int, parallel: dict[str, Any], model: dict[str, Any], **rollout: Any) -> Any:
    values = {
        "model": model,
        "parallel": parallel,
        "optim": OPTIM,
        "rollout": {"prompt_length": PROMPT, "response_length": RESPONSE, "seed": 3, **rollout},
        "ppo_mini_batch_size": 8,
        "ppo_micro_batch_size": 2,
        "ppo_epochs": 1,
    }
    made = simulated_worker_group(ActorRolloutRefWorker, ranks, load_config(ActorConfig, values), role, name=role)
    made.init_model()
    return made


def engine_group(ranks: int, parallel: dict[str, Any], model: dict[str, Any], tp: int = 1) -> Any:
    return group("rollout", ranks, parallel, model | {"seed": 7}, engine="vllm", vllm={"tp": tp, "bucket_bytes": 8192})


def held_by_one_process(model: dict[str, Any], exported: Path) -> None:
    worker = actor({}, "actor", model=model | {"hf_path": str(exported)})
    found = {name: tensor.clone() for name, tensor in worker.rollout_weights()}
    torch.save(found, exported / "held.pt")


@pytest.mark.parametrize(
    ("model", "ranks", "from_axes", "to_ranks", "to_axes", "tp", "engines_there", "of_node"),
    [
        (DENSE, 4, {"tp": 2, "pp": 2}, 2, {"tp": 2}, 1, 2, 2),
        (DENSE, 2, {"tp": 2}, 2, {}, 2, 1, 1),
        (EXPERTS, 4, {"ep": 2, "pp": 2}, 1, {}, 1, 1, 1),
    ],
    ids=["tp2-pp2-two-engines", "engine-of-two-shards-on-two-nodes", "experts"],
)
@pytest.mark.simulated
def test_every_engine_gets_the_actors_weights_and_no_rank_has_a_model(
    model: dict[str, Any],
    ranks: int,
    from_axes: dict[str, Any],
    to_ranks: int,
    to_axes: dict[str, Any],
    tp: int,
    engines_there: int,
    of_node: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "node_id", lambda: f"node{torch.distributed.get_rank() // of_node}")
    actors, rollout = group("actor", ranks, from_axes, model), engine_group(to_ranks, to_axes, model, tp)
    with pytest.raises(CallRejected):
        rollout.generate_sequences(prompts(4, SAMPLED))
    with pytest.raises(CallRejected):
        rollout.save_checkpoint(str(tmp_path / "checkpoint"))
    with WeightTransfer(actors, rollout) as transfer:
        assert transfer.run().metrics()["weights/verify_seconds"] > 0
        actors.update_actor(experience(8))
        report = transfer.run()
    assert report.bytes_sent > 0 and rollout.has_weights()
    generated = rollout.generate_sequences(prompts(4, SAMPLED))
    assert set(generated.batch["policy_version"].tolist()) == {1} and "metrics" not in generated.meta_info
    assert [worker.state.models for worker in rollout.workers] == [{}] * to_ranks
    actors.export_hf(str(tmp_path / "policy"))
    run_ranks(held_by_one_process, 1, model, tmp_path / "policy")
    expected = torch.load(tmp_path / "policy" / "held.pt")
    assert len(StandInLLM.started) == engines_there
    for llm in StandInLLM.started:
        assert len(llm.weights_by_node) == -(-tp // of_node)
        for held in llm.weights_by_node:
            assert held.keys() == expected.keys()
            assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
        assert llm.events.count("receive_policy_bucket") > 4


@pytest.mark.simulated
def test_a_tensor_that_changes_on_its_way_is_named_with_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    actors, rollout = group("actor", 2, {"tp": 2}, DENSE), engine_group(2, {"tp": 2}, DENSE)
    receive = StandInLLM._receive_policy_bucket

    def damaged(llm: StandInLLM, paths: Any, tensors: Any) -> None:
        receive(llm, paths, tensors)
        if llm is StandInLLM.started[1]:
            for name in llm.weights.keys() & {"model.layers.1.self_attn.k_proj.bias"}:
                llm.weights[name][0] += 1

    with WeightTransfer(actors, rollout) as transfer:
        monkeypatch.setattr(StandInLLM, "_receive_policy_bucket", damaged)
        with pytest.raises(WeightsNotArrived) as caught:
            transfer.run()
        assert [*caught.value.tensors] == ["model.layers.1.self_attn.k_proj.bias"] and caught.value.ranks == [1]
        with pytest.raises(CallRejected):
            rollout.generate_sequences(prompts(4, SAMPLED))
        monkeypatch.setattr(StandInLLM, "_receive_policy_bucket", receive)
        transfer.run()
    assert len(rollout.generate_sequences(prompts(4, SAMPLED))) == 4


@pytest.mark.simulated
def test_an_engine_of_another_model_is_rejected_before_anything_is_sent() -> None:
    actors, other = group("actor", 1, {}, DENSE), DENSE | {"hidden_size": 64, "num_layers": 3}
    with pytest.raises(CallRejected) as caught:
        WeightTransfer(actors, engine_group(1, {}, other))
    assert "hidden_size is 128, the engine's is 64" in caught.value.cause
    assert all("receive_policy_bucket" not in llm.events for llm in StandInLLM.started)


@pytest.mark.simulated
def test_an_engine_that_has_slept_needs_its_weights_again() -> None:
    actors, rollout = group("actor", 1, {}, DENSE), engine_group(1, {}, DENSE)
    with WeightTransfer(actors, rollout) as transfer:
        transfer.run()
        rollout.offload()
        assert not rollout.has_weights()
        with pytest.raises(CallRejected):
            rollout.generate_sequences(prompts(4, SAMPLED))
        transfer.run()
    assert len(rollout.generate_sequences(prompts(4, SAMPLED))) == 4


@pytest.mark.simulated
def test_without_an_actor_the_engine_gets_the_checkpoint(tmp_path: Path) -> None:
    group("actor", 1, {}, DENSE).export_hf(str(tmp_path / "policy"))
    rollout = engine_group(1, {}, DENSE | {"hf_path": str(tmp_path / "policy")})
    metrics = rollout.generate_sequences(prompts(4, SAMPLED)).meta_info["metrics"]
    assert metrics["rollout/verify_seconds"] and metrics["rollout/update_bytes"]
    run_ranks(held_by_one_process, 1, DENSE, tmp_path / "policy")
    expected, [llm] = torch.load(tmp_path / "policy" / "held.pt"), StandInLLM.started
    assert llm.weights.keys() == expected.keys()
    assert all(torch.equal(llm.weights[name], tensor) for name, tensor in expected.items())
