"""Splits of batches, float64, saved results, marks of parameters, and seeds."""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from parallel_state.verify import LayoutDiffers, Verifier, VerifyError, verify_layout
from tests.parallel_state.verify.programs import GPT, MOE, smaller

pytestmark = pytest.mark.simulated

finalizing = sys.modules["megatron.core.distributed.finalize_model_grads"]
without_tied_sum = mock.patch.object(finalizing, "_allreduce_word_embedding_grads", lambda *args, **kwargs: None)


def test_merged_micro_batches_are_equal() -> None:
    verify_layout(smaller(GPT, micro_batches=4), "cp=2,dp=2,mbs=2")


def test_an_average_of_micro_batch_averages_is_found_in_one_process() -> None:
    def loss(mask: torch.Tensor, losses: torch.Tensor) -> Any:
        mean = (losses * mask).sum() / mask.sum()
        return mean, {"lm loss": mean.detach().clone()}

    def forward_step(data_iterator: Any, model: Any) -> Any:
        data = next(data_iterator)
        output = model(data["tokens"], data["position_ids"], None, labels=data["labels"])
        return output, partial(loss, data["loss_mask"])

    program = smaller(GPT, calculate_per_token_loss=False, forward_step=forward_step)
    with pytest.raises(LayoutDiffers) as caught:
        verify_layout(program, "mbs=2")
    assert {(difference.kind, difference.step, difference.rank) for difference in caught.value.outcome.differences} >= {
        ("gradient", 1, 0)
    }


def test_batches_that_are_no_dicts_cannot_be_merged() -> None:
    def forward_step(data_iterator: Any, model: Any) -> Any:
        return GPT.forward_step(iter([next(data_iterator)[0]]), model)

    program = smaller(GPT, batch=lambda index: [GPT.batch(index)], forward_step=forward_step)
    with pytest.raises(VerifyError):
        verify_layout(program, "mbs=2")


def test_in_float64_differences_are_a_thousandth_of_a_billionth() -> None:
    verifier = Verifier(smaller(MOE), exact=True)
    assert {tensor.dtype for tensor in verifier.reference.start.values()} == {torch.float64}
    outcome = verifier.verify("tp=2,ep=2,sp")
    assert outcome.equal, outcome.lines()
    assert 0 < outcome.largest < verifier.tolerance < 1e-12
    assert torch.get_default_dtype() == torch.float32 and torch.ones(1).float().dtype == torch.float32


def test_float64_finds_what_float32_takes_for_rounding() -> None:
    reduce = finalizing._allreduce_word_embedding_grads

    def slightly_wrong(model: Any, *args: Any, **kwargs: Any) -> None:
        reduce(model, *args, **kwargs)
        for parameter in model[0].parameters():
            parameter.main_grad.mul_(1 + 1e-7 * torch.distributed.get_world_size())

    program = smaller(GPT)
    outcomes = [Verifier(program, steps=1, exact=exact) for exact in (False, True)]
    with mock.patch.object(finalizing, "_allreduce_word_embedding_grads", slightly_wrong):
        assert [verifier.verify("pp=2").equal for verifier in outcomes] == [True, False]


def test_a_saved_result_is_compared_from_its_weights(tmp_path: Path) -> None:
    program, path = smaller(GPT), tmp_path / "saved.pt"
    before = Verifier(program)
    before.save(path)
    same = before.against(path)
    assert same.equal and same.largest == 0.0
    other = Verifier(smaller(GPT, model_provider=drawn_again("linear_fc2.weight", None)))
    assert other.against(path).equal and other.verify("pp=2").equal  # from the saved weights
    changed = Verifier(smaller(GPT, layernorm_epsilon=1e-2))
    assert changed.reference.fingerprint != before.reference.fingerprint == Verifier(program).reference.fingerprint
    outcome = changed.against(path)
    assert {difference.kind for difference in outcome.differences} == {"loss", "gradient", "gradient norm", "weight"}
    with pytest.raises(VerifyError):
        Verifier(program, steps=1).against(path)
    with pytest.raises(VerifyError):
        before.against(tmp_path / "no such file")


@pytest.mark.parametrize(
    ("parameter", "mark", "note"),
    [
        ("linear_fc2.weight", False, "divided over tp and not marked tensor_model_parallel: the norm leaves parts out"),
        (
            "layer_norm_weight",
            True,
            "whole on every tp rank and marked tensor_model_parallel: the norm counts it 2 times",
        ),
    ],
)
def test_wrong_marks_are_named(parameter: str, mark: bool, note: str) -> None:
    def marked(*args: Any, **kwargs: Any) -> Any:
        model = GPT.model_provider(*args, **kwargs)
        for name, weight in model.named_parameters():
            if name.endswith(parameter):
                weight.tensor_model_parallel = mark
        return model

    outcome = Verifier(smaller(GPT, model_provider=marked), steps=1, exact=True).verify("tp=2")
    assert {difference.kind: difference.note for difference in outcome.differences}["mark"] == note
    assert "gradient norm" in {difference.kind for difference in outcome.differences}


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_weight_that_is_trained_in_one_process_only_or_in_the_layout_only_is_named(is_trained: bool) -> None:
    def frozen(config: Any, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
        model = GPT.model_provider(config, pre_process, post_process, vp_stage)
        in_one_process = pre_process and post_process
        model.decoder.layers[-1].mlp.linear_fc2.requires_grad_(in_one_process is not is_trained)
        return model

    outcome = Verifier(smaller(GPT, model_provider=frozen), steps=1).verify("pp=2")
    named = {difference.name for difference in outcome.differences if difference.kind == "gradient"}
    assert "decoder.layers.mlp.linear_fc2.weight[1]" in named and "linear_fc2" in outcome.first()


def test_weights_without_their_mark_are_named() -> None:
    def unmarked(*args: Any, **kwargs: Any) -> Any:
        model = GPT.model_provider(*args, **kwargs)
        for parameter in model.parameters():
            parameter.sequence_parallel = False
        model.scale = torch.nn.Parameter(torch.ones(()))  # one number, which is a multiple of every other
        model.decoder.register_forward_hook(lambda module, inputs, output: output * model.scale)
        return model

    with pytest.raises(LayoutDiffers) as caught:
        verify_layout(smaller(GPT, model_provider=unmarked), "tp=2,sp", steps=1)
    gradients = {each.name: each.note for each in caught.value.outcome.differences if each.kind == "gradient"}
    assert {"scale", "decoder.final_layernorm.weight"} <= gradients.keys()
    assert all("over tp is missing; it is not marked sequence_parallel" in note for note in gradients.values())


def drawn_again(parameter: str, generator: torch.Generator | None) -> Any:
    """Return a model provider that draws some weights from another generator, or from torch's own."""

    def provider(*args: Any, **kwargs: Any) -> Any:
        model = GPT.model_provider(*args, **kwargs)
        for name, weight in model.named_parameters():
            if name.endswith(parameter):
                torch.nn.init.normal_(weight, std=0.02, generator=generator)
        return model

    return provider


def test_parts_that_are_drawn_with_one_seed_are_named() -> None:
    with pytest.raises(LayoutDiffers) as caught:  # torch.manual_seed is the same on all ranks
        verify_layout(smaller(GPT, model_provider=drawn_again("linear_fc2.weight", None)), "tp=2", steps=1)
    differences = caught.value.outcome.differences
    assert {difference.kind for difference in differences} == {"seed"}
    assert differences[0].name == "decoder.layers.mlp.linear_fc2.weight[0]"
    assert differences[0].note == "this part starts with the values of another part, on rank 0: their seeds agree"


def test_parts_that_one_process_starts_with_the_same_values_may_be_equal() -> None:
    def provider(*args: Any, **kwargs: Any) -> Any:
        model = GPT.model_provider(*args, **kwargs)
        for name, weight in model.named_parameters():
            if name.endswith("linear_fc2.weight"):  # divided by columns, which are all the same
                weight.detach().copy_(0.1 * torch.arange(len(weight)).sin()[:, None])
        return model

    verify_layout(smaller(GPT, model_provider=provider), "tp=2", steps=1)


def test_buffers_of_every_kind_are_compared() -> None:
    is_faulty = False

    def provider(*args: Any, **kwargs: Any) -> Any:
        model = GPT.model_provider(*args, **kwargs)
        model.register_buffer("mask", torch.ones(3, 3).tril().bool())
        model.register_buffer("hidden", torch.full((3, 3), -math.inf).triu(1))
        model.register_buffer("angles", torch.polar(torch.ones(3), torch.arange(3.0)))
        model.register_buffer("count", torch.tensor(7, dtype=torch.uint8))
        model.empty = torch.nn.Parameter(torch.ones(0, 3))

        def change(module: Any, inputs: Any) -> None:
            if is_faulty and torch.distributed.get_rank() == 1:
                model.mask[0, 0] = False
                model.hidden[0, 0] = -math.inf
                model.angles += 0.1j
                model.count -= 1

        model.register_forward_pre_hook(change)
        return model

    verifier = Verifier(smaller(GPT, model_provider=provider), steps=1)
    assert verifier.verify("dp=2,distopt").equal
    is_faulty = True
    differences = verifier.verify("dp=2").differences
    assert {(difference.kind, difference.name, difference.rank) for difference in differences} == {
        ("buffer", name, 1) for name in ("mask", "hidden", "angles", "count")
    }


def test_replicas_that_are_drawn_with_other_seeds_are_named() -> None:
    def provider(*args: Any, **kwargs: Any) -> Any:
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        return drawn_again("linear_fc1.weight", generator)(*args, **kwargs)

    with pytest.raises(LayoutDiffers) as caught:
        verify_layout(smaller(GPT, model_provider=provider), "dp=2", steps=1)
    assert caught.value.outcome.differences[0].kind == "seed"


def test_values_that_are_not_finite_are_a_difference() -> None:
    reduce = finalizing._allreduce_word_embedding_grads

    def infinite(model: Any, *args: Any, **kwargs: Any) -> None:
        reduce(model, *args, **kwargs)
        next(iter(model[0].parameters())).main_grad *= math.inf

    verifier = Verifier(smaller(GPT), steps=1)
    with mock.patch.object(finalizing, "_allreduce_word_embedding_grads", infinite):
        outcome = verifier.verify("pp=2")
    assert {difference.kind for difference in outcome.differences} == {"gradient", "gradient norm", "weight"}
    assert all(difference.error == math.inf for difference in outcome.differences if difference.kind == "gradient")
