"""Model families: each is exported as itself, and a user-defined one is loaded, run and exported as well."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcontroller.errors import ConfigError, DataError
from tests import forking
from tests.ranks import run_ranks
from tests.training import new_context
from tests.workers.roles import VOCAB, actor
from tests.workers.weights.test_hf import (
    CASES,
    FAMILIES,
    SIZES,
    assert_equal,
    imported,
    of_transformers,
    transformers,
    weights_at,
)
from workers import ModelFamily, model_config_from_hf, register_model_family
from workers.config import ModelConfig, ParallelConfig
from workers.model.build import build_model
from workers.weights.hf.config import hf_config_of
from workers.weights.hf.families.llama import Llama
from workers.weights.hf.family import MODEL_FAMILIES
from workers.weights.hf.fields import Field
from workers.weights.hf.model import export_hf, load_hf

TINY = {"vocab_size": VOCAB, "max_sequence_length": 32, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}


def renamed(name: str) -> str:
    """The name in ``Renamed`` of a tensor of Llama."""
    name = name.replace("model.layers.", "blocks.").replace("self_attn.", "attention.").replace("_proj.", ".")
    return name.replace("model.", "").replace("lm_head.", "head.")


@register_model_family("renamed")
class Renamed(Llama):
    """Llama with other names of weights, and another key of the vocabulary's size."""

    architecture = "Renamed"
    names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        ours: tuple(map(renamed, theirs)) for ours, theirs in Llama.names.items()
    }
    keys: ClassVar[Mapping[str, Field]] = {
        {"vocab_size": "n_vocab"}.get(key, key): field for key, field in Llama.keys.items()
    }


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).float().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def of_the_user(llama: Path, tmp_path: Path) -> Path:
    """The model of ``llama`` as a checkpoint of the user-defined family."""
    directory = tmp_path / "renamed"
    directory.mkdir()
    config = json.loads((llama / "config.json").read_text())
    config |= {"model_type": "renamed", "n_vocab": config.pop("vocab_size")}
    (directory / "config.json").write_text(json.dumps(config))
    weights = {renamed(name): tensor for name, tensor in load_file(llama / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.mark.simulated
@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"pp": 2}], ids=["one", "tp2", "pp2"])
def test_a_user_defined_family_is_loaded_run_and_exported(
    axes: dict[str, Any], llama: Path, of_the_user: Path, tmp_path: Path
) -> None:
    ranks = run_ranks(imported, max(axes.values(), default=1), of_the_user, axes, tmp_path / "out")
    [logits, *_] = [rank["logits"] for rank in ranks if rank["logits"] is not None]
    torch.testing.assert_close(logits[..., : SIZES["vocab_size"]], of_transformers(llama), atol=1e-4, rtol=0)
    for actual in (weights_at(tmp_path / "out"), *(rank["streamed"] for rank in ranks)):
        assert_equal(actual, weights_at(of_the_user))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("renamed", ["RenamedForCausalLM"])
    assert config["n_vocab"] == SIZES["vocab_size"] and "vocab_size" not in config


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_exported_under_the_name_that_it_was_read_with(family: str, tmp_path: Path) -> None:
    theirs = FAMILIES[family]()
    theirs.architectures = ["Unused"]
    theirs.save_pretrained(tmp_path)
    model = model_config_from_hf(tmp_path)
    config = hf_config_of(model)
    assert config["model_type"] == model.family == theirs.model_type
    assert config["architectures"] == [type(theirs).__name__.replace("Config", "ForCausalLM")]
    [classifier] = hf_config_of(model, value_head=True)["architectures"]
    assert classifier == type(theirs).__name__.replace("Config", "ForSequenceClassification")
    assert hf_config_of(dataclasses.replace(model, family=None)) == config  # found by its layers, too


def test_layers_determine_the_family_of_a_model_without_one() -> None:
    layers: dict[str, dict[str, Any]] = {
        "llama": {},
        "qwen2": {"add_qkv_bias": True},
        "qwen3": {"qk_layernorm": True},
        "qwen3_moe": {"qk_layernorm": True, "num_moe_experts": 4},
    }
    assert {name: hf_config_of(ModelConfig(**TINY, **fields))["model_type"] for name, fields in layers.items()} == {
        name: name for name in layers
    }
    assert {family for family, _ in CASES} <= {*FAMILIES} and {*layers} <= {*MODEL_FAMILIES}


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"qk_layernorm": True, "add_qkv_bias": True}, "model.qk_layernorm"),
        ({"num_moe_experts": 4, "add_qkv_bias": True}, "model.transformer.moe_router_enable_expert_bias"),
        ({"transformer": {"multi_latent_attention": True}}, "model.transformer.multi_latent_attention"),
        ({"family": "qwen3"}, "model.qk_layernorm"),
        ({"family": "llama", "add_qkv_bias": True}, "model.add_qkv_bias"),
        ({"family": "lama"}, "model.family"),
    ],
)
def test_a_model_that_no_family_is_built_like_is_rejected_with_its_field(fields: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hf_config_of(ModelConfig(**TINY, **fields))
    assert caught.value.key == key


def test_a_model_type_has_one_family() -> None:
    with pytest.raises(ConfigError) as caught:

        @register_model_family("llama")
        class Another(Llama):
            pass

    assert caught.value.key == "llama"

    assert isinstance(MODEL_FAMILIES["llama"], ModelFamily)


def exported_by_its_worker(out: Path) -> None:
    worker = actor({"tp": 2}, "actor", model={"family": "renamed"})
    names = [name for name, _ in worker.rollout_weights()]
    assert names[0] == "embed_tokens.weight" and names[-1] == "head.weight"
    worker.export_hf(str(out))


@pytest.mark.simulated
def test_a_worker_streams_and_exports_in_its_own_family(tmp_path: Path) -> None:
    run_ranks(exported_by_its_worker, 2, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "renamed"
    assert "blocks.0.attention.q.weight" in weights_at(tmp_path / "out")


class Fused(Llama):
    """Gate and up as one tensor, each of which tp divides separately."""

    architecture = "Fused"
    names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **Llama.names,
        "decoder.layers.{layer}.mlp.linear_fc1.weight": ("model.layers.{layer}.mlp.gate_up_proj.weight",),
    }


def exported_fused(out: Path) -> None:
    """From two tensor-parallel ranks, in both families."""
    register_model_family("fused")(Fused)
    for family in ("fused", "llama"):
        model, parallel = ModelConfig(**TINY, family=family), ParallelConfig(tp=2)
        context = new_context(parallel)
        export_hf(build_model(model, parallel, context), context, out / family, model)


@pytest.mark.processes
def test_a_family_that_fuses_gate_and_up_gets_one_after_the_other(tmp_path: Path) -> None:
    """Each rank registers the family in its own process."""
    forking.run_ranks(exported_fused, 2, tmp_path, timeout_s=30)
    fused, both = weights_at(tmp_path / "fused"), weights_at(tmp_path / "llama")
    prefix = "model.layers.0.mlp."
    expected = torch.cat([both[f"{prefix}{half}_proj.weight"] for half in ("gate", "up")])
    assert torch.equal(fused[f"{prefix}gate_up_proj.weight"], expected)


def loaded_as_what_it_is_built_like(path: Path) -> list[str]:
    model, parallel = dataclasses.replace(model_config_from_hf(path), hf_path=None, family=None), ParallelConfig()
    context = new_context(parallel)
    chunks = build_model(model, parallel, context)
    assert load_hf(chunks, path, context) == frozenset()
    (path / "config.json").unlink()
    with pytest.raises(DataError) as caught:
        load_hf(chunks, path, context)
    return caught.value.missing


@pytest.mark.simulated
def test_the_names_of_a_checkpoint_are_those_of_its_own_family(of_the_user: Path) -> None:
    [missing] = run_ranks(loaded_as_what_it_is_built_like, 1, of_the_user)
    assert missing[:2] == ["lm_head.weight", "model.embed_tokens.weight"]
