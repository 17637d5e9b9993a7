"""Adapters in PEFT's format, merged models, and adapters and names that are rejected before processes start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mcontroller.errors import ConfigError
from tests.ranks import run_ranks
from tests.workers.lora.test_peft import SHORT, checkpoints, expected_of  # noqa: F401  # a fixture
from tests.workers.roles import MODEL, be_a_worker, callable_directly, experience
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config
from workers.config.lora import LoraConfig
from workers.config.trained_weights import adapter_target

ADAPTER = "adapter_model.safetensors"


def config_of(path: Path, **lora: Any) -> ActorConfig:
    model = {"hf_path": str(path), "dtype": "float32", "lora": {"path": str(path / "adapter")} | lora}
    return load_config(ActorConfig, {"model": model}, SHORT)


def exported(path: Path, parallel: dict[str, Any], out: Path) -> None:
    """Load the adapter of a checkpoint, and export it, and the merged model."""
    be_a_worker()
    config = load_config(ActorConfig, config_of(path), {"parallel": parallel})
    worker = callable_directly(ActorRolloutRefWorker(config, "rollout"))
    worker.init_model()
    worker.export_adapter(str(out / "adapter"))
    worker.export_hf(str(out / "merged"))


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("family", "world_size", "parallel"),
    [
        ("qwen3", 4, {"tp": 2, "pp": 2}),
        ("qwen3_moe", 4, {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}),
    ],
)
def test_adapter_is_exported_as_it_was_loaded_and_the_model_merged(
    family: str,
    world_size: int,
    parallel: dict[str, Any],
    checkpoints: dict[str, Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    path = checkpoints[family]
    run_ranks(exported, world_size, path, parallel, tmp_path)
    original, written = (load_file(each / "adapter" / ADAPTER) for each in (path, tmp_path))
    assert original.keys() == written.keys()
    assert all(torch.equal(original[name], written[name]) for name in original)
    ours, theirs = (json.loads((each / "adapter" / "adapter_config.json").read_text()) for each in (tmp_path, path))
    for key in ("r", "lora_alpha", "peft_type"):
        assert ours[key] == theirs[key]
    for key in ("target_modules", "target_parameters"):
        assert set(ours[key] or ()) == set(theirs[key] or ())
    transformers = pytest.importorskip("transformers")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    batch = experience(8).batch
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = merged(batch["input_ids"], batch["attention_mask"], position_ids=positions).logits
    chosen = logits[:, 9:-1].log_softmax(-1).gather(2, batch["input_ids"][:, 10:, None]).squeeze(2)
    torch.testing.assert_close(chosen * batch["response_mask"], expected_of(path)[0], atol=2e-5, rtol=0)


@pytest.mark.simulated
def test_adapter_of_another_base_is_rejected_before_processes_start(
    checkpoints: dict[str, Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    path = shutil.copytree(checkpoints["qwen3"], tmp_path / "model")
    run_ranks(exported, 1, path, {}, tmp_path / "out")
    shutil.rmtree(path / "adapter")
    shutil.copytree(tmp_path / "out" / "adapter", path / "adapter")
    ActorRolloutRefWorker.check_init(config=config_of(path), role="actor")
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"was trained on another base: .* SHA-256"):
        ActorRolloutRefWorker.check_init(config=config_of(path), role="actor")
    with safe_open(path / "adapter" / ADAPTER, "pt") as file:
        assert len(file.metadata()["base_sha256"]) == 64
    factors = load_file(path / "adapter" / ADAPTER)
    narrow = {name: each[:, :16].contiguous() if "lora_A" in name else each for name, each in factors.items()}
    save_file(narrow, path / "adapter" / ADAPTER)
    with pytest.raises(ConfigError, match=r"lora_A.weight is \[3, 16\], and .*.weight is \[.*\]"):
        ActorRolloutRefWorker.check_init(config=config_of(path), role="actor")


def test_names_of_megatron_select_what_those_of_peft_do() -> None:
    layer = "model.layers.0.self_attn"
    layers = {
        "linear_qkv": ("decoder.layers.0.self_attention.linear_qkv", [f"{layer}.{each}_proj" for each in "qkv"]),
        "linear_proj": ("decoder.layers.0.self_attention.linear_proj", [f"{layer}.o_proj"]),
    }
    for target, names in (("linear_qkv", ["q_proj", "k_proj", "v_proj"]), ("linear_proj", ["o_proj"])):
        ours, theirs = (LoraConfig(rank=4, alpha=8.0, targets=each) for each in ([target], names))
        for layer, (name, hf_names) in layers.items():
            found = adapter_target(ours, name, hf_names)
            assert found == adapter_target(theirs, name, hf_names)
            assert (found is None) == (layer != target)


@pytest.mark.parametrize(
    ("of_peft", "lora", "reason"),
    [
        ({"use_dora": True}, {}, "has use_dora=True; only False is supported"),
        ({"bias": "all"}, {}, "has bias='all'; only 'none' is supported"),
        ({"r": 0}, {}, "model.lora.rank is 0; it must be at least 1"),
        ({}, {"rank": 8}, "model.lora.rank is 8, and the adapter at .* has 3"),
        ({"r": "x"}, {}, "cannot be read: ValueError"),
    ],
)
def test_adapter_that_is_not_supported_is_rejected_by_name(
    of_peft: dict[str, Any],
    lora: dict[str, Any],
    reason: str,
    checkpoints: dict[str, Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    path = shutil.copytree(checkpoints["qwen3"], tmp_path / "model")
    file = path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | of_peft))
    with pytest.raises(ConfigError, match=reason):
        config_of(path, **lora)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"lora": {"rank": 0, "alpha": 1.0}}, "model.lora.rank is 0"),
        ({"lora": {"rank": 4}}, "alpha is not set"),
        ({"lora": {"rank": 4, "alpha": 8.0, "targets": ["q_prj"]}}, "'q_prj' matches nothing .* did you mean q_proj"),
        ({"lora": {"rank": 4, "alpha": 8.0, "exclude": ["layers.9.*"]}}, "exclude: 'layers.9.*' matches nothing"),
        ({"lora": {"rank": 4, "alpha": 8.0, "exclude": ["decoder.*"]}}, "leave no linear layer with an adapter"),
        ({"lora": {"rank": 4, "alpha": 8.0, "use_dora": True}}, "has no field 'use_dora'"),
        ({"freeze": ["router.weight"]}, "model.freeze: 'router.weight' matches nothing"),
        ({"freeze": ["*"]}, "leave no weight to train"),
        ({"num_moe_experts": 4, "lora": {"rank": 4, "alpha": 8.0}}, "selects experts that PEFT has no names for"),
        (
            {"num_moe_experts": 4, "qk_layernorm": True, "lora": {"rank": 4, "alpha": 8.0, "targets": ["gate_proj"]}},
            "which have one A in a layer of experts",
        ),
    ],
)
def test_names_that_select_nothing_are_rejected(model: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(ActorConfig, {"model": MODEL | model})
