"""Adapters in PEFT's format, merged models, and adapters and names that are rejected before processes start."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mcontroller.errors import ConfigError, DataError
from tests.ranks import run_ranks
from tests.workers.lora.test_peft import SHORT, checkpoints, expected_of  # noqa: F401  # a fixture
from tests.workers.roles import MODEL, be_a_worker, callable_directly, experience
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, ModelConfig, load_config
from workers.config.lora import LoraConfig, peft_fields
from workers.config.trained_weights import adapter_target, check_trained, linear_names
from workers.lora.base import base_hash
from workers.weights.hf.export_files import exporting

ADAPTER = "adapter_model.safetensors"


@pytest.fixture
def family() -> str:
    """The model of tests that name none."""
    return "qwen3"


@pytest.fixture
def path(family: str, checkpoints: dict[str, Path], tmp_path: Path) -> Path:  # noqa: F811
    """A checkpoint with an adapter, which a test may change."""
    return Path(shutil.copytree(checkpoints[family], tmp_path / "model"))


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
    original, written = (load_file(directory / "adapter" / ADAPTER) for directory in (path, tmp_path))
    assert original.keys() == written.keys()
    assert all(torch.equal(original[name], written[name]) for name in original)
    ours, theirs = (
        json.loads((directory / "adapter" / "adapter_config.json").read_text()) for directory in (tmp_path, path)
    )
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
def test_adapter_of_another_base_is_rejected_before_processes_start(path: Path, tmp_path: Path) -> None:
    run_ranks(exported, 1, path, {}, tmp_path / "out")
    shutil.rmtree(path / "adapter")
    shutil.copytree(tmp_path / "out" / "adapter", path / "adapter")
    ActorRolloutRefWorker.check_init(config=config_of(path), role="actor")
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        ActorRolloutRefWorker.check_init(config=config_of(path), role="actor")
    assert caught.value.key == "model.lora.path"
    with safe_open(path / "adapter" / ADAPTER, "pt") as file:
        assert len(file.metadata()["base_sha256"]) == 64


def test_names_of_megatron_select_what_those_of_peft_do() -> None:
    layer = "model.layers.0.self_attn"
    layers = {
        "linear_qkv": ("decoder.layers.0.self_attention.linear_qkv", [f"{layer}.{letter}_proj" for letter in "qkv"]),
        "linear_proj": ("decoder.layers.0.self_attention.linear_proj", [f"{layer}.o_proj"]),
    }
    for target, names in (("linear_qkv", ["q_proj", "k_proj", "v_proj"]), ("linear_proj", ["o_proj"])):
        ours, theirs = (LoraConfig(rank=4, alpha=8.0, targets=targets) for targets in ([target], names))
        for layer, (name, hf_names) in layers.items():
            actual = adapter_target(ours, name, hf_names)
            assert actual == adapter_target(theirs, name, hf_names)
            assert (actual is None) == (layer != target)


@pytest.mark.parametrize(
    ("of_peft", "lora", "key"),
    [
        ({"r": 0}, {}, "model.lora.rank"),
        ({}, {"rank": 8}, "model.lora.rank"),
        ({"lora_alpha": "x"}, {}, "model.lora.path"),
        ({"exclude_modules": ["o_proj"]}, {"exclude": []}, "model.lora.exclude"),
    ],
)
def test_adapter_that_is_not_supported_is_rejected_by_name(
    of_peft: dict[str, Any],
    lora: dict[str, Any],
    key: str,
    path: Path,
) -> None:
    file = path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | of_peft))
    with pytest.raises(ConfigError) as caught:
        config_of(path, **lora)
    assert caught.value.key == key


# The file that PEFT 0.21.2 writes for LoraConfig(), without r, lora_alpha and targets.
PEFT_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "auto_mapping", "base_model_name_or_path")),
    **dict.fromkeys(("corda_config", "eva_config", "exclude_modules", "kasa_config", "layer_replication")),
    **dict.fromkeys(("layers_pattern", "layers_to_transform", "lora_ga_config", "megatron_config", "modules_to_save")),
    **dict.fromkeys(("monteclora_config", "revision", "target_parameters", "task_type", "trainable_token_indices")),
    **dict.fromkeys(("use_bdlora", "velora_config")),
    **dict.fromkeys(("ensure_weight_tying", "fan_in_fan_out", "inference_mode", "lora_bias", "use_dora"), False),
    **dict.fromkeys(("use_qalora", "use_rslora"), False),
    **{"alpha_pattern": {}, "loftq_config": {}, "rank_pattern": {}, "bias": "none", "init_lora_weights": True},
    **{"lora_dropout": 0.0, "megatron_core": "megatron.core", "peft_type": "LORA", "peft_version": "0.21.2"},
    **{"qalora_group_size": 16, "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
}


def fields_of(path: Path, changes: dict[str, Any]) -> dict[str, Any]:
    (path / "adapter_config.json").write_text(json.dumps(PEFT_DEFAULTS | changes))
    return peft_fields(str(path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[
            ("init_lora_weights", name)
            for name in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica")
        ],
        *[("peft_type", name) for name in ("IA3", "ADALORA", None)],
        *[("bias", name) for name in ("all", "lora_only")],
        *[(name, True) for name in ("use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out")],
        *[(name, ["embed_tokens"]) for name in ("modules_to_save", "layers_pattern")],
        *[(name, [1, 2]) for name in ("trainable_token_indices", "alora_invocation_tokens", "layers_to_transform")],
        *[(name, {"q_proj": 8}) for name in ("rank_pattern", "alpha_pattern", "megatron_config", "corda_config")],
        *[(name, {"rank": 1}) for name in ("arrow_config", "kasa_config", "monteclora_config", "velora_config")],
        ("layers_to_transform", 0),
        ("layer_replication", [[0, 1], [0, 2]]),
        ("loftq_config", {"loftq_bits": 4}),
        ("trainable_token_indices", {"embed_tokens": [1]}),
        ("ensure_weight_tying", True),
        ("use_rslora", "no"),
        ("r", 3.5),
        ("r", "3"),
        ("target_modules", r".*\.q_proj"),
        ("exclude_modules", r".*layers\.0.*"),
        ("a_key_of_a_later_peft", 1),
        ("a_key_of_a_later_peft", 0),
        ("a_key_of_a_later_peft", {"x": 1}),
    ],
)
def test_key_of_an_adapter_that_changes_what_it_computes_is_rejected(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        fields_of(tmp_path, {key: value})
    assert (caught.value.key, caught.value.field, caught.value.actual) == ("model.lora.path", key, value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *[{"init_lora_weights": method} for method in (False, "gaussian", "orthogonal", "eva")],  # equal with PEFT
        {"lora_dropout": 0.05, "task_type": "CAUSAL_LM", "base_model_name_or_path": "a/b", "inference_mode": True},
        {"eva_config": {"rho": 2.0}, "qalora_group_size": 8, "auto_mapping": {"parent_library": "a"}},
        {"a_key_of_a_later_peft": None, "another": False, "a_third": [], "a_fourth": {}},
    ],
)
def test_keys_of_an_adapter_that_change_nothing_are_accepted(changes: dict[str, Any], tmp_path: Path) -> None:
    expected = {"rank": 3, "alpha": 6.0, "targets": ["q_proj", "v_proj"], "exclude": []}
    assert fields_of(tmp_path, changes) == expected | {"use_rslora": False, "experts": False}


def test_excluded_modules_of_an_adapter_are_read(tmp_path: Path) -> None:
    assert fields_of(tmp_path, {"exclude_modules": ["layers.0.self_attn.q_proj"]})["exclude"] == [
        "layers.0.self_attn.q_proj"
    ]


def with_tensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> ActorConfig:
    """Add tensors to the adapter of a model."""
    factors = load_file(path / "adapter" / ADAPTER)
    added = {f"base_model.model.{name}": torch.ones(shape) for name, shape in shapes.items()}
    save_file(factors | added, path / "adapter" / ADAPTER)
    return config_of(path)


def loading_error(config: ActorConfig) -> tuple[str, list[str]]:
    be_a_worker()
    worker = callable_directly(ActorRolloutRefWorker(config, "rollout"))
    with pytest.raises(DataError) as caught:
        worker.init_model()
    return caught.value.tensor, getattr(caught.value, "unused", [])


NO_FACTORS = (
    "model.embed_tokens.lora_embedding_A",
    "model.embed_tokens.weight",
    "model.embed_tokens.token_adapter.trainable_tokens_delta",
    "model.layers.0.self_attn.q_proj.lora_magnitude_vector",
    "model.layers.0.self_attn.q_proj.lora_B.bias",
)


@pytest.mark.simulated
def test_tensors_that_are_no_factors_are_rejected(path: Path) -> None:
    config = with_tensors(path, dict.fromkeys(NO_FACTORS, (3, 61)))
    ((_, unused),) = run_ranks(loading_error, 1, config)
    assert unused == sorted(f"base_model.model.{name}" for name in NO_FACTORS)


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("family", "parallel", "module", "width", "height"),
    [
        ("qwen3", {"pp": 2}, "lm_head", 32, 61),
        ("qwen3", {"tp": 2}, "model.layers.0.self_attn.k_proj", 32, 16),
        ("qwen3_moe", {"ep": 2}, "model.layers.0.mlp.gate", 32, 4),
    ],
)
def test_factors_of_a_layer_without_an_adapter_are_rejected(
    parallel: dict[str, int],
    module: str,
    width: int,
    height: int,
    path: Path,
) -> None:
    factors = {f"{module}.lora_A.weight": (3, width), f"{module}.lora_B.weight": (height, 3)}
    config = load_config(ActorConfig, with_tensors(path, factors), {"parallel": parallel})
    ActorRolloutRefWorker.check_init(config=config, role="actor")
    names = [f"base_model.model.{name}" for name in factors]
    assert run_ranks(loading_error, 2, config) == [(names[0], names)] * 2


@pytest.mark.simulated
@pytest.mark.parametrize("family", ["qwen3_moe"])
def test_adapter_of_more_experts_than_the_model_has_is_rejected(path: Path) -> None:
    factors = load_file(path / "adapter" / ADAPTER)
    name = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    factors[name] = torch.cat([factors[name], factors[name][:3]])
    save_file(factors, path / "adapter" / ADAPTER)
    assert run_ranks(loading_error, 1, config_of(path)) == [(name, [])]


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"lora": {"rank": 0, "alpha": 1.0}}, "model.lora.rank"),
        ({"lora": {"rank": 4}}, "model.lora.alpha"),
        ({"lora": {"rank": 4, "alpha": 8.0, "targets": ["q_prj"]}}, "model.lora.targets"),
        ({"lora": {"rank": 4, "alpha": 8.0, "exclude": ["layers.9.*"]}}, "model.lora.exclude"),
        ({"lora": {"rank": 4, "alpha": 8.0, "exclude": ["decoder.*"]}}, "model.lora.targets"),
        ({"lora": {"rank": 4, "alpha": 8.0, "use_dora": True}}, "model.lora.use_dora"),
        ({"freeze": ["router.weight"]}, "model.freeze"),
        ({"freeze": ["*"]}, "model.freeze"),
        (
            {"num_moe_experts": 4, "qk_layernorm": True, "lora": {"rank": 4, "alpha": 8.0, "targets": ["gate_proj"]}},
            "model.lora.targets",
        ),
    ],
)
def test_names_that_select_nothing_are_rejected(model: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(ActorConfig, {"model": MODEL | model})
    assert caught.value.key == key


def test_experts_of_a_model_without_a_family_have_names_of_peft() -> None:
    """The first family that is built like it is Mixtral, whose files have other names."""
    model = ModelConfig(**MODEL | {"num_moe_experts": 4}, lora=LoraConfig(rank=4, alpha=8.0, targets=["gate_up_proj"]))
    check_trained(model)
    name, tensors = "decoder.layers.1.mlp.experts.linear_fc1", "model.layers.1.block_sparse_moe.experts.0.w{}.weight"
    target = adapter_target(model.lora, name, linear_names([tensors.format(number) for number in (1, 3)]))
    assert target.factors == ("model.layers.1.mlp.experts.gate_up_proj",)


def test_a_model_with_compressed_attention_and_no_family_has_names_of_deepseek() -> None:
    inside = {"multi_latent_attention": True, "moe_router_enable_expert_bias": True, "q_lora_rank": 16}
    inside |= {"moe_router_score_function": "sigmoid"}
    model = MODEL | {"num_moe_experts": 4, "qk_layernorm": True, "transformer": inside}
    check_trained(ModelConfig(**model, lora=LoraConfig(rank=4, alpha=8.0, targets=["q_a_proj"])))


def test_layers_of_experts_that_are_not_gated_can_be_selected() -> None:
    model = {"num_moe_experts": 4, "gated_linear_unit": False, "lora": {"rank": 4, "alpha": 8.0}}
    load_config(ActorConfig, {"model": MODEL | model})


def test_experts_that_peft_has_no_names_for_are_rejected() -> None:
    lora, name = LoraConfig(rank=4, alpha=8.0), "decoder.layers.0.mlp.experts.linear_fc1"
    with pytest.raises(ConfigError) as caught:
        adapter_target(lora, name, ["model.layers.0.mlp.experts.first", "model.layers.0.mlp.experts.second"])
    assert caught.value.key == "model.lora.experts"


def test_layers_with_states_are_not_left_out_silently() -> None:
    """all-linear selects them as PEFT does."""
    states = {"mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_state_dim": 16, "mamba_num_groups": 1}
    of_states = MODEL | {"family": "nemotron_h", "hybrid_layer_pattern": "M*M-", "transformer": states}
    model = ModelConfig(**of_states, lora=LoraConfig(rank=4, alpha=8.0))
    with pytest.raises(ConfigError) as caught:
        check_trained(model)
    assert caught.value.key == "model.lora.exclude"
    check_trained(replace(model, lora=LoraConfig(rank=4, alpha=8.0, exclude=["in_proj", "out_proj"])))
    check_trained(replace(model, lora=LoraConfig(rank=4, alpha=8.0, targets=["q_proj", "up_proj"])))


def test_base_of_an_adapter_is_what_its_weights_follow_from(tmp_path: Path) -> None:
    model = ModelConfig(**MODEL)
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for same in ({"transformer": recomputed}, {"attention_dropout": 0.1}, {"verify_load": "off"}):
        assert base_hash(replace(model, **same)) == base_hash(model)
    for other in (
        {"seed": 5},
        {"layernorm_epsilon": 1e-3},
        {"init_method_std": 0.5},
        {"transformer": {"softmax_scale": 2.0}},
    ):
        assert base_hash(replace(model, **other)) != base_hash(model)
    model = replace(model, hf_path=str(tmp_path))
    save_file({"weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    before = base_hash(model)
    save_file({"weight": torch.zeros(4, 4)}, tmp_path / "left-of-an-earlier-export.safetensors")
    assert base_hash(model) == before


def fails_half_way(target: Path) -> list[str]:
    with pytest.raises(ZeroDivisionError), exporting(target) as directory:
        (directory / "config.json").touch()
        raise ZeroDivisionError
    return [entry.name for entry in target.parent.iterdir()]


@pytest.mark.simulated
def test_an_export_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    assert run_ranks(fails_half_way, 1, tmp_path / "adapter") == [[]]


SHARED_EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "family": "deepseek_v3",
    "transformer": {
        **{"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True},
        **{"moe_router_score_function": "sigmoid", "multi_latent_attention": True, "q_lora_rank": None},
    },
}


def test_adapters_of_shared_experts_that_overlap_are_rejected() -> None:
    model = MODEL | SHARED_EXPERTS | {"lora": {"rank": 4, "alpha": 8.0}}
    with pytest.raises(ConfigError) as caught:
        load_config(ActorConfig, {"model": model})
    assert (caught.value.key, caught.value.value) == ("model.transformer.moe_shared_expert_overlap", True)
    load_config(ActorConfig, {"model": model}, {"model": {"transformer": {"moe_shared_expert_overlap": False}}})
    load_config(ActorConfig, {"model": model}, {"model": {"lora": {"exclude": ["*shared_experts*"]}}})
