"""Weights go from one layout to another and back, bit for bit the same, with as few bytes as possible."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import nn

from mcontroller.errors import DataError
from parallel_state.megatron import MegatronContext
from tests.ranks import run_ranks
from tests.training import Role, new_context
from tests.workers.full_state import full_state_dict, load_full_state_dict
from workers.config import ModelConfig, ParallelConfig
from workers.model.build import build_model
from workers.model.transformer_config import transformer_config
from workers.weights import resharding as resharding_module
from workers.weights.resharding import Resharding, ReshardingReport
from workers.weights.shards import named_buffers, named_shards

pytestmark = pytest.mark.simulated

MODEL = ModelConfig(
    vocab_size=61,  # padded to 62 by tp2 and to 64 by tp4
    max_sequence_length=32,
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=4,
    ffn_hidden_size=64,
    add_qkv_bias=True,
)
TIED = dataclasses.replace(MODEL, tie_embeddings=True)
EXPERTS = dataclasses.replace(
    MODEL,
    num_layers=2,
    num_moe_experts=4,
    moe_ffn_hidden_size=32,
    transformer={"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
)
TP2_PP2 = {"tp": 2, "pp": 2}
Axes = dict[str, Any]
Model = tuple[list[nn.Module], MegatronContext]


def built(model: ModelConfig, axes: Axes, fill: float | None = None) -> Model:
    """A model whose numbers are all ``fill``, or else all different."""
    parallel = ParallelConfig(**axes)
    context = new_context(parallel)
    chunks = build_model(model, parallel, context, initialize=False)
    generator = torch.Generator().manual_seed(2)
    state = {}
    for name, whole in sorted(full_state_dict(chunks, context).items()):
        state[name] = torch.randn(whole.shape, generator=generator).to(whole.dtype)
    load_full_state_dict(chunks, context, state)
    for _, buffer in named_buffers(chunks, context):
        buffer.copy_(torch.linspace(1, 2, len(buffer)))
    if fill is not None:
        for tensor in tensors((chunks, context)):
            tensor.fill_(fill)
    return chunks, context


def tensors(model: Model) -> list[torch.Tensor]:
    """All weights and buffers of this rank, with padding."""
    return [shard.param.data for shard in named_shards(*model)] + [buffer for _, buffer in named_buffers(*model)]


def difference(some: Model, others: Model) -> float:
    pairs = zip(tensors(some), tensors(others), strict=True)
    return max(float((one - other).abs().nan_to_num(torch.inf).max()) for one, other in pairs if one.numel())


def there_and_back(
    model: ModelConfig, from_axes: Axes, to_axes: Axes, bucket_bytes: int
) -> tuple[float, float, ReshardingReport, ReshardingReport, int]:
    """Return the differences after both ways, the reports, and the least number of exchanges."""
    source, target = built(model, from_axes), built(model, to_axes, fill=torch.nan)
    there = Resharding(*source, *target, bucket_bytes=bucket_bytes)
    going = there.run()
    arrived = difference(target, built(model, to_axes))
    for tensor in tensors(source):
        tensor.fill_(torch.nan)
    back = Resharding(*target, *source, bucket_bytes=bucket_bytes)
    returning, exchanges = back.run(), min(len(each.schedule.buckets) for each in (there, back))
    return arrived, difference(source, built(model, from_axes)), going, returning, exchanges


@pytest.mark.parametrize(
    ("model", "from_axes", "to_axes"),
    [
        (MODEL, TP2_PP2, {}),
        (MODEL, TP2_PP2, {"tp": 4}),
        (MODEL, {"tp": 2, "pp": 2, "vpp": 2}, {}),
        (MODEL, {"pp": 4, "order": "tp-cp-ep-pp-dp"}, {"tp": 2, "cp": 2}),
        (TIED, {}, {"pp": 2}),
        (TIED, TP2_PP2, {"tp": 4}),
        (EXPERTS, {"ep": 2}, {"ep": 4}),
        (EXPERTS, {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}, {}),
        (EXPERTS, {"tp": 2, "ep": 2, "etp": 1, "pp": 2, "sequence_parallel": True}, {"ep": 4}),
        (dataclasses.replace(MODEL, dtype="bfloat16"), TP2_PP2, {}),
    ],
    ids=["dp8", "tp4", "vpp", "pp4-cp2", "tied-pp1-pp2", "tied-tp4", "ep2-ep4", "etp2", "pp2-ep4", "bf16"],
)
def test_resharding_there_and_back_restores_every_number(model: ModelConfig, from_axes: Axes, to_axes: Axes) -> None:
    for arrived, returned, going, returning, _ in run_ranks(there_and_back, 8, model, from_axes, to_axes, 1 << 20):
        assert (arrived, returned) == (0.0, 0.0)
        assert going.bytes_sent == going.least_bytes
        assert returning.bytes_sent == returning.least_bytes


def test_small_buckets_copy_the_same_weights() -> None:
    arrived, returned, _, _, exchanges = run_ranks(there_and_back, 4, MODEL, TP2_PP2, {"tp": 4}, 4096)[0]
    assert (arrived, returned) == (0.0, 0.0)
    assert exchanges > 10


def separate_experts() -> float:
    """Reshard Megatron's own layers, with one module per expert, into another dtype."""

    def of(ep: int, dtype: str) -> Model:
        parallel, model = ParallelConfig(ep=ep), dataclasses.replace(EXPERTS, dtype=dtype)
        context, config = new_context(parallel), transformer_config(model, parallel)
        spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm")
        with context.activate():
            chunk = GPTModel(config, spec, vocab_size=64, max_sequence_length=32, pg_collection=context.pg)
        return [chunk], context

    source, target, expected = of(2, "float32"), of(4, "bfloat16"), of(4, "bfloat16")
    for chunks, context in (source, expected):
        for shard in named_shards(chunks, context):
            generator = torch.Generator().manual_seed(sum(shard.name.encode()))
            shard.param.data.copy_(shard.slice_of(torch.randn(shard.full_shape, generator=generator)))
    Resharding(*source, *target).run()
    return difference(target, expected)


def test_separate_experts_are_resharded_into_another_dtype() -> None:
    assert run_ranks(separate_experts, 4) == [0.0] * 4


def bytes_to_one_tp_rank() -> tuple[int, int]:
    """From TP2 to DP2 each rank lacks half of what is divided by tp, padding not counted."""
    source, target = built(MODEL, {"tp": 2}), built(MODEL, {})
    lacking = 0
    for shard in named_shards(*source):
        if shard.dim is not None:
            whole = torch.Size(shard.full_shape).numel()
            own = sum(span.stop - span.start for span in shard.spans) * whole // shard.full_shape[shard.dim]
            lacking += 4 * (whole - own)
    report = Resharding(*source, *target).run()
    return lacking, report.bytes_sent


def test_least_bytes_are_those_that_ranks_lack() -> None:
    first, second = run_ranks(bytes_to_one_tp_rank, 2)
    assert first[0] + second[0] == first[1] == second[1]


def trained(axes: Axes) -> list[torch.Tensor | None]:
    """After each of two steps, logits of a model in the layout it is trained in, and of its copy on plain dp."""
    role, rollout = Role(MODEL, ParallelConfig(**axes), distributed_optimizer=True), Role(MODEL, ParallelConfig())
    resharding = Resharding(role.chunks, role.context, rollout.plain_chunks, rollout.context)
    logits = []
    for step in range(2):
        role.train_step(step)
        resharding.run()
        for outputs in (role.outputs(), rollout.outputs()):
            logits.append(None if outputs is None else outputs[..., : MODEL.vocab_size])
    return logits


def test_one_resharding_serves_a_model_that_goes_on_training() -> None:
    first, its_copy, second, its_second_copy = run_ranks(trained, 4, TP2_PP2)[-1]
    assert first is not None and second is not None
    torch.testing.assert_close(its_copy, first, atol=1e-5, rtol=0)
    torch.testing.assert_close(its_second_copy, second, atol=1e-5, rtol=0)
    assert (first - second).abs().max() > 1e-3


def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Waits for the device, and readings of the clock, in a resharding."""
    resharding = Resharding(*built(MODEL, {}), *built(MODEL, {}))
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: events.append("wait"))
    monkeypatch.setattr(resharding_module.time, "perf_counter", lambda: float(events.append("clock") or len(events)))
    resharding.run()
    return events


def test_seconds_of_a_resharding_are_read_when_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(timed, 1, monkeypatch) == [["wait", "clock", "wait", "clock"]]


def rejected(change: str) -> DataError:
    source, target = (
        built(EXPERTS, {"tp": 2, "sequence_parallel": True}),
        built(TIED if change == "model" else EXPERTS, {}),
    )
    if change == "uneven":
        source[0][0].decoder.layers[0].self_attention.linear_qkv.weight.partition_sizes = [16, 8, 8]
    with pytest.raises(DataError) as caught:
        Resharding(*source, *target)
    return caught.value


def test_tensors_of_unknown_position_are_rejected() -> None:
    for error in run_ranks(rejected, 2, "uneven"):
        assert error.names == ["decoder.layers.0.self_attention.linear_qkv.weight"]


def test_another_model_is_rejected_on_every_rank() -> None:
    for error in run_ranks(rejected, 2, "model"):
        differing = [*error.missing, *error.unexpected]
        assert "decoder.layers.0.mlp.router.expert_bias" in differing
        assert any(name.startswith("decoder.layers.3.mlp") for name in differing)
