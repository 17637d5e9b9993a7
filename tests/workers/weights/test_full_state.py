"""All weights of a model by their names in the whole model, gathered from one layout and loaded into another."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from tests.ranks import run_ranks
from tests.training import SMALL_GPT, new_context
from tests.workers.full_state import full_state_dict, load_full_state_dict
from workers.config import ModelConfig, ParallelConfig
from workers.model.build import build_model
from workers.model.transformer_config import transformer_config

pytestmark = pytest.mark.simulated

OF_EXPERTS = dataclasses.replace(SMALL_GPT, num_layers=2, num_moe_experts=4, moe_ffn_hidden_size=32)
LAYER = {
    "self_attention.linear_proj.weight": (64, 64),
    "self_attention.linear_qkv.layer_norm_weight": (64,),
    "self_attention.linear_qkv.weight": (192, 64),
    "mlp.linear_fc1.layer_norm_weight": (64,),
    "mlp.linear_fc1.weight": (256, 64),
    "mlp.linear_fc2.weight": (64, 128),
}


def shapes(model: ModelConfig, axes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    parallel = ParallelConfig(**axes)
    context = new_context(parallel)
    state = full_state_dict(build_model(model, parallel, context), context)
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def test_names_and_shapes_are_the_whole_models() -> None:
    expected: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (125, 64),
        "decoder.final_layernorm.weight": (64,),
        "output_layer.weight": (125, 64),
    }
    for index in range(4):
        expected |= {f"decoder.layers.{index}.{name}": shape for name, shape in LAYER.items()}
    assert run_ranks(shapes, 4, SMALL_GPT, {"tp": 2, "pp": 2, "vpp": 2}) == [expected] * 4


def test_tied_output_weights_are_the_embeddings() -> None:
    names = run_ranks(shapes, 2, dataclasses.replace(SMALL_GPT, tie_embeddings=True), {"pp": 2})[0].keys()
    assert "output_layer.weight" not in names and "embedding.word_embeddings.weight" in names


def test_experts_are_counted_over_all_ranks() -> None:
    shapes_of = run_ranks(shapes, 4, OF_EXPERTS, {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True})[0]
    experts = {name: shape for name, shape in shapes_of.items() if name.startswith("decoder.layers.1.mlp.experts")}
    prefix = "decoder.layers.1.mlp.experts.linear_fc"
    assert experts == {f"{prefix}1.weight{expert}": (64, 64) for expert in range(4)} | {
        f"{prefix}2.weight{expert}": (64, 32) for expert in range(4)
    }


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        (SMALL_GPT, {"tp": 2, "pp": 2}),
        (SMALL_GPT, {"tp": 4}),
        (OF_EXPERTS, {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}),
        (dataclasses.replace(SMALL_GPT, tie_embeddings=True), {"pp": 4}),
    ],
    ids=["tp2-pp2", "tp4", "experts", "tied"],
)
def test_loading_a_full_state_sets_every_weight(model: ModelConfig, axes: dict[str, Any]) -> None:
    def there_and_back(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parallel = ParallelConfig(**axes)
        context = new_context(parallel)
        chunks = build_model(model, parallel, context, initialize=False)
        load_full_state_dict(chunks, context, state)
        return full_state_dict(chunks, context)

    [full] = run_ranks(shapes, 1, model, {})
    state = {name: torch.randn(shape) for name, shape in full.items()}
    torch.testing.assert_close(run_ranks(there_and_back, 4, state)[0], state, rtol=0, atol=0)


def separate_experts(ep: int, state: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """All weights of Megatron's own layers, with one module per expert, after those of ``state`` were loaded."""
    parallel = ParallelConfig(ep=ep)
    context, config = new_context(parallel), transformer_config(OF_EXPERTS, parallel)
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm")
    with context.activate():
        chunks = [GPTModel(config, spec, vocab_size=128, max_sequence_length=32, pg_collection=context.pg)]
    if state is not None:
        load_full_state_dict(chunks, context, state)
    return full_state_dict(chunks, context)


def test_separate_experts_go_from_one_layout_to_another() -> None:
    whole = run_ranks(separate_experts, 2, 2, None)[0]
    state = {name: torch.randn(tensor.shape) for name, tensor in whole.items()}
    for loaded in run_ranks(separate_experts, 4, 4, state):
        torch.testing.assert_close(loaded, state, rtol=0, atol=0)


def rows_of_stacked_tensors() -> torch.Tensor:
    """The rows of a weight that stacks tensors of 96, 24 and 8 rows, each numbered before it was divided over tp=2."""
    parallel = ParallelConfig(tp=2)
    context = new_context(parallel)
    [chunk] = build_model(SMALL_GPT, parallel, context)
    name, rank = "decoder.layers.0.self_attention.linear_qkv.weight", context.pg.tp.rank()
    weight = chunk.get_parameter(name)
    weight.partition_sizes = [48, 12, len(weight) - 60]
    whole = torch.arange(2.0 * len(weight)).split([2 * size for size in weight.partition_sizes])
    weight.data.copy_(torch.cat([part.chunk(2)[rank] for part in whole])[:, None].expand_as(weight))
    return full_state_dict([chunk], context)[name][:, 0]


def test_stacked_tensors_of_different_sizes_are_joined_one_by_one() -> None:
    for rows in run_ranks(rows_of_stacked_tensors, 2):
        assert torch.equal(rows, torch.arange(len(rows), dtype=rows.dtype))
