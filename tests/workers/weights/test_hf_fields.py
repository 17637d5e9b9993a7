"""Each key of config.json is computed, kept as it is, or rejected with an error that names it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mcontroller.errors import ConfigError
from workers import ModelConfig, load_config, model_config_from_hf
from workers.planning import planning
from workers.weights.hf.config import family_of, hf_config_of
from workers.weights.hf.fields import INERT, ReadKeys, layered

# The contents of config.json as published with these models.
LLAMA_31 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_2 = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_length": 4096,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.32.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
SMOLLM2 = {
    "_name_or_path": "/fsx/loubna/checkpoints/sft",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
QWEN_25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "initializer_range": 0.02,
    "intermediate_size": 8960,
    "max_position_embeddings": 4096,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3_MOE = {
    **QWEN_3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}
QWEN_3_CODER = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5472,
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "qkv_bias": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.3",
    "use_cache": True,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED = {
    "llama_31": LLAMA_31,
    "llama_2": LLAMA_2,
    "smollm2": SMOLLM2,
    "qwen_25": QWEN_25,
    "qwen_3": QWEN_3,
    "qwen_3_moe": QWEN_3_MOE,
    "qwen_3_coder": QWEN_3_CODER,
}


def read(path: Path, config: dict[str, Any]) -> Any:
    (path / "config.json").write_text(json.dumps(config))
    return model_config_from_hf(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read_and_their_inert_keys_exported(name: str, tmp_path: Path) -> None:
    config = PUBLISHED[name]
    model = read(tmp_path, config)
    assert (model.num_layers, model.vocab_size) == (config["num_hidden_layers"], config["vocab_size"])
    exported = hf_config_of(dataclasses.replace(model, max_sequence_length=16))  # of this run, not of the model
    assert exported["max_position_embeddings"] == config["max_position_embeddings"]
    missing = config.keys() - exported.keys() - family_of(model).neutral().keys()
    assert missing == set()
    same = config.keys() & (INERT | {"sliding_window", "max_window_layers", "router_aux_loss_coef"})
    assert {key: exported[key] for key in same} == {key: config[key] for key in same}


@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen2Config", "Qwen3Config", "Qwen3MoeConfig"])
def test_every_default_of_transformers_is_read(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)(architectures=["Unused"]).to_dict()
    assert read(tmp_path, config).num_layers == config["num_hidden_layers"]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama_31", "is_causal", False),
        ("llama_31", "use_bidirectional_attention", True),
        ("llama_31", "attention_dropout", 0.1),
        ("llama_31", "pretraining_tp", 2),
        ("llama_31", "sliding_window", 4096),
        ("llama_31", "num_experts", 8),
        ("llama_31", "attention_multiplier", 0.5),
        ("llama_31", "partial_rotary_factor", 0.5),
        ("llama_31", "rope_interleaved", True),
        ("llama_31", "auto_map", {"AutoModelForCausalLM": "modeling.Model"}),
        ("llama_31", "quantization_config", {"quant_method": "fp8"}),
        ("llama_31", "layer_types", ["linear_attention"] * 32),
        ("qwen_25", "use_sliding_window", True),
        ("qwen_25", "use_mrope", True),
        ("qwen_3_moe", "num_shared_experts", 1),
        ("qwen_3_coder", "qkv_bias", True),
        ("qwen_3_coder", "use_qk_norm", False),
        ("qwen_3_coder", "shared_expert_intermediate_size", 512),
        ("qwen_25", "qkv_bias", False),
        ("llama_31", "use_qk_norm", True),
    ],
)
def test_a_key_that_changes_the_computation_is_rejected(name: str, key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, PUBLISHED[name] | {key: value})
    assert (caught.value.key, caught.value.value) == (key, value)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("hidden_size", "64", ""),
        ("hidden_size", True, ""),
        ("num_attention_heads", 0, ""),
        ("num_hidden_layers", 2.5, ""),
        ("num_key_value_heads", "8", ""),
        ("head_dim", 0, ""),
        ("rope_theta", None, ""),
        ("rope_theta", "10000", ""),
        ("rope_scaling", "llama3", ""),
        ("rope_scaling", {"rope_type": ["llama3"]}, "rope_type"),
        ("rope_parameters", {"rope_theta": 10000.0}, "rope_theta"),
        ("rope_parameters", {"rope_type": "default", "mrope_section": [8, 8, 8]}, "rope_parameters.mrope_section"),
        ("rms_norm_eps", -1, ""),
        ("tie_word_embeddings", "no", ""),
        ("decoder_sparse_step", 0, ""),
        ("mlp_only_layers", 3, ""),
        ("num_local_experts", 64, ""),
        ("norm_topk_prob", 1, ""),
        ("torch_dtype", "int8", ""),
    ],
)
def test_a_value_of_another_type_is_an_error_that_names_the_key(
    key: str, value: Any, named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, QWEN_3_MOE | {key: value})
    assert f"{named or key} is " in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "changes", "key"),
    [
        *((name, {}, "model_type") for name in ("gemma3_text", "phi3", "glm4", "gpt_oss", "deepseek_v2")),
        ("granitemoehybrid", {"residual_multiplier": 0.22}, "residual_multiplier"),
    ],
)
def test_an_architecture_that_is_not_built_is_named_with_what_to_do(
    model_type: str, changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, LLAMA_31 | {"model_type": model_type} | changes)
    assert caught.value.key == key


def test_a_name_of_the_hub_is_downloaded_or_answered_with_the_command(tmp_path: Path, monkeypatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def offline(name: str, **_: object) -> str:
        raise hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(ConfigError) as caught:
        model_config_from_hf("Qwen/Qwen3-0.6B")
    assert (caught.value.key, caught.value.value) == ("hf_path", "Qwen/Qwen3-0.6B")
    with pytest.raises(ConfigError) as caught:
        model_config_from_hf(tmp_path / "typo")
    assert caught.value.key == "hf_path"
    with pytest.raises(ConfigError) as caught:
        model_config_from_hf(tmp_path)
    assert caught.value.key == "hf_path"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31))
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: {"Qwen/Qwen3-0.6B": str(tmp_path)}[name])
    assert model_config_from_hf("Qwen/Qwen3-0.6B").hf_path == str(tmp_path)
    patterns: list[str] = []

    def downloaded(name: str, *, allow_patterns: list[str], **_: object) -> str:
        patterns[:] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", downloaded)
    model_config_from_hf("Qwen/Qwen3-0.6B")
    assert {"*.safetensors", "*.gguf", "*.py", "*.json"} <= set(patterns)
    with planning():
        model_config_from_hf("Qwen/Qwen3-0.6B")
    assert not {"*.safetensors", "*.gguf"} & set(patterns) and "*.json" in patterns


@pytest.mark.parametrize(
    ("installed", "changes", "provider"),
    [
        (False, {}, "native"),
        (True, {}, "bridge"),
        (True, {"provider": "auto"}, "bridge"),
        (True, {"provider": "native"}, "native"),
        (True, {"dtype": "float32", "transformer": {"moe_aux_loss_coeff": 0.1}}, "bridge"),
        (True, {"rotary_base": 500}, "native"),  # Bridge reads it from config.json
    ],
)
def test_bridge_builds_what_config_json_describes_where_it_is_installed(
    installed: bool, changes: dict[str, Any], provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.config.model.has_bridge", lambda: installed)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31))
    configured = load_config(ModelConfig, {"hf_path": str(tmp_path), **changes})
    for model in (configured, model_config_from_hf(tmp_path, **changes)):
        assert model.provider == provider
        native = {"rope_scaling_factor": 8.0, "rotary_base": changes.get("rotary_base", 500000)}
        if provider == "native":
            assert {name: getattr(model, name) for name in native} == native


def test_a_model_without_a_checkpoint_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.config.model.has_bridge", lambda: True)
    sizes = {"vocab_size": 8, "max_sequence_length": 8, "num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    assert ModelConfig(**sizes).provider == "native"


def test_a_family_cannot_copy_a_config_which_would_count_as_reading_all_of_it() -> None:
    read = ReadKeys({"vocab_size": 8, "unknown": 1})
    with pytest.raises(TypeError):
        dict(read)
    changed = layered({"vocab_size": 9}, read)
    assert (changed["vocab_size"], changed.get("unknown"), changed.get("hidden_size")) == (9, 1, None)
    assert read.keys_read == {"unknown", "hidden_size"}
