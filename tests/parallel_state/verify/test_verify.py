"""``verify``: layouts that are equal, faults that are planted in Megatron's code, and where they are found."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import mlp
from megatron.core.transformer.moe import experts, moe_layer

from mcontroller.testing import LayoutFixture
from parallel_state.verify import Outcome, Program, Verifier
from parallel_state.verify import verify_layout as assert_layout
from tests.parallel_state.verify.programs import EXAMPLES, GPT, MOE, PACKED, PADDED, smaller

pytestmark = pytest.mark.simulated

finalizing = sys.modules["megatron.core.distributed.finalize_model_grads"]  # the package has a function of this name

DENSE = ["tp=2,sp", "pp=2", "cp=2", "dp=2,distopt", "tp=2,pp=2,sp,dp=2,distopt", "tp=2,cp=2,sp"]
EXPERTS = ["ep=2,distopt", "tp=2,ep=2,sp", "tp=2,ep=2,etp=1,sp"]


@pytest.fixture(scope="module")
def gpt() -> Verifier:
    return Verifier(smaller(GPT, micro_batches=4))


@pytest.fixture(scope="module")
def moe() -> Verifier:
    return Verifier(smaller(MOE))


@pytest.mark.parametrize("layout", DENSE)
def test_layouts_of_a_gpt_are_equal(gpt: Verifier, layout: str) -> None:
    outcome = gpt.verify(layout)
    assert outcome.equal, outcome.lines()
    assert 0 < outcome.largest < gpt.tolerance < 1e-4


@pytest.mark.parametrize("layout", EXPERTS)
def test_layouts_of_a_mixture_of_experts_are_equal(moe: Verifier, layout: str) -> None:
    outcome = moe.verify(layout)
    assert outcome.equal, outcome.lines()


@pytest.mark.parametrize("layout", ["ep=2,distopt", "tp=2,ep=2,sp"])
def test_experts_that_are_computed_one_by_one_are_equal(layout: str) -> None:
    with mock.patch.object(experts.TEGroupedMLP, "forward", None):  # those of the other kind are not called
        assert_layout(smaller(MOE, moe_grouped_gemm=False), layout)


def outcome_of(verifier: Verifier, layout: str, owner: Any, name: str, fault: Callable[..., Any]) -> Outcome:
    """Return the outcome with a fault in Megatron that one process does not have."""
    with mock.patch.object(owner, name, fault):
        outcome = verifier.verify(layout)
    assert not outcome.equal
    return outcome


def unchanged(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


def test_a_missing_reduction_forward_is_located(gpt: Verifier) -> None:
    outcome = outcome_of(gpt, "tp=2", layers, "reduce_from_tensor_model_parallel_region", unchanged)
    assert outcome.place is not None
    assert (outcome.place.direction, outcome.place.module) == ("forward", "embedding.word_embeddings")
    assert (outcome.place.micro_batch, outcome.place.step, outcome.place.coordinates) == (0, 1, {"tp": 0})
    assert outcome.place.source.startswith("VocabParallelEmbedding, megatron/core/tensor_parallel/layers.py:")
    assert outcome.place.note == "the sum over tp is that of one process: a reduction over tp is missing"
    assert outcome.place.collectives == ()
    assert {difference.kind for difference in outcome.differences} == {"loss", "gradient", "gradient norm", "weight"}


def test_a_missing_reduction_backward_is_located(gpt: Verifier) -> None:
    function = layers.LinearWithGradAccumulationAndAsyncCommunication
    forward = function.forward

    def without_allreduce(ctx: Any, *args: Any) -> Any:
        output = forward(ctx, *args)
        ctx.allreduce_dgrad = False
        return output

    outcome = outcome_of(gpt, "tp=2", function, "forward", staticmethod(without_allreduce))
    assert outcome.place is not None and outcome.place.direction == "backward"
    assert outcome.place.module == "decoder.final_layernorm"
    assert "a reduction over tp is missing" in outcome.place.note


@pytest.mark.parametrize(
    ("layout", "name", "parameter", "axis"),
    [
        ("tp=2,sp", "_allreduce_non_tensor_model_parallel_grads", "layer_norm_weight[0]", "tp"),
        ("pp=2", "_allreduce_word_embedding_grads", "embedding.word_embeddings.weight", "pp"),
    ],
)
def test_a_gradient_that_is_not_reduced_is_named(
    gpt: Verifier, layout: str, name: str, parameter: str, axis: str
) -> None:
    outcome = outcome_of(gpt, layout, finalizing, name, nothing)
    first = next(difference for difference in outcome.differences if difference.kind == "gradient")
    assert first.name.endswith(parameter)
    assert first.note == f"the sum over {axis} is that of one process: a reduction over {axis} is missing"


def test_gradients_of_the_distributed_optimizer_are_compared_by_shard(gpt: Verifier) -> None:
    buckets = param_and_grad_buffer._ParamAndGradBucketGroup
    outcome = outcome_of(gpt, "dp=2,distopt", buckets, "finish_grad_sync", nothing)
    kinds = [difference.kind for difference in outcome.differences]
    assert kinds.count("gradient") > 10
    assert {difference.rank for difference in outcome.differences} == {0, 1}
    assert outcome.place is None
    assert outcome.lines()[-1].startswith("after the backward pass: all_reduce over dp at megatron/core/")


def test_a_norm_of_one_rank_is_found(gpt: Verifier) -> None:
    def of_this_rank(gradients: list[torch.Tensor], **_: Any) -> float:
        return float(torch.cat([tensor.flatten() for tensor in gradients]).norm())

    outcome = outcome_of(gpt, "tp=2", optimizers, "get_grad_norm_fp32", of_this_rank)
    assert outcome.differences[0].kind == "gradient norm"
    assert " instead of " in outcome.differences[0].note
    assert not [difference for difference in outcome.differences if difference.kind == "gradient"]


def test_a_buffer_that_is_not_reduced_is_found(moe: Verifier) -> None:
    def of_own_tokens(tokens: torch.Tensor, bias: torch.Tensor, rate: float, *_: Any, **__: Any) -> torch.Tensor:
        return bias + torch.sign(tokens.float().mean(-1, keepdim=True) - tokens) * rate

    outcome = outcome_of(moe, "dp=2", finalizing, "get_updated_expert_bias", of_own_tokens)
    assert {difference.kind for difference in outcome.differences} == {"buffer"}
    assert outcome.differences[0].name == "decoder.layers.mlp.router.expert_bias[0]"


def test_a_scaled_gradient_is_named_as_a_multiple(gpt: Verifier) -> None:
    outcome = outcome_of(gpt, "dp=2", param_and_grad_buffer._ParamAndGradBucketGroup, "start_grad_sync", nothing)
    assert any("reduction over dp is missing" in difference.note for difference in outcome.differences)


def test_the_collectives_of_the_module_that_differs_are_listed(gpt: Verifier) -> None:
    reduce = layers.reduce_from_tensor_model_parallel_region
    gpt.records(1)
    outcome = outcome_of(gpt, "tp=2", layers, reduce.__name__, lambda *args, **kwargs: 2 * reduce(*args, **kwargs))
    assert outcome.place is not None
    (collective,) = outcome.place.collectives
    assert collective.startswith("all_reduce over tp at megatron/core/tensor_parallel/mappings.py:")
    assert collective.endswith(" (its result is that of one process)")
    assert outcome.lines()[-1] == f"in it: {collective}"


def test_a_reduction_of_what_is_reduced_already_is_named(gpt: Verifier) -> None:
    reduce = layers.reduce_from_tensor_model_parallel_region
    gpt.records(1)
    outcome = outcome_of(gpt, "tp=2", layers, reduce.__name__, lambda *args, **kwargs: reduce(reduce(*args, **kwargs)))
    assert outcome.place is not None
    _, again = outcome.place.collectives
    assert again.endswith(" (its input is that of one process, its result is 2 times that of one process)")


def test_the_fixture_fails_with_the_report(verify_layout: LayoutFixture) -> None:
    program = smaller(GPT)
    assert verify_layout(program, "pp=2", steps=1).equal
    fault = mock.patch.object(finalizing, "_allreduce_word_embedding_grads", nothing)
    with fault, pytest.raises(pytest.fail.Exception) as caught:
        verify_layout(program, "pp=2", steps=1)
    assert "over pp" in str(caught.value)
    assert verify_layout(f"{EXAMPLES / 'gpt.py'}:program", "pp=2", steps=1).equal


def test_a_gradient_is_located_between_two_modules_and_its_collectives(gpt: Verifier) -> None:
    function = layers.LinearWithGradAccumulationAndAsyncCommunication
    backward = function.backward

    def doubled(ctx: Any, gradient: torch.Tensor) -> Any:
        of_input, *others = backward(ctx, gradient)
        return 2 * of_input, *others

    gpt.records(1)
    outcome = outcome_of(gpt, "tp=2", function, "backward", staticmethod(doubled))
    assert outcome.place is not None
    assert (outcome.place.direction, outcome.place.module) == ("backward", "decoder.final_layernorm")
    assert outcome.place.note == "is 2 times that of one process"
    (collective,) = outcome.place.collectives
    assert collective.startswith("all_reduce over tp at megatron/core/tensor_parallel/layers.py:")
    (operation,) = outcome.place.computed_by
    assert operation.startswith("output_layer (ColumnParallelLinear, megatron/core/tensor_parallel/layers.py:")
    line = doubled.__code__.co_firstlineno
    assert operation.endswith(
        f"): LinearWithGradAccumulationAndAsyncCommunication at {os.path.relpath(__file__)}:{line} in backward"
    )
    assert outcome.lines()[-2:] == [
        f"computed by {operation}",
        f"since the last gradient that is right: {collective}",
    ]


def test_a_module_that_differs_is_located_before_what_it_feeds(moe: Verifier) -> None:
    combine = moe_layer.MoELayer.combine

    def doubled(self: Any, output: torch.Tensor, *args: Any) -> torch.Tensor:
        scale = 2.0 if self.config.expert_model_parallel_size > 1 and self.layer_number == 2 else 1.0
        return combine(self, output * scale, *args)

    outcome = outcome_of(moe, "ep=2", moe_layer.MoELayer, "combine", doubled)
    assert outcome.place is not None
    assert outcome.place.module == "decoder.layers.1.mlp"
    assert outcome.place.note == "is 2 times that of one process"


def test_activations_that_are_computed_again_are_of_their_micro_batch() -> None:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    verifier = Verifier(smaller(GPT, num_layers=4, micro_batches=4, **recompute), steps=1)
    forward = mlp.MLP.forward

    def doubled(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, bias = forward(self, hidden, *args, **kwargs)
        is_last_stage = self.config.pipeline_model_parallel_size == 1 or torch.distributed.get_rank() == 1
        return output * (2.0 if is_last_stage else 1.0), bias

    verifier.records(1)
    outcome = outcome_of(verifier, "pp=2", mlp.MLP, "forward", doubled)
    assert outcome.place is not None
    assert (outcome.place.module, outcome.place.micro_batch) == ("decoder.layers.2.mlp", 0)


def test_an_error_in_one_layout_is_its_outcome(gpt: Verifier) -> None:
    def diverging(*args: Any, **kwargs: Any) -> None:
        if torch.distributed.get_rank():
            torch.distributed.barrier()

    outcome = outcome_of(gpt, "dp=2", finalizing, "_allreduce_word_embedding_grads", diverging)
    assert outcome.failure is not None and outcome.failure.startswith("Deadlock: ranks wait for each other")


def test_an_error_is_located_where_the_values_before_it_differ(gpt: Verifier) -> None:
    outcome = outcome_of(gpt, "tp=2,sp", layers, "reduce_scatter_to_sequence_parallel_region", unchanged)
    assert outcome.failure is not None and outcome.place is not None
    module = next(line for line in outcome.lines() if line.startswith("in "))
    assert module.startswith("in decoder.layers.0 (TransformerLayer, megatron/core/transformer/")
    assert (outcome.place.direction, outcome.place.module) == ("forward", "embedding.word_embeddings")


def test_a_later_step_is_compared_too(gpt: Verifier) -> None:
    step = optimizers.FP32Optimizer.step_with_ready_grads
    calls: dict[int, int] = {}

    def without_update(self: Any) -> Any:
        rank = torch.distributed.get_rank()
        calls[rank] = calls.get(rank, 0) + 1
        if calls[rank] == 2 and rank == 1:
            for group in self.param_groups:
                group["lr"] = 0.0
        return step(self)

    outcome = outcome_of(gpt, "dp=2", optimizers.FP32Optimizer, "step_with_ready_grads", without_update)
    assert {(difference.kind, difference.step, difference.rank) for difference in outcome.differences} == {
        ("weight", 2, 1)
    }


@pytest.mark.parametrize(
    ("program", "layouts"),
    [(PACKED, ["tp=2,sp", "cp=2,dp=2", "pp=2,dp=2,distopt", "mbs=2"]), (PADDED, ["dp=2", "cp=2", "dp=2,mbs=2"])],
    ids=["packed", "padded"],
)
def test_rows_of_unequal_lengths_are_equal(program: Program, layouts: list[str]) -> None:
    verifier = Verifier(smaller(program, micro_batches=4), steps=1)
    for layout in layouts:
        outcome = verifier.verify(layout)
        assert outcome.equal, (layout, outcome.lines())


def test_a_fault_of_packed_rows_under_cp_is_located() -> None:
    forward = mlp.MLP.forward

    def doubled(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, bias = forward(self, hidden, *args, **kwargs)
        return output * 2.0, bias

    verifier = Verifier(smaller(PACKED), steps=1)
    verifier.records(1)
    outcome = outcome_of(verifier, "cp=2", mlp.MLP, "forward", doubled)
    assert outcome.place is not None and outcome.place.module == "decoder.layers.0.mlp"
