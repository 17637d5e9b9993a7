"""Adapters and value heads of Megatron-Bridge's models compute what they do on native ones, or with transformers."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.bridge.models import ADAPTED, BRIDGE, EXPERTS, LAYOUTS, PLAIN, WITH_ENGINE, layouts_of
from tests.ranks import run_ranks
from tests.workers.lora.test_peft import (
    LINEARS,
    OF_ATTENTION,
    add_adapter,
    check_as_transformers,
    computed,
    log_probs,
    merged_weights,
    of_transformers,
    transformers,
)
from tests.workers.roles import actor, critic, experience, own_shard
from tests.workers.weights.hf_models import save_model, saved, tensors_of, world_size
from tests.workers.weights.transfer.test_equal_generation import generated, group
from workers.config.model import model_config_from_hf
from workers.lora.peft_files import adapter_tensors
from workers.weights.transfer.weight_transfer import WeightTransfer

pytestmark = pytest.mark.simulated

CASES = [(name, layouts_of(name)[1]) for name in ADAPTED]


def adapted(path: Path, axes: dict[str, Any], name: str) -> dict[str, Any]:
    """What ``computed`` returns, the weights with the adapter merged, and the adapter, on one rank."""
    changes = {"model": BRIDGE | {"transformer": ADAPTED[name].settings.get("transformer", {})}}
    result = computed(path, axes, changes)
    model = model_config_from_hf(path, dtype="float32", **ADAPTED[name].settings)
    settings = dataclasses.asdict(model) | {"lora": {"path": str(path / "adapter")}}
    worker = actor(axes, "actor", model=settings)
    with worker.context.activate():
        return result | {"merged": tensors_of(worker), "adapter": adapter_tensors(worker.model, "all")}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_adapters_compute_what_transformers_computes(name: str, layout: str, tmp_path: Path) -> None:
    path = save_model(ADAPTED[name], tmp_path / "model")
    add_adapter(path, experts=name != "gpt_oss")  # whose experts are transposed
    ranks = run_ranks(adapted, world_size(LAYOUTS[layout]), path, LAYOUTS[layout], name)
    check_as_transformers(path, ranks)
    factors = load_file(path / "adapter" / "adapter_model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for weight, value in merged_weights(model, factors).items():
            model.get_parameter(weight).copy_(value)
    model.save_pretrained(tmp_path / "merged")
    expected = saved(tmp_path / "merged")
    for rank in ranks:
        assert all(torch.equal(rank["adapter"][name], factors[name]) for name in factors)
        assert rank["merged"].keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(rank["merged"][name], value, atol=1e-6, rtol=0)


@pytest.mark.skipif(WITH_ENGINE, reason="Megatron's generation rejects these models")
def test_a_rollout_group_gets_the_weights_with_the_adapter_merged(tmp_path: Path) -> None:
    path = save_model(PLAIN["qwen3"], tmp_path)
    model = dataclasses.asdict(model_config_from_hf(path, dtype="float32", **BRIDGE))
    trainer = group("actor_rollout", 2, {"tp": 2}, model | {"lora": {"rank": 4, "alpha": 8.0}})
    rollout = group("rollout", 1, {}, model)
    before = generated(rollout).batch
    generated(trainer)  # as often: the seed counts the generations of a group
    trainer.update_actor(experience(8))
    with WeightTransfer(trainer, rollout) as transfer:
        transfer.run()
    expected, actual = generated(trainer).batch, generated(rollout).batch
    assert torch.equal(expected["responses"], actual["responses"])
    torch.testing.assert_close(expected["rollout_log_probs"], actual["rollout_log_probs"], atol=1e-5, rtol=0)
    assert (before["rollout_log_probs"] - actual["rollout_log_probs"]).abs().max() > 1e-3


@pytest.mark.skipif(WITH_ENGINE, reason="PEFT has no layers of Transformer Engine")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_what_the_tests_of_adapters_expect_is_what_peft_computes(name: str, tmp_path: Path) -> None:
    peft = importlib.import_module("peft")
    path = save_model(PLAIN[name], tmp_path)
    # PEFT takes gate_proj of a dense layer in a model with experts as that of the experts.
    add_adapter(path, linears=LINEARS if name == "qwen3" else OF_ATTENTION)
    expected, _, gradients = of_transformers(path)
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model = peft.PeftModel.from_pretrained(base, path / "adapter", is_trainable=True).eval()
    actual = log_probs(model)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    (-actual.sum() / experience(8).batch["response_mask"].sum()).backward()
    theirs = {
        name.replace(".default", ""): parameter.grad for name, parameter in model.named_parameters() if "lora_" in name
    }
    assert theirs.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(theirs[name], gradient, atol=1e-5, rtol=1e-4)


def valued(path: Path, axes: dict[str, Any], out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Values, and the model after an update of a critic, which is exported to ``out``, on one rank."""
    model = dataclasses.asdict(model_config_from_hf(path, dtype="float32", **settings))
    worker = critic(axes, model=model)
    shard = own_shard(experience(8), worker)
    values = worker.compute_values(shard)
    worker.export_hf(str(out / "before"))
    worker.update_critic(shard)
    worker.export_hf(str(out / "after"))
    return {"values": None if values is None else values.batch["values"]}


@pytest.mark.skipif(WITH_ENGINE, reason="a value head has no layers of Transformer Engine")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_critic_is_that_of_native_layers_and_comes_back(name: str, tmp_path: Path) -> None:
    path = save_model(PLAIN[name], tmp_path / "model", tie_word_embeddings=name == "qwen3")
    run_ranks(valued, 1, path, {}, tmp_path / "drawn", BRIDGE)  # no head in the files: drawn from the seed
    start = tmp_path / "drawn" / "before"
    assert saved(start)["score.weight"].std() > 0 and "lm_head.weight" not in saved(start)
    native = run_ranks(valued, 1, start, {}, tmp_path / "native", {})
    axes = LAYOUTS["TP2 x PP2 x EP2 with SP" if name in EXPERTS else "TP2 x PP2 with SP"]
    ranks = run_ranks(valued, world_size(axes), start, axes, tmp_path / "bridge", BRIDGE)
    for rank in ranks:
        if rank["values"] is not None:
            torch.testing.assert_close(rank["values"], native[0]["values"], atol=1e-5, rtol=0)
    for state, atol in (("before", 0.0), ("after", 1e-5)):
        expected, actual = saved(tmp_path / "native" / state), saved(tmp_path / "bridge" / state)
        assert expected.keys() == actual.keys()
        for key, value in expected.items():
            torch.testing.assert_close(actual[key], value, atol=atol, rtol=0)
