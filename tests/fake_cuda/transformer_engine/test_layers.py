"""Models on the GPU path are built from Transformer Engine's layers, and compute what local layers compute."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformer_engine as te
from megatron.core.transformer.torch_norm import L2Norm
from transformer_engine import received

from tests.fake_cuda.tags import traffic
from tests.forking import run_ranks
from tests.training import SMALL_GPT, new_context
from tests.workers.roles import MODEL, actor, experience, largest_difference, own_shard, prompts, weights
from workers.config import ModelConfig, ParallelConfig
from workers.model.build import build_model

pytestmark = pytest.mark.processes

Calls = dict[str, list[dict[str, Any]]]
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 64}


def built(model: ModelConfig) -> Any:
    parallel = ParallelConfig()
    [chunk] = build_model(model, parallel, new_context(parallel))
    return chunk


def kinds(model: ModelConfig) -> tuple[set[str], list[str], Calls]:
    chunk = built(model)
    modules = {type(module).__module__.rpartition(".")[2] + "." + type(module).__name__ for module in chunk.modules()}
    extra = [name for name in chunk.state_dict() if name.endswith("_extra_state")]
    return modules, extra, dict(received.calls)


def test_the_spec_is_transformer_engines() -> None:
    [(modules, extra_states, calls)] = run_ranks(kinds, 1, dataclasses.replace(SMALL_GPT, dtype="bfloat16", **EXPERTS))
    engine = {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"}
    engine |= {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}
    assert {f"transformer_engine.{name}" for name in engine} | {"norms.RMSNorm"} <= modules
    assert not {name for name in modules if name.startswith("local_")}
    assert "decoder.final_layernorm._extra_state" in extra_states
    assert len(calls["DotProductAttention"]) == SMALL_GPT.num_layers
    assert {call["attn_mask_type"] for call in calls["DotProductAttention"]} == {"causal"}
    assert {call["params_dtype"] for call in calls["RMSNorm"]} == {torch.bfloat16}
    assert {call["fuse_wgrad_accumulation"] for call in calls["TERowParallelGroupedLinear"]} == {True}


def norms_of_queries(implementation: str) -> list[type]:
    model = dataclasses.replace(SMALL_GPT, transformer_impl=implementation, transformer={"qk_l2_norm": True})
    return [type(layer.self_attention.q_layernorm) for layer in built(model).decoder.layers]


@pytest.mark.parametrize("implementation", ["transformer_engine", "local"])
def test_l2_norm_of_queries_and_keys_is_built(implementation: str) -> None:
    assert run_ranks(norms_of_queries, 1, implementation) == [[L2Norm] * SMALL_GPT.num_layers]


@pytest.mark.parametrize("implementation", ["transformer_engine", "local"])
def test_experts_one_by_one_are_built(implementation: str) -> None:
    fields = {"moe_grouped_gemm": False}
    model = dataclasses.replace(SMALL_GPT, transformer_impl=implementation, transformer=fields, **EXPERTS)
    assert run_ranks(lambda: type(built(model).decoder.layers[0].mlp.experts).__name__, 1) == ["SequentialMLP"]


VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "layer norm, biases, tied": {
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "tie_embeddings": True,
        "activation": "gelu",
        "gated_linear_unit": False,
    },
    "normalized queries": {"qk_layernorm": True, "add_qkv_bias": True},
    "l2 norm": {"transformer": {"qk_l2_norm": True}},
    "experts": EXPERTS,
}


def trained(model: dict[str, Any], packed: bool, implementation: str) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Scores and greedy tokens before an update, and the weights after it."""
    worker = actor(
        {}, model=MODEL | model | {"transformer_impl": implementation}, packed=packed, role="actor_rollout_ref"
    )
    scores = worker.compute_log_prob(experience(8)).batch["old_log_probs"]
    tokens = worker.generate_sequences(prompts(4, {"do_sample": False, "eos_token_id": 1, "pad_token_id": 0}))
    worker.update_actor(own_shard(experience(8), worker))
    return scores, tokens.batch["responses"], weights(worker)


@pytest.mark.parametrize(("variant", "packed"), [(variant, variant == "experts") for variant in VARIANTS])
def test_both_implementations_score_sample_and_train_alike(variant: str, packed: bool) -> None:
    [(scores, tokens, new)] = run_ranks(trained, 1, VARIANTS[variant], packed, "transformer_engine")
    [(local_scores, local_tokens, local_new)] = run_ranks(trained, 1, VARIANTS[variant], packed, "local")
    torch.testing.assert_close(scores, local_scores, atol=2e-5, rtol=0)
    assert tokens.tolist() == local_tokens.tolist()
    assert largest_difference(new, local_new) < 2e-5


def fused_weights() -> dict[str, bool]:
    worker = actor({}, "actor", model=MODEL | {"transformer_impl": "transformer_engine"})
    worker.update_actor(experience(8))
    return {name: weight.grad_added_to_main_grad for name, weight in worker.model[0].named_parameters()}


def test_transformer_engine_adds_weight_gradients_to_their_sum_without_apex() -> None:
    [fused] = run_ranks(fused_weights, 1)
    linears = {name for name in fused if name.endswith("weight") and ".linear_" in name}
    linears -= {name for name in linears if "layer_norm" in name}
    assert linears and {name for name, added in fused.items() if added} == linears


def masks_and_waits(packed: bool, extra: dict[str, Any]) -> tuple[list[dict[str, Any]], int, int]:
    model = MODEL | {"transformer_impl": "transformer_engine", "transformer": extra}
    worker = actor({}, model=model, packed=packed)
    rows = experience(8)
    worker.compute_log_prob(rows)
    received.calls.clear()
    traffic.clear()
    worker.compute_log_prob(rows)
    calls = received.calls["DotProductAttention.forward"]
    return calls, sum(n for kind, n in traffic.counts.items() if kind.startswith("sync:")), len(calls)


def test_packed_rows_reach_attention_as_thd_with_their_bounds() -> None:
    [(calls, _, _)] = run_ranks(masks_and_waits, 1, True, {})
    assert {(call["qkv_format"], call["attn_mask_type"], call["mask"]) for call in calls} == {
        ("thd", "padding_causal", None)
    }
    assert not any(call["pad_between_seqs"] for call in calls)  # or FlashAttention 2 would not run
    for call in calls:
        lengths = call["cu_seqlens_q"].diff()
        assert int(call["cu_seqlens_q"][-1]) == call["query"][0] and int(lengths.max()) == call["max_seqlen_q"]


def test_padded_rows_reach_attention_without_a_mask() -> None:
    [(calls, _, _)] = run_ranks(masks_and_waits, 1, False, {})
    assert {(call["qkv_format"], call["attn_mask_type"], call["mask"]) for call in calls} == {("sbhd", "causal", None)}


def test_rotary_positions_of_packed_rows_do_not_wait_for_the_device() -> None:
    [(_, fused, layers)] = run_ranks(masks_and_waits, 1, True, {})
    [(_, unfused, _)] = run_ranks(masks_and_waits, 1, True, {"apply_rope_fusion": False})
    assert fused == unfused < layers


@pytest.mark.parametrize("layer", [te.pytorch.Linear, te.pytorch.LayerNormLinear, te.pytorch.GroupedLinear])
def test_arguments_that_transformer_engine_has_not_are_rejected(layer: Any) -> None:
    with pytest.raises(TypeError):
        layer(1, 16, 16, no_such_argument=True)


def test_te_module_is_the_stand_in() -> None:
    assert te.__file__.endswith("site-packages/transformer_engine/__init__.py") and te.__version__ == "2.20.2"
