"""Norms and linear layers of experts in plain PyTorch, and the attributes of their parameters for Megatron."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP

from mcontroller.errors import ConfigError
from tests.ranks import run_ranks
from tests.training import SMALL_GPT, device, new_context
from workers.config import ParallelConfig
from workers.model.build import build_model
from workers.model.local_modules import GatedMLP, TEColumnParallelGroupedLinear, TENorm, TERowParallelGroupedLinear
from workers.model.transformer_config import transformer_config

pytestmark = pytest.mark.simulated

OF_EXPERTS = dataclasses.replace(SMALL_GPT, num_layers=2, num_moe_experts=4, moe_ffn_hidden_size=32)


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_norm_is_torchs_norm(normalization: str, zero_centered: bool) -> None:
    model = dataclasses.replace(
        SMALL_GPT, normalization=normalization, transformer={"layernorm_zero_centered_gamma": zero_centered}
    )

    def both() -> tuple[Any, ...]:
        norm = TENorm(transformer_config(model, ParallelConfig()), 64, eps=1e-6)
        torchs = getattr(torch.nn, normalization)(64, eps=1e-6, device=device())
        hidden = torch.randn(5, 2, 64, device=device())
        names = [[name for name, _ in module.named_parameters()] for module in (norm, torchs)]
        return norm(hidden), torchs(hidden), *names, norm.weight.unique().tolist()

    [(output, expected, names, names_of_torch, weight)] = run_ranks(both, 1)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
    assert names == names_of_torch
    assert weight == [0.0 if zero_centered else 1.0]


def test_norms_are_marked_for_the_sum_over_tp_under_sequence_parallelism_only() -> None:
    def marked(sequence_parallel: bool) -> Any:
        parallel = ParallelConfig(tp=2, sequence_parallel=sequence_parallel)
        return TENorm(transformer_config(SMALL_GPT, parallel), 64).weight.sequence_parallel

    assert [run_ranks(marked, 1, sequence_parallel) for sequence_parallel in (False, True)] == [[False], [True]]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"activation": "gelu"},
        {"add_bias_linear": True},
        {"transformer": {"glu_linear_offset": 0.5}},
        {"gated_linear_unit": False},
    ],
    ids=lambda fields: ",".join(fields) or "silu",
)
def test_a_gated_mlp_computes_what_megatrons_does(fields: dict[str, Any]) -> None:
    def apart() -> tuple[float, float, float]:
        [chunk] = build_model(dataclasses.replace(SMALL_GPT, **fields), ParallelConfig(), new_context(ParallelConfig()))
        mlp = chunk.decoder.layers[0].mlp
        assert type(mlp) is GatedMLP
        if fields.get("add_bias_linear"):
            torch.nn.init.normal_(mlp.linear_fc1.bias)
        hidden = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(0)).to(device())
        ours, theirs = (hidden.clone().requires_grad_() for _ in range(2))
        output, expected = mlp(ours)[0], MLP.forward(mlp, theirs)[0]
        output.square().sum().backward()
        expected.square().sum().backward()
        with torch.no_grad():
            without_gradients = mlp(ours)[0]
        assert ours.grad is not None and theirs.grad is not None
        pairs = ((output, expected), (without_gradients, expected), (ours.grad, theirs.grad))
        first, second, third = (float((one - other).abs().max()) for one, other in pairs)
        return first, second, third

    assert max(run_ranks(apart, 1)[0]) == 0.0


def grouped(kind: type, ranks_of_tp: int = 1, bias: bool = False) -> Any:
    parallel = ParallelConfig(tp=ranks_of_tp, sequence_parallel=ranks_of_tp > 1)
    context = new_context(parallel)
    config = transformer_config(OF_EXPERTS, parallel)
    with context.activate():
        groups = ProcessGroupCollection.use_mpu_process_groups()
        return kind(3, 8, 4, config=config, init_method=torch.nn.init.normal_, bias=bias, pg_collection=groups)


def test_every_expert_computes_its_own_tokens() -> None:
    def difference() -> float:
        linear = grouped(TEColumnParallelGroupedLinear)
        tokens = torch.randn(7, 8, device=device())
        output, bias = linear(tokens, torch.tensor([4, 0, 3]))
        expected = torch.cat([tokens[:4] @ linear.weight0.T, tokens[4:] @ linear.weight2.T])
        assert bias is None
        return float((output - expected).abs().max())

    assert run_ranks(difference, 1)[0] < 1e-6


@pytest.mark.parametrize(
    ("kind", "shape", "dim", "pieces"),
    [(TEColumnParallelGroupedLinear, (2, 8), 0, 2), (TERowParallelGroupedLinear, (4, 4), 1, 1)],
)
def test_experts_are_divided_over_etp(kind: type, shape: tuple[int, int], dim: int, pieces: int) -> None:
    def divided() -> tuple[Any, ...]:
        weight = grouped(kind, ranks_of_tp=2).weight1
        return tuple(weight.shape), weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride

    assert run_ranks(divided, 2) == [(shape, True, dim, pieces)] * 2


def test_experts_with_biases_are_rejected() -> None:
    def rejected() -> tuple[str, bool]:
        with pytest.raises(ConfigError) as caught:
            grouped(TEColumnParallelGroupedLinear, bias=True)
        return caught.value.key, caught.value.value

    assert run_ranks(rejected, 1) == [("model.add_bias_linear", True)]


def checkpoint_keys() -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Of the experts' first linears in layer 1: key, global shape and offset of every part this rank saves."""
    parallel = ParallelConfig(ep=2)
    context = new_context(parallel)
    [chunk] = build_model(OF_EXPERTS, parallel, context)
    with context.activate():
        state: Any = chunk.sharded_state_dict(metadata={"dp_cp_group": context.pg.dp_cp})
    parts = [state[name] for name in sorted(state) if ".1.mlp.experts.linear_fc2.weight" in name]
    return [(part.key, part.global_shape, part.global_offset) for part in parts]


def test_checkpoints_stack_the_experts_of_all_ranks() -> None:
    first, second = run_ranks(checkpoint_keys, 2)
    key = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    assert [part[0] for part in first + second] == [key] * 4
    assert {part[1] for part in first + second} == {(2, 4, 64, 32)}
    assert [part[2] for part in first] == [(1, 0, 0, 0), (1, 1, 0, 0)]
    assert [part[2] for part in second] == [(1, 2, 0, 0), (1, 3, 0, 0)]
