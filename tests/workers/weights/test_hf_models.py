"""Every family computes in parallel what transformers computes, and its checkpoint comes back bit by bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mcontroller.errors import ConfigError, DataError
from tests.ranks import run_ranks
from tests.training import new_context
from tests.workers.roles import PROMPT, RESPONSE, actor, prompts
from tests.workers.weights.hf_models import (
    GREEDY,
    LAYOUTS,
    MODELS,
    ROWS,
    Reference,
    config_of,
    saved,
    tensors_of,
    transformers,
)
from tests.workers.weights.test_hf import assert_equal
from workers.config import ParallelConfig
from workers.config.model import model_config_from_hf
from workers.model.build import build_model
from workers.weights.hf.config import hf_config_of
from workers.weights.hf.files import WeightFiles
from workers.weights.hf.model import export_hf, hf_tensors

NAMES = [name for name in MODELS if name not in ("llama", "qwen2", "qwen3", "qwen3_moe")]
"""The models that test_hf.py has no cases for; docs/results.md has all layouts."""
CASES = [
    ("mistral", "TP2 x PP2 x CP2 with SP", True),
    ("mixtral", "TP2 x PP2 x EP2 with SP", False),
    ("glm4_moe", "PP2 with VPP2", True),
    ("glm4_moe", "TP2 x PP2 x EP2 with SP", False),
    ("glm4_moe, no norms or biases", "TP2 x PP2 x EP2 with SP", False),
    ("deepseek_v3", "TP2 x PP2 x EP2 with SP", False),
    ("deepseek_v3, queries as they are, YaRN", "PP2 with VPP2", True),
    ("deepseek_v3, queries as they are, YaRN", "TP2 x PP2 x CP2 with SP", True),
]
"""Each mapping with its experts divided, each kind of attention with its rows divided."""
OTHERS = [name for name in NAMES if name not in {case[0] for case in CASES}]
CASES += [(name, *case) for name in OTHERS for case in (("TP2 x PP2 x CP2 with SP", False), ("PP2 with VPP2", True))]
"""Without cp, tokens are compared too."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        return made.get(name) or made.setdefault(name, Reference(name, tmp_path_factory.mktemp("hf")))

    return get


@pytest.mark.simulated
@pytest.mark.parametrize(("name", "layout", "packed"), CASES)
def test_scores_gradients_and_tokens_are_those_of_transformers(
    name: str, layout: str, packed: bool, reference: Callable[[str], Reference]
) -> None:
    of_model = reference(name)
    assert max(float(gradient.abs().max()) for gradient in of_model.computed["gradients"].values()) > 0.1
    actual = of_model.differences(LAYOUTS[layout], packed)
    exact = {quantity: actual.pop(quantity) for quantity in ("load", "export", "generation") if quantity in actual}
    assert set(exact.values()) == {0.0}
    assert max(actual.values()) < 1e-5, actual


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    theirs = config_of(name)
    theirs.save_pretrained(tmp_path / "theirs")
    model = model_config_from_hf(tmp_path / "theirs")
    nearest = hf_config_of(dataclasses.replace(model, family=None))  # the first family that is built like the model
    for config in (hf_config_of(model), *[nearest] * (nearest["model_type"] == theirs.model_type)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        again = model_config_from_hf(tmp_path, hf_path=model.hf_path, init_method_std=model.init_method_std)
        assert again == model
        exported = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
        exported["rope_parameters"].pop("type", None)
        changed = {
            "architectures",
            "dtype",
            "num_nextn_predict_layers",
            "transformers_version",
            "head_dim",
            "_name_or_path",
        }
        kept = {key: value for key, value in theirs.to_dict().items() if key not in changed}
        assert {key: exported.get(key) for key in kept} == kept
        assert config.get("topk_method") == ("noaux_tc" if name.startswith("deepseek") else None)  # read by vLLM


def streamed_and_exported(path: Path, axes: dict[str, Any], out: Path) -> dict[str, torch.Tensor]:
    model, parallel = model_config_from_hf(path), ParallelConfig(**axes)
    context = new_context(parallel)
    chunks = build_model(model, parallel, context)
    export_hf(chunks, context, out, model)
    return dict(hf_tensors(chunks, context))


def in_fp8(path: Path, target: Path, block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Save the projections in FP8 with a scale for each block, and return all weights as they are then."""
    config = json.loads((path / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    files, whole = {}, {}
    for name, weight in saved(path).items():
        files[name] = whole[name] = weight
        if name.endswith("_proj.weight"):
            rows, columns = (torch.arange(size) // length for size, length in zip(weight.shape, block, strict=True))
            scales = torch.rand(int(rows[-1]) + 1, int(columns[-1]) + 1) / 10 + 0.01
            of_element = scales[rows][:, columns]
            files[name] = (weight / of_element).to(torch.float8_e4m3fn)
            files[f"{name}_scale_inv"] = scales
            whole[name] = files[name].float() * of_element
    save_file(files, target / "model.safetensors")
    return whole


@pytest.mark.simulated
def test_weights_in_fp8_are_read_in_slices_and_exported_without_it(
    reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    expected = in_fp8(reference("deepseek_v3").path, tmp_path / "fp8", (5, 7))  # blocks that no axis divides
    axes = {"tp": 2, "sequence_parallel": True, "pp": 2, "ep": 2, "etp": 1}
    for actual in run_ranks(streamed_and_exported, 4, tmp_path / "fp8", axes, tmp_path / "out"):
        assert_equal(actual, expected)
    assert_equal(saved(tmp_path / "out"), expected)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_key_of_a_quantization_that_is_not_read_is_named(reference: Callable[[str], Reference], tmp_path: Path) -> None:
    config = json.loads((reference("deepseek_v3").path / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    fp8 |= {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fp8 | {"a_later_key": None}}))
    assert model_config_from_hf(tmp_path).num_layers == config["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fp8 | {"a_later_key": 2}}))
    with pytest.raises(ConfigError) as caught:
        model_config_from_hf(tmp_path)
    assert (caught.value.key, caught.value.value) == ("quantization_config.a_later_key", 2)


@pytest.mark.parametrize(("quantization", "scales"), [({"weight_block_size": [128, 128]}, (1, 2)), ({}, (1, 1))])
def test_scales_that_do_not_fit_are_named(
    quantization: dict[str, Any], scales: tuple[int, int], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    weights = {"a.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(scales)}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(DataError) as caught:
        WeightFiles(tmp_path).shape("a.weight")
    assert caught.value.tensor == "a.weight"


@pytest.mark.simulated
def test_kimi_and_layers_that_predict_more_tokens(reference: Callable[[str], Reference], tmp_path: Path) -> None:
    """Kimi-K2 has the format of DeepSeek-V3; layers after the last one are not built, and left out."""
    weights = saved(reference("deepseek_v3").path)
    config = json.loads((reference("deepseek_v3").path / "config.json").read_text())
    kimi = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "other.Code"}, "num_nextn_predict_layers": 1}
    (tmp_path / "kimi").mkdir()
    (tmp_path / "kimi" / "config.json").write_text(json.dumps(config | kimi))
    extra = {name.replace(".3.", ".4."): w.clone() for name, w in weights.items() if name.startswith("model.layers.3.")}
    save_file(weights | extra | {"model.layers.4.eh_proj.weight": torch.ones(2)}, tmp_path / "kimi/model.safetensors")
    [tensors] = run_ranks(streamed_and_exported, 1, tmp_path / "kimi", {}, tmp_path / "out")
    assert_equal(tensors, weights)
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (exported["model_type"], exported["architectures"]) == ("kimi_k2", ["DeepseekV3ForCausalLM"])
    assert exported["num_nextn_predict_layers"] == 0


def generated_and_saved(path: Path, axes: dict[str, Any], checkpoint: Path) -> torch.Tensor | None:
    """Generate, and save a checkpoint."""
    settings = {"rollout": {"prompt_length": PROMPT, "response_length": RESPONSE}}
    model = dataclasses.asdict(model_config_from_hf(path))
    worker = actor(axes, "actor_rollout", model=model, **settings)
    worker.save_checkpoint(str(checkpoint))
    batch = worker.generate_sequences(prompts(ROWS, GREEDY))
    return None if batch is None else batch.batch["responses"]


def loaded(path: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    model = dataclasses.asdict(model_config_from_hf(path)) | {"hf_path": None}
    worker = actor({}, "actor", model=model)
    worker.load_checkpoint(str(checkpoint))
    return tensors_of(worker)


@pytest.mark.simulated
def test_biases_of_routers_move_between_layouts_and_into_checkpoints(
    reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    of_model = reference("deepseek_v3")
    axes = {"tp": 2, "sequence_parallel": True, "pp": 2, "ep": 2, "etp": 1}
    results = run_ranks(generated_and_saved, 4, of_model.path, axes, tmp_path)
    returned = [tokens for tokens in results if tokens is not None]
    assert returned and all(torch.equal(tokens, of_model.computed["greedy"]) for tokens in returned)
    assert_equal(run_ranks(loaded, 1, of_model.path, tmp_path)[0], saved(of_model.path))
