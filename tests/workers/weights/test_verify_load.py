"""A loaded model is compared with transformers layer by layer, and the first layer that differs is named."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mcontroller.errors import ConfigError, DataError
from parallel_state.releases import language_models
from tests.ranks import run_ranks
from tests.training import new_context
from tests.workers.weights.hf_models import NEMOTRON, save_model
from workers.config import ParallelConfig
from workers.config.model import model_config_from_hf
from workers.model.build import build_model
from workers.weights.hf import verify_load
from workers.weights.hf.config import hf_config_of
from workers.weights.hf.model import export_hf
from workers.weights.shards import named_shards

pytestmark = pytest.mark.simulated

SP = {"tp": 2, "sequence_parallel": True, "pp": 2}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    return {name: save_model(name, root / name) for name in ("qwen2", "mistral", "mixtral", "deepseek_v3")}


def verified(path: Path, axes: dict[str, Any], changed: str | None, **fields: Any) -> str:
    """Load a model, change a weight, and return what the comparison says."""
    model, parallel = model_config_from_hf(path, verify_load="off", **fields), ParallelConfig(**axes)
    context = new_context(parallel)
    chunks = build_model(model, parallel, context)
    for shard in named_shards(chunks, context):
        if shard.part.name == changed:
            shard.param.data[0] += 0.5
    with context.activate():
        return verify_load.verify_load(chunks, model, context)


@pytest.mark.parametrize(
    ("name", "axes", "dtype"),
    [
        ("qwen2", {}, "float32"),
        ("mistral", SP | {"cp": 2}, "bfloat16"),
        ("mixtral", {"ep": 2}, "float32"),
        ("deepseek_v3", SP | {"ep": 2, "etp": 1}, "bfloat16"),
        ("deepseek_v3", {"pp": 2, "vpp": 2}, "float32"),
    ],
)
def test_a_model_as_transformers_has_it_is_accepted(
    name: str, axes: dict[str, Any], dtype: str, paths: dict[str, Path]
) -> None:
    ranks = axes.get("pp", 1) * axes.get("tp", 1) * axes.get("cp", 1) * axes.get("ep", 1) // (2 if "etp" in axes else 1)
    for text in run_ranks(functools.partial(verified, dtype=dtype), ranks, paths[name], axes, None):
        assert text.startswith("model.verify_load: 6 parts of the model are transformers'")


@pytest.mark.parametrize(
    ("changed", "layer"),
    [
        ("decoder.layers.2.self_attention.linear_proj.weight", "model.layers.2"),
        ("decoder.layers.3.mlp.router.weight", "model.layers.3"),
        ("embedding.word_embeddings.weight", "model.embed_tokens"),
        ("decoder.final_layernorm.weight", "lm_head"),
    ],
)
def test_the_first_layer_that_differs_is_named_on_every_rank(changed: str, layer: str, paths: dict[str, Path]) -> None:
    def named() -> str:
        with pytest.raises(DataError) as caught:
            verified(paths["mixtral"], {"pp": 2, "ep": 2}, changed)
        return str(caught.value.layer)  # type: ignore[attr-defined]

    assert run_ranks(named, 4) == [layer] * 4


@pytest.mark.skipif(len(language_models()) == 1, reason="this megatron-core has no HybridModel")
def test_mamba_layers_are_compared(tmp_path: Path) -> None:
    def compared() -> tuple[str, str]:
        text = verified(path, SP, None)
        with pytest.raises(DataError) as caught:
            verified(path, SP, "decoder.layers.2.mixer.A_log")
        return text, str(caught.value.layer)  # type: ignore[attr-defined]

    path = save_model(NEMOTRON, tmp_path)
    for text, layer in run_ranks(compared, 4):
        assert text.startswith("model.verify_load: 8 parts of the model are transformers'")
        assert layer == "model.layers.2"


def loaded(path: Path, **changes: Any) -> None:
    model, parallel = model_config_from_hf(path, **changes), ParallelConfig()
    build_model(model, parallel, new_context(parallel))


def test_a_configuration_that_is_read_wrongly_is_an_error_of_the_load(paths: dict[str, Path]) -> None:
    def rejected() -> None:
        with pytest.raises(DataError) as caught:
            loaded(paths["qwen2"], rotary_base=500, verify_load="layers")
        assert caught.value.layer == "model.layers.0"
        loaded(paths["qwen2"], rotary_base=500)  # on purpose: not compared unless it is asked for

    run_ranks(rejected, 1)


def test_an_export_that_transformers_reads_otherwise_is_an_error(paths: dict[str, Path], tmp_path: Path) -> None:
    def exported(name: str) -> str | None:
        model, parallel = model_config_from_hf(paths["qwen2"], verify_load="off"), ParallelConfig(tp=2)
        context = new_context(parallel)
        chunks = build_model(model, parallel, context)
        try:
            export_hf(chunks, context, tmp_path / name, dataclasses.replace(model, verify_load="layers"))
        except DataError as error:
            return str(error.layer)  # type: ignore[attr-defined]
        return None

    def with_another_epsilon(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return hf_config_of(*args, **kwargs) | {"rms_norm_eps": 1.0}

    assert run_ranks(exported, 2, "right") == [None] * 2
    with mock.patch("workers.weights.hf.model.hf_config_of", with_another_epsilon):
        assert run_ranks(exported, 2, "wrong") == ["model.layers.0"] * 2


def test_models_that_are_not_compared_say_why(paths: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(paths["qwen2"], other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "unknown"}))

    def reasons() -> list[str]:
        model, parallel = model_config_from_hf(paths["qwen2"], verify_load="off"), ParallelConfig()
        context = new_context(parallel)
        chunks = build_model(model, parallel, context)
        changed = dataclasses.replace(model, rotary_base=500)
        unknown = dataclasses.replace(model, hf_path=str(other), family=None, verify_load="layers")
        with context.activate():
            with pytest.raises(ConfigError) as caught:
                verify_load.verify_load(chunks, unknown, context)
            assert (caught.value.key, caught.value.value) == ("model.verify_load", "layers")
            both = (dataclasses.replace(given, verify_load="auto") for given in (changed, unknown))
            return [verify_load.verify_load(chunks, given, context) for given in both]

    [[changed, unknown]] = run_ranks(reasons, 1)
    assert changed.endswith("not compared with transformers: model.rotary_base differ from its config.json")
    assert unknown.endswith("transformers has no model of type 'unknown'")
    with pytest.raises(ConfigError) as caught:
        model_config_from_hf(paths["qwen2"], verify_load="all")
    assert (caught.value.key, caught.value.value) == ("model.verify_load", "all")
