"""A HybridModel with the layers of a GPTModel computes the same bits, and has the same checkpoints and exports."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mcontroller.errors import ConfigError
from parallel_state.releases import language_models
from parallel_state.verify import Verifier
from parallel_state.verify.layouts import parse_layout
from parallel_state.verify.program import load_program
from tests.ranks import run_ranks
from tests.workers.parity import LAYOUTS, SLOW, computed
from tests.workers.roles import GREEDY, MODEL, actor, experience, own_shard, prompts, weights
from tests.workers.test_from_megatron import ARGUMENTS
from workers import model_config_from_megatron
from workers.config import ModelConfig, ParallelConfig
from workers.config.model import model_config_from_hf
from workers.model.transformer_config import transformer_config
from workers.parity.cases import MODELS, SMALL
from workers.weights.hf.model import export_hf

HYBRID = len(language_models()) > 1
ROWS = 8
FOUR_RANKS = (4, {"tp": 2, "pp": 2, "sequence_parallel": True})
TWO_STAGES = (2, {"pp": 2})
DENSE, EXPERTS = "*-" * 4, "*E" * 4
WITH_EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 32}
MIXED = WITH_EXPERTS | {"transformer": {"moe_layer_freq": [0, 1, 0, 1]}}
LATENT = {
    "transformer": {
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "rope_type": "rope",
    }
}

with_hybrid = pytest.mark.skipif(not HYBRID, reason="this release of megatron-core has no HybridModel")


def assert_same_bits(some: Any, others: Any) -> None:
    """Assert that nested results are equal, tensors to the bit."""
    if isinstance(some, dict):
        assert some.keys() == others.keys()
        for name in some:
            assert_same_bits(some[name], others[name])
    elif isinstance(some, list):
        for one, other in zip(some, others, strict=True):
            assert_same_bits(one, other)
    elif isinstance(some, torch.Tensor):
        assert torch.equal(some, others)
    else:
        assert some == others


def model_of(pattern: str | None, **fields: Any) -> ModelConfig:
    return ModelConfig(**(MODEL | fields), hybrid_layer_pattern=pattern)


@pytest.mark.skipif(HYBRID, reason="this release of megatron-core has a HybridModel")
def test_an_older_megatron_rejects_a_pattern() -> None:
    with pytest.raises(ConfigError) as raised:
        transformer_config(model_of(DENSE), ParallelConfig())
    assert raised.value.key == "model.hybrid_layer_pattern"


@with_hybrid
def test_arguments_with_a_pattern_describe_layers_of_two_letters() -> None:
    arguments = argparse.Namespace(**(ARGUMENTS | {"hybrid_layer_pattern": "*-*-|*-*-", "num_layers": 8}))
    model = model_config_from_megatron(arguments)
    assert (model.num_layers, model.hybrid_layer_pattern) == (4, "*-*-|*-*-")


@pytest.mark.parametrize("pattern", ["*-*-", "*-*-*-*E", "M-" * 4, "*G" * 4, DENSE + "/*-"])
def test_a_pattern_of_other_layers_is_rejected(pattern: str) -> None:
    with pytest.raises(ConfigError) as raised:
        transformer_config(model_of(pattern), ParallelConfig())
    assert (raised.value.key, raised.value.value) == ("model.hybrid_layer_pattern", pattern)


def test_a_pattern_is_rejected_where_bridge_builds_the_model() -> None:
    with pytest.raises(ConfigError) as raised:
        model_of(DENSE, provider="bridge", hf_path="Qwen/Qwen3-0.6B")
    assert raised.value.key == "model.hybrid_layer_pattern"


@with_hybrid
@pytest.mark.simulated
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ((name, "float32") in SLOW)) for name in LAYOUTS]
)
def test_every_layout_computes_what_a_gpt_model_computes(name: str) -> None:
    layout = LAYOUTS[name]
    pattern = EXPERTS if "num_moe_experts" in MODELS[layout.model] else DENSE
    gpt = run_ranks(computed, layout.ranks, layout, "float32")
    assert_same_bits(
        gpt, run_ranks(computed, layout.ranks, layout, "float32", SMALL | {"hybrid_layer_pattern": pattern})
    )


@with_hybrid
@pytest.mark.simulated
@pytest.mark.parametrize(("name", "layouts"), [("mamba", ("tp=2,pp=2,sp", "cp=2")), ("delta_net", ("pp=2", "cp=2"))])
def test_verify_trains_layers_with_states_in_every_layout(name: str, layouts: tuple[str, ...]) -> None:
    verifier = Verifier(load_program(f"examples/verify/hybrid.py:{name}"), steps=1)
    for layout in layouts:
        outcome = verifier.verify(parse_layout(layout))
        assert outcome.equal, outcome.lines()


def trained(parallel: dict[str, Any], pattern: str | None, model: dict[str, Any]) -> dict[str, Any]:
    """Generate, score and update with a policy; return the results of this rank, and the weights after it."""
    worker = actor(parallel, model=model | {"hybrid_layer_pattern": pattern}, ppo_epochs=1)
    assert isinstance(worker.model[0].module, language_models()[pattern is not None])
    generated = worker.generate_sequences(own_shard(prompts(ROWS, GREEDY), worker))
    batch = own_shard(experience(ROWS), worker)
    scores, metrics = worker.compute_log_prob(batch), worker.update_actor(batch).meta_info["metrics"]
    results = [None if part is None else dict(part.batch) for part in (generated, scores)]
    return {"results": results, "metrics": metrics, "weights": weights(worker)}


@with_hybrid
@pytest.mark.simulated
@pytest.mark.parametrize(
    ("pattern", "model", "layout"),
    [
        ("*-*-|*-*-", {}, FOUR_RANKS),
        ("*-*E*-*E", MIXED, FOUR_RANKS),
        ("+-" * 4, LATENT, FOUR_RANKS),
        (DENSE, {"lora": {"rank": 4, "alpha": 8.0}}, FOUR_RANKS),
        (DENSE, {"rope_scaling_factor": 8.0, "qk_layernorm": True, "add_qkv_bias": True}, TWO_STAGES),
    ],
    ids=["dense", "dense-and-experts", "latent-attention", "lora", "scaled-rope"],
)
def test_generation_scores_and_updates_are_a_gpt_models(
    pattern: str, model: dict[str, Any], layout: tuple[int, dict[str, Any]]
) -> None:
    gpt, hybrid = (run_ranks(trained, *layout, layers, model) for layers in (None, pattern))
    assert_same_bits(gpt, hybrid)


def saved(parallel: dict[str, Any], pattern: str | None, model: dict[str, Any], path: str) -> dict[str, torch.Tensor]:
    worker = actor(parallel, "actor", model=model | {"hybrid_layer_pattern": pattern}, ppo_epochs=1)
    worker.update_actor(own_shard(experience(ROWS), worker))
    worker.save_checkpoint(path, global_step=1)
    worker.update_actor(own_shard(experience(ROWS), worker))
    return weights(worker)


def continued(
    parallel: dict[str, Any], pattern: str | None, model: dict[str, Any], path: str
) -> dict[str, torch.Tensor]:
    changes = model | {"hybrid_layer_pattern": pattern, "seed": 99}
    worker = actor(parallel, "actor", model=changes, ppo_epochs=1)
    worker.load_checkpoint(path)
    worker.update_actor(own_shard(experience(ROWS), worker))
    return weights(worker)


@with_hybrid
@pytest.mark.simulated
@pytest.mark.parametrize(
    ("pattern", "model"), [(DENSE, {}), ("*-*E*-*E", MIXED)], ids=["stacked-layers", "layers-by-number"]
)
def test_a_checkpoint_of_one_model_is_continued_by_the_other(
    pattern: str, model: dict[str, Any], tmp_path: Path
) -> None:
    for written, read in ((None, pattern), (pattern, None)):
        path = str(tmp_path / str(read))
        expected = run_ranks(saved, *FOUR_RANKS, written, model, path)[0]
        assert_same_bits(expected, run_ranks(continued, *FOUR_RANKS, read, model, path)[0])


def exported(parallel: dict[str, Any], source: str, pattern: str | None, target: str) -> None:
    """Load a Hugging Face checkpoint, compared with transformers layer by layer, and export it."""
    from tests.training import new_context
    from workers.model.build import build_model

    model = model_config_from_hf(source, hybrid_layer_pattern=pattern, verify_load="layers")
    axes = ParallelConfig(**parallel)
    context = new_context(axes)
    export_hf(build_model(model, axes, context), context, target, model)


@with_hybrid
@pytest.mark.simulated
@pytest.mark.parametrize(("family", "pattern"), [("llama", DENSE), ("qwen3_moe", EXPERTS)])
def test_hugging_face_checkpoints_are_read_and_written(family: str, pattern: str, tmp_path: Path) -> None:
    from tests.workers.weights.hf_models import save_model

    source = save_model(family, tmp_path / "source")
    run_ranks(exported, *FOUR_RANKS, str(source), pattern, str(tmp_path / "target"))
    tensors = [
        functools.reduce(dict.__or__, map(load_file, sorted(folder.glob("*.safetensors"))))
        for folder in (source, tmp_path / "target")
    ]
    assert_same_bits(*tensors)
