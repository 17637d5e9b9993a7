"""Layers of multi-token prediction: loaded, trained as transformers' own layers would be, kept, exported, saved."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from mcontroller.data.batch import DataProto
from mcontroller.errors import ConfigError, DataError
from parallel_state.releases import language_models
from tests.ranks import run_ranks
from tests.workers.generate.test_engine_weights import FaultyEngineWorker
from tests.workers.roles import (
    FOR_GRADIENTS,
    GREEDY,
    MODEL,
    PROMPT,
    accumulated_gradients,
    actor,
    critic,
    experience,
    own_shard,
    prompts,
    weights,
)
from tests.workers.weights.hf_models import LAYOUTS, ROWS, rows_of, save_model, saved, tensors_of, world_size
from workers.config import LoraConfig, ModelConfig, ParallelConfig
from workers.config.model import model_config_from_hf
from workers.model.transformer_config import transformer_config
from workers.weights.fingerprints import WeightsNotArrived

transformers = pytest.importorskip("transformers")

WEIGHT = 0.3
LAYERS = 4
TRAINED = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": WEIGHT}
KEPT = TRAINED | {"mtp_loss_scaling_factor": 0.0}
DEEP = TRAINED | {"mtp_num_layers": 2}
FOUR_RANKS = {"tp": 2, "pp": 2, "sequence_parallel": True}
OF_PREDICTION = f"decoder.layers.{LAYERS}."
PREFIX = f"model.layers.{LAYERS}."


def save_with_prediction(family: str, directory: Path) -> Path:
    """Save a model with a layer of multi-token prediction, around the last layer of ``directory / "whole"``."""
    whole, path = save_model(family, directory / "whole", num_hidden_layers=LAYERS + 1), directory / "source"
    path.mkdir()
    config = json.loads((whole / "config.json").read_text())
    sizes = {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config | sizes))
    tensors, width, generator = saved(whole), config["hidden_size"], torch.Generator().manual_seed(1)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{PREFIX}{name}.weight"] = 1.0 + 0.2 * torch.randn(width, generator=generator)
    tensors[f"{PREFIX}eh_proj.weight"] = 0.2 * torch.randn(width, 2 * width, generator=generator)
    tensors[f"{PREFIX}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{PREFIX}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def computed_by_transformers(path: Path) -> tuple[dict[str, Tensor], float]:
    """Return gradients of the cross entropy of responses, with that of the token after the next, and the latter."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path.parent / "whole", dtype=torch.float32).eval()
    names = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
    added = {name: saved(path)[f"{PREFIX}{name}.weight"].requires_grad_() for name in names}
    layers, epsilon = model.model.layers, model.config.rms_norm_eps
    model.model.layers, inner = layers[:LAYERS], layers[LAYERS]

    def norm(hidden: Tensor, name: str) -> Tensor:
        return functional.rms_norm(hidden, hidden.shape[-1:], added[name], epsilon)

    total, of_prediction, count = torch.zeros(()), 0.0, 0
    for ids, response in rows_of(experience(ROWS)):
        hidden = model.model(ids[None], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)[0]
        total = total + functional.cross_entropy(logits[-response - 1 : -1], ids[-response:], reduction="sum")
        following, positions = model.model.embed_tokens(ids[None, 1:]), torch.arange(len(ids) - 1)[None]
        both = torch.cat((norm(following, "enorm"), norm(hidden[:, :-1], "hnorm")), -1) @ added["eh_proj"].T
        angles = model.model.rotary_emb(both, positions)
        output = inner(both, position_embeddings=angles, position_ids=positions)
        ahead = model.lm_head(norm(output, "shared_head.norm"))[0]  # of the token after the next one
        predicted = min(response, len(ids) - 2)
        losses = functional.cross_entropy(ahead[-predicted - 1 : -1], ids[-predicted:], reduction="sum")
        total, of_prediction, count = total + WEIGHT * losses, of_prediction + float(losses), count + response
    (total / count).backward()
    model.model.layers = layers
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(path.parent / "gradients")
    gradients = saved(path.parent / "gradients") | {f"{PREFIX}{name}.weight": w.grad for name, w in added.items()}
    return gradients, of_prediction / count


def trained_on_rank(path: Path, axes: dict[str, Any], packed: bool, out: Path) -> dict[str, Any]:
    """Export a model, then return its gradients by names in the files."""
    model = dataclasses.asdict(model_config_from_hf(path, dtype="float32", transformer=TRAINED))
    settings = {"optim": FOR_GRADIENTS, "packed": packed, "ppo_mini_batch_size": ROWS, "ppo_epochs": 1}
    worker = actor(axes, "actor", model=model, **settings)
    worker.export_hf(str(out))
    shard = own_shard(experience(ROWS), worker)
    columns = {name: shard.batch[name] for name in ("input_ids", "attention_mask")}
    columns["loss_mask"] = functional.pad(shard.batch["response_mask"], (PROMPT, 0))
    metrics = worker.update_sft(DataProto.from_dict(columns)).meta_info["metrics"]
    accumulated_gradients(worker)
    return {"gradients": tensors_of(worker), "metrics": metrics}


@pytest.mark.simulated
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_are_exported_as_they_were_and_have_the_gradients_of_transformers(family: str, tmp_path: Path) -> None:
    path = save_with_prediction(family, tmp_path)
    expected, loss = computed_by_transformers(path)
    layouts = ("one process", "TP2 x PP2 x EP2 with SP") if family == "deepseek_v3" else ("CP2", "PP2 with VPP2")
    for name in layouts:
        out, axes = tmp_path / name, LAYOUTS[name]
        ranks = run_ranks(trained_on_rank, world_size(axes), path, axes, name == "CP2", out)
        written, source = saved(out), saved(path)
        assert written.keys() == source.keys()
        assert all(torch.equal(written[key], source[key]) for key in source)
        assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
        for rank in ranks:
            gradients = rank["gradients"]
            worst = {key: float((gradients[key] - expected[key]).abs().max()) for key in gradients}
            assert max(worst.values()) < 4e-6, max(worst.items(), key=lambda item: item[1])
            assert rank["metrics"]["sft/mtp_loss"] == pytest.approx(loss, rel=1e-5)


def sizes(transformer: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    return MODEL | fields | ({} if transformer is None else {"transformer": transformer})


def updated(parallel: dict[str, Any], model: dict[str, Any], save: str | None, load: str | None) -> dict[str, Any]:
    """Generate, score and update; return tokens, scores, metrics, and the weights before and after."""
    worker = actor(parallel, model=model, ppo_epochs=1)
    before = weights(worker)
    if load is not None:
        worker.load_checkpoint(load)
    generated = worker.generate_sequences(own_shard(prompts(ROWS, GREEDY), worker))
    batch = own_shard(experience(ROWS), worker)
    scores, metrics = worker.compute_log_prob(batch), worker.update_actor(batch).meta_info["metrics"]
    if save is not None:
        worker.save_checkpoint(save, global_step=1)
        worker.update_actor(batch)
    results = [None if part is None else dict(part.batch) for part in (generated, scores)]
    return {"results": results, "metrics": metrics, "before": before, "after": weights(worker)}


def largest(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    assert some.keys() == others.keys()
    return max(float((some[name] - others[name]).abs().max()) for name in some)


@pytest.mark.simulated
def test_layers_are_trained_and_saved_in_every_layout_as_in_one_process(tmp_path: Path) -> None:
    model, path = sizes(DEEP), str(tmp_path)
    one = run_ranks(updated, 1, {}, model, path, None)[0]
    moved = {name for name, tensor in one["after"].items() if not torch.equal(tensor, one["before"][name])}
    assert {name for name in moved if "eh_proj" in name} == {
        f"decoder.layers.{layer}.eh_proj.weight" for layer in (4, 5)
    }
    for ranks, parallel in ((4, {"pp": 2}), (4, FOUR_RANKS)):  # the first has dp=2 and a distributed optimizer
        for rank in run_ranks(updated, ranks, parallel, model, None, path):
            assert largest(rank["after"], one["after"]) < 2e-5


@pytest.mark.simulated
def test_layers_that_are_not_trained_change_nothing() -> None:
    without, kept = (run_ranks(updated, 4, FOUR_RANKS, sizes(transformer), None, None) for transformer in (None, KEPT))
    for rank, other in zip(without, kept, strict=True):
        assert rank["metrics"] == other["metrics"]
        for some, others in zip(rank["results"], other["results"], strict=True):
            assert (some is None and others is None) or largest(some, others) == 0.0
        for name, tensor in other["after"].items():
            expected = other["before"] if name.startswith(OF_PREDICTION) else rank["after"]
            assert torch.equal(tensor, expected[name])


@pytest.mark.skipif(len(language_models()) == 1, reason="this release of megatron-core has no HybridModel")
@pytest.mark.simulated
def test_a_hybrid_model_trains_the_same_bits() -> None:
    pattern = "*-" * LAYERS + "/*-"
    gpt, hybrid = (
        run_ranks(updated, 4, FOUR_RANKS, sizes(TRAINED, hybrid_layer_pattern=layers), None, None)
        for layers in (None, pattern)
    )
    for rank, other in zip(gpt, hybrid, strict=True):
        assert largest(rank["after"], other["after"]) == 0.0


def of_prediction(tensors: dict[str, Tensor]) -> set[str]:
    return {name for name in tensors if name.startswith(PREFIX)}


def leave_out(held: dict[str, Tensor], old: dict[str, Tensor]) -> None:
    for name in of_prediction(held):
        del held[name]


def sent_to_an_engine(path: Path, axes: dict[str, Any], transformer: dict[str, Any], pattern: str | None) -> Any:
    """Update an engine twice, which leaves out the layers first; return what it lacks, holds and should hold."""
    source = model_config_from_hf(path, dtype="float32", transformer=transformer, hybrid_layer_pattern=pattern)
    rollout = {"verify_weights": "fingerprints"}
    worker = actor(axes, "actor_rollout", FaultyEngineWorker, model=dataclasses.asdict(source), rollout=rollout)
    worker.update_actor(own_shard(experience(ROWS), worker))
    engine = worker.rollout
    engine.fault = leave_out
    with pytest.raises(WeightsNotArrived) as raised:
        worker.generator.current_rollout()
    engine.fault = None
    worker.generator.current_rollout()
    return raised.value, engine.tensors, tensors_of(worker)


@pytest.mark.simulated
@pytest.mark.parametrize("transformer", [TRAINED, KEPT], ids=["trained", "kept"])
@pytest.mark.parametrize(
    "pattern",
    [
        None,
        pytest.param(
            "*-" + "*E" * (LAYERS - 1) + "/*E",
            marks=pytest.mark.skipif(len(language_models()) == 1, reason="megatron-core has no HybridModel"),
        ),
    ],
    ids=["gpt", "hybrid"],
)
def test_an_engine_gets_the_layers_and_reports_those_that_it_leaves_out(
    pattern: str | None, transformer: dict[str, Any], tmp_path: Path
) -> None:
    path = save_with_prediction("glm4_moe", tmp_path)
    source = saved(path)
    axes = LAYOUTS["TP2 x PP2 x EP2 with SP"]
    for error, held, expected in run_ranks(sent_to_an_engine, world_size(axes), path, axes, transformer, pattern):
        layers = of_prediction(expected)
        assert set(error.missing) == layers and not error.tensors and not error.unknown
        assert largest(held, expected) == 0.0
        moved = {name for name in layers if not torch.equal(held[name], source[name])}
        assert bool(moved) == (transformer is TRAINED)


def load(path: Path) -> None:
    actor({}, "actor", model=dataclasses.asdict(model_config_from_hf(path, transformer=TRAINED)))


@pytest.mark.simulated
def test_a_copy_of_the_embedding_that_differs_is_rejected(tmp_path: Path) -> None:
    path = save_with_prediction("glm4_moe", tmp_path)
    tensors, name = saved(path), f"{PREFIX}embed_tokens.weight"
    save_file(tensors | {name: tensors[name] + 1.0}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError) as raised:
        run_ranks(load, 1, path)
    assert raised.value.tensor == name


@pytest.mark.parametrize(
    ("key", "fields", "transformer"),
    [
        ("model.tie_embeddings", {"tie_embeddings": True}, {}),
        ("model.position_embedding_type", {"position_embedding_type": "learned_absolute"}, {}),
        ("model.lora", {"lora": LoraConfig(rank=4, alpha=8.0)}, {}),
        ("model.transformer.moe_aux_loss_coeff", {"num_moe_experts": 4}, {"moe_aux_loss_coeff": 0.1}),
        (
            "model.transformer.moe_router_bias_update_rate",  # not 0 by default
            {"num_moe_experts": 4},
            {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
        ),
        ("model.transformer.mtp_use_repeated_layer", {}, {"mtp_use_repeated_layer": True}),
        ("model.transformer.mtp_num_layers", {}, {"mtp_num_layers": -1}),
        ("model.hybrid_layer_pattern", {"hybrid_layer_pattern": "*-" * LAYERS}, {}),
    ],
)
def test_what_layers_cannot_be_trained_with_is_rejected(
    key: str, fields: dict[str, Any], transformer: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as raised:
        transformer_config(ModelConfig(**sizes(TRAINED | transformer, **fields)), ParallelConfig())
    assert raised.value.key == key


@pytest.mark.simulated
def test_a_value_head_has_no_layers() -> None:
    with pytest.raises(ConfigError) as raised:
        run_ranks(lambda: critic({}, model=sizes(TRAINED)), 1)
    assert raised.value.key == "model.transformer.mtp_num_layers"
