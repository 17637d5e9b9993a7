"""Hugging Face checkpoints: transformers' logits on any layout, and the same bytes out again."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from safetensors.torch import load_file, save_file

from mcontroller.data.batch import DataProto
from mcontroller.errors import ConfigError, DataError
from tests.forking import RankFailure
from tests.ranks import run_ranks
from tests.training import device, new_context
from tests.workers.roles import actor, weights
from workers.config import CriticConfig, ParallelConfig, load_config
from workers.config.model import model_config_from_hf
from workers.model.build import build_model
from workers.weights.hf.config import hf_config_of
from workers.weights.hf.model import export_hf, hf_tensors, load_hf

transformers = pytest.importorskip("transformers")

VOCAB, ROWS, LENGTH = 125, 4, 48  # a vocabulary that tp does not divide
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=False),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2_tied": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3_moe_raw": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=False),
    "qwen3_moe_top1": lambda: transformers.Qwen3MoeConfig(
        **SIZES, **EXPERTS | {"num_experts_per_tok": 1}, norm_topk_prob=True
    ),
}
TP2_PP2 = {"tp": 2, "pp": 2}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", TP2_PP2),
    ("qwen2", TP2_PP2),
    ("qwen2_tied", {"tp": 2}),
    ("qwen2_tied", {"pp": 2, "vpp": 2}),
    ("qwen3", TP2_PP2),
    ("qwen3_moe", {"pp": 2, "ep": 2}),
    ("qwen3_moe", {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}),
    ("qwen3_moe", {"tp": 2, "etp": 2, "sequence_parallel": True}),
    ("qwen3_moe_raw", {"ep": 2}),
    ("qwen3_moe_top1", {}),
]
"""The tensors of each family once divided and on two stages, and each way to divide them once."""
REJECTED = (DataError, RankFailure)  # the error of a forked rank arrives as text


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of each family as transformers saves it."""
    root = tmp_path_factory.mktemp("hf")
    for family, config in FAMILIES.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config()).float()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases are built as ones and zeros
                parameter.data += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(root / family)
    return {family: root / family for family in FAMILIES}


def token_ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def of_transformers(path: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(token_ids()).logits


def world_size(axes: dict[str, Any]) -> int:
    return axes.get("pp", 1) * max(axes.get("tp", 1), axes.get("ep", 1) * axes.get("etp", axes.get("tp", 1)))


def logits_of(chunks: list[torch.nn.Module]) -> torch.Tensor | None:
    """[ROWS, LENGTH, vocabulary with padding] on the last stage."""

    def forward(batches: Iterator[torch.Tensor], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        ids = next(batches)
        output = chunk.eval()(
            ids, torch.arange(LENGTH, device=device()).expand_as(ids), None, runtime_gather_output=True
        )
        return output, lambda output, non_loss_data: output

    with torch.no_grad():
        micro_batches = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(token_ids().to(device()).split(2)) for _ in chunks],
            model=chunks,
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return torch.cat(micro_batches) if micro_batches else None


def imported(path: Path, axes: dict[str, Any], out: Path) -> dict[str, Any]:
    """On one rank: the logits of a model started from ``path``, its tensors as a stream; exported to ``out``."""
    model, parallel = model_config_from_hf(path, dtype="float32"), ParallelConfig(**axes)
    context = new_context(parallel)
    chunks = build_model(model, parallel, context)
    with context.activate():
        logits = logits_of(chunks)
    streamed = {name: tensor.clone() for name, tensor in hf_tensors(chunks, context)}
    export_hf(chunks, context, out, model, max_file_bytes=100_000)
    return {"logits": logits, "streamed": streamed, "held": sum(p.numel() for c in chunks for p in c.parameters())}


def weights_at(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.simulated
@pytest.mark.parametrize(("family", "axes"), CASES, ids=[f"{f}-{'-'.join(map(str, a)) or 'one'}" for f, a in CASES])
def test_logits_are_transformers_and_the_export_is_bit_exact(
    family: str, axes: dict[str, Any], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    ranks = run_ranks(imported, world_size(axes), checkpoints[family], axes, tmp_path / "out")
    expected = of_transformers(checkpoints[family])
    assert expected.std() > 0.3
    actual = [rank["logits"] for rank in ranks if rank["logits"] is not None]
    assert len(actual) == len(ranks) // axes.get("pp", 1)
    for logits in actual:
        torch.testing.assert_close(logits[..., :VOCAB], expected, atol=1e-4, rtol=0)
        assert (logits[..., VOCAB:] < -1e4).all()  # what pads the vocabulary is never sampled
    original = weights_at(checkpoints[family])
    for rank in ranks:
        assert_equal(rank["streamed"], original)
    assert_equal(weights_at(tmp_path / "out"), original)
    assert torch.equal(of_transformers(tmp_path / "out"), expected)


@pytest.mark.simulated
def test_no_rank_has_more_than_its_share(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    ranks = run_ranks(imported, 4, checkpoints["llama"], {"tp": 2, "pp": 2}, tmp_path / "out")
    whole = sum(tensor.numel() for tensor in weights_at(checkpoints["llama"]).values())
    assert max(rank["held"] for rank in ranks) < 0.27 * whole


@pytest.mark.simulated
def test_tensors_stream_in_the_order_of_the_model(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    names = list(run_ranks(imported, 2, checkpoints["qwen2"], {"pp": 2}, tmp_path / "out")[0]["streamed"])
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert names[0] == "model.embed_tokens.weight" and names[-1] == "lm_head.weight"
    assert layers == sorted(layers)


@pytest.mark.simulated
def test_files_are_written_by_the_ranks_that_have_distinct_weights(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    run_ranks(imported, 4, checkpoints["qwen2"], {"tp": 2, "pp": 2}, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in (tmp_path / "out").glob("*.safetensors")}
    stage_of = {
        file: {name.split(".")[2] for name, its in index["weight_map"].items() if its == file and "layers" in name}
        for file in set(index["weight_map"].values())
    }
    assert all(layers <= {"0", "1"} or layers <= {"2", "3"} for layers in stage_of.values())
    assert index["metadata"]["total_size"] == sum(4 * t.numel() for t in weights_at(tmp_path / "out").values())


def trained_and_exported(out: Path) -> dict[str, torch.Tensor]:
    worker = actor({"tp": 2}, "actor")
    worker.update_sft(
        DataProto.from_dict(
            {name: torch.ones(4, 8).long() for name in ("input_ids", "attention_mask")}
            | {"loss_mask": (torch.arange(8) > 0).expand(4, 8).long()}
        )
    )
    worker.export_hf(str(out))
    return weights(worker)


@pytest.mark.simulated
def test_a_trained_actor_is_exported_for_transformers(tmp_path: Path) -> None:
    trained = run_ranks(trained_and_exported, 2, tmp_path / "out")[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.lm_head.weight, trained["output_layer.weight"])
    assert torch.equal(model.model.layers[3].mlp.down_proj.weight, trained["decoder.layers.3.mlp.linear_fc2.weight"])


def with_a_bias_of_experts(path: Path) -> list[torch.Tensor]:
    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    model = model_config_from_hf(path, transformer=bias | {"moe_router_pre_softmax": False}, hf_path=None)
    context = new_context(ParallelConfig(ep=2))
    chunks = build_model(model, ParallelConfig(ep=2), context)
    for name, buffer in chunks[0].named_buffers():
        if name.endswith("expert_bias") and context.pg.dp.rank() == 1:
            buffer[0] = 0.1
    return [tensor for _, tensor in hf_tensors(chunks, context)]


@pytest.mark.simulated
def test_a_bias_of_experts_that_no_family_has_is_not_left_out(checkpoints: dict[str, Path]) -> None:
    """An engine with these weights would choose other experts."""
    with pytest.raises(REJECTED) as caught:
        run_ranks(with_a_bias_of_experts, 2, checkpoints["qwen3_moe"])
    assert caught.value.tensor == "decoder.layers.0.mlp.router.expert_bias"


def in_its_own_dtype(path: Path) -> dict[str, torch.Tensor]:
    parallel = ParallelConfig(tp=2)
    context = new_context(parallel)
    return dict(hf_tensors(build_model(model_config_from_hf(path), parallel, context), context))


@pytest.mark.simulated
def test_bfloat16_weights_stay_as_they_are(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints["qwen2"], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    actual = run_ranks(in_its_own_dtype, 2, tmp_path)[1]
    assert {tensor.dtype for tensor in actual.values()} == {torch.bfloat16}
    assert_equal(actual, weights_at(tmp_path))


# ---- configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_comes_back_as_it_was(family: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = model_config_from_hf(checkpoints[family])
    tmp_path.joinpath("config.json").write_text(json.dumps(hf_config_of(model)))
    again = model_config_from_hf(tmp_path, hf_path=str(checkpoints[family]), init_method_std=model.init_method_std)
    assert again == model
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = transformers.AutoConfig.from_pretrained(checkpoints[family])
    assert theirs.rope_parameters == ours.rope_parameters
    assert type(theirs) is type(ours)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_command_line_sets_the_directory_and_overrides_fields(family: str, checkpoints: dict[str, Path]) -> None:
    overrides = [f"model.hf_path={checkpoints[family]}", "model.dtype=bfloat16", "model.transformer.fp8=hybrid"]
    config = load_config(CriticConfig, overrides=overrides)
    expected = model_config_from_hf(checkpoints[family], dtype="bfloat16", transformer={"fp8": "hybrid"})
    assert config.model == expected


def test_a_model_without_sizes_and_without_a_directory_is_rejected(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(CriticConfig, overrides=["model.hidden_size=8"])
    assert (caught.value.key, caught.value.value) == ("model.hf_path", None)
    with pytest.raises(ConfigError) as caught:
        load_config(CriticConfig, overrides=["model.hf_path=/nowhere"])
    assert (caught.value.key, caught.value.value) == ("model.hf_path", "/nowhere")


def test_scaling_of_rotary_positions_is_read_from_old_and_new_keys(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    new = json.loads((checkpoints["llama"] / "config.json").read_text())
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": 5e5, "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"}}
    (tmp_path / "config.json").write_text(json.dumps(old))
    for path in (checkpoints["llama"], tmp_path):
        model = model_config_from_hf(path)
        assert (model.rotary_base, model.rope_scaling_factor) == (500000, 8.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt2"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_parameters", LLAMA3 | {"low_freq_factor": 2.0}),
        ("rope_parameters", {"rope_type": "llama3", "factor": 8.0}),
        ("num_hidden_layers", None),
    ],
)
def test_keys_that_would_change_the_computation_are_rejected(
    key: str, value: Any, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((checkpoints["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ConfigError) as caught:
        model_config_from_hf(tmp_path)
    assert caught.value.key in (key, "rope_type", "low_freq_factor")


@pytest.mark.parametrize(
    "change",
    [
        {"normalization": "LayerNorm"},
        {"transformer": {"rotary_interleaved": True}},
        {"transformer": {"glu_linear_offset": 1.0}},
    ],
)
def test_a_model_of_no_family_has_no_config_json(change: dict[str, Any], checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        hf_config_of(dataclasses.replace(model_config_from_hf(checkpoints["llama"]), **change))
    name, value = next(iter(change.items()))
    changed = (f"transformer.{field}" for field in value) if name == "transformer" else (name,)
    assert caught.value.key in [f"model.{field}" for field in changed]


@pytest.mark.processes
def test_reading_a_configuration_does_not_load_transformers() -> None:
    loaded = "import sys, workers.config, workers.weights.hf.model; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0


# ---- checkpoints that do not fit -------------------------------------------------------------------------------------


def rejected(path: Path) -> tuple[list[str], list[str], list[str], bool]:
    """The tensors that the DataError names, and whether the weights were left as they were."""
    model = dataclasses.replace(model_config_from_hf(path), hf_path=None)
    parallel = ParallelConfig(pp=2)
    context = new_context(parallel)
    chunks = build_model(model, parallel, context)
    before = [parameter.clone() for parameter in chunks[0].parameters()]
    with pytest.raises(DataError) as caught:
        load_hf(chunks, path, context)
    error: Any = caught.value
    untouched = all(map(torch.equal, before, chunks[0].parameters()))
    return error.missing, error.unexpected, error.differing, untouched


@pytest.mark.simulated
def test_tensors_that_do_not_fit_are_named_on_every_rank(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(checkpoints["llama"] / "config.json", tmp_path)
    weights = weights_at(checkpoints["llama"])
    del weights["model.layers.0.self_attn.k_proj.weight"]
    weights["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
    weights["model.norm.weight"] = torch.zeros(32)
    save_file(weights, tmp_path / "model.safetensors")
    expected = (
        ["model.layers.0.self_attn.k_proj.weight"],
        ["model.layers.9.mlp.up_proj.weight"],
        ["model.norm.weight is [32], the model's is [64]"],
        True,
    )
    assert run_ranks(rejected, 2, tmp_path) == [expected] * 2


@pytest.mark.simulated
def test_a_directory_without_weights_is_rejected(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(checkpoints["llama"] / "config.json", tmp_path)
    with pytest.raises(REJECTED):
        run_ranks(imported, 2, tmp_path, {"tp": 2}, tmp_path / "out")


@pytest.mark.simulated
def test_files_that_are_damaged_are_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    whole = (checkpoints["llama"] / "model.safetensors").read_bytes()
    shutil.copy(checkpoints["llama"] / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(REJECTED) as caught:
        run_ranks(imported, 2, tmp_path, {"tp": 2}, tmp_path / "out")
    assert caught.value.path == "model.safetensors"
    (tmp_path / "config.json").write_text('{"model_type":')
    with pytest.raises(ConfigError) as caught:
        model_config_from_hf(tmp_path)
    assert caught.value.key == "hf_path"


@pytest.mark.simulated
def test_an_export_that_cannot_create_its_directory_is_rejected_on_every_rank(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(REJECTED):
        run_ranks(imported, 2, checkpoints["llama"], {"tp": 2}, tmp_path / "file" / "out")


@pytest.mark.simulated
def test_an_export_overwrites_nothing(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("here first")
    with pytest.raises(REJECTED):
        run_ranks(imported, 2, checkpoints["llama"], {"tp": 2}, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


# ---- value heads -----------------------------------------------------------------------------------------------------


def with_value_head(path: Path, axes: dict[str, Any], out: Path) -> dict[str, torch.Tensor]:
    model, parallel = model_config_from_hf(path), ParallelConfig(**axes)
    context = new_context(parallel)
    chunks = build_model(model, parallel, context, value_head=True)
    export_hf(chunks, context, out, model)
    return dict(hf_tensors(chunks, context))


@pytest.mark.simulated
def test_a_critic_starts_from_a_language_model_with_a_head_of_its_seed(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    one = run_ranks(with_value_head, 1, checkpoints["qwen2_tied"], {}, tmp_path / "one")[0]
    four = run_ranks(with_value_head, 4, checkpoints["qwen2_tied"], {"tp": 2, "pp": 2}, tmp_path / "four")[3]
    assert_equal(four, one)
    head = one.pop("score.weight")
    assert head.shape == (1, 64) and head.std() > 0.01
    assert_equal(one, weights_at(checkpoints["qwen2_tied"]))


@pytest.mark.simulated
def test_a_classifier_of_one_label_is_a_reward_model_and_back(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(with_value_head, 2, checkpoints["llama"], {"pp": 2}, tmp_path / "one")
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "one")
    assert classifier.score.weight.shape == (1, 64)
    again = run_ranks(with_value_head, 2, tmp_path / "one", {"tp": 2}, tmp_path / "two")[0]
    assert_equal(again, weights_at(tmp_path / "one"))
    assert torch.equal(again["score.weight"], classifier.score.weight)
