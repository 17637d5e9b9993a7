"""The gallery of faulty programs: each differs in its layout, and its report, which the docs have, names the fault."""

from __future__ import annotations

import contextlib
from importlib.metadata import version

import pytest

from examples.verify.reports import LAYOUTS, report
from parallel_state.verify import Verifier
from parallel_state.verify.program import load_program

pytestmark = pytest.mark.simulated

FAULTS = {
    "label_smoothing": "gradient of the output of GPTModel (GPTModel, ",
    "gathered_logits": "loss lm loss, step 1, rank 0 (tp=0): off by 0.17; 4.8",
    "padding_mask": "computed by decoder.layers.1.mlp.router (TopKRouter, ",
    "attention_sinks": "mark decoder.layers.self_attention.core_attention.softmax_offset[0], step 1",
    "auxiliary_loss": "gradient decoder.layers.mlp.router.weight[",
    "sequence_loss": "computed by decoder.layers.1.mlp.router (TopKRouter, ",
    "tokens_over_dp": "gradient of the output of GPTModel (GPTModel, ",
    "counted_on_each_rank": "gradient of the output of GPTModel (GPTModel, ",
    "tied_embeddings": "the sum over pp is that of one process: a reduction over pp is missing",
    "norm_weights": "a reduction over tp is missing; it is not marked sequence_parallel",
    "rope_positions": "first in the forward pass: output of embedding.word_embeddings (Vocab",
    "expert_bias": "buffer decoder.layers.mlp.router.expert_bias[0], step 1, rank 0 (dp=0): off by 1",
}

of_0_16 = pytest.mark.skipif(not version("megatron-core").startswith("0.16."), reason="0.19 has no such fault")
since_0_19 = pytest.mark.skipif(
    version("megatron-core").startswith("0.16."), reason="the program or its change does not fit 0.16"
)
PROGRAMS = [pytest.param(name, marks=of_0_16 if name == "sequence_loss" else ()) for name in LAYOUTS]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_faulty_program_differs_and_its_report_names_the_fault(name: str) -> None:
    assert FAULTS[name] in "\n".join(report(name))


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("label_smoothing", ["tp=2"]),
        ("attention_sinks", ["tp=2"]),
        pytest.param("auxiliary_loss", ["tp=2,sp", "cp=2"], marks=of_0_16),
        pytest.param("sequence_loss", ["tp=2,sp", "cp=2"], marks=of_0_16),
    ],
)
def test_the_cure_of_a_fault_of_megatron_itself_trains_the_same_model(name: str, layouts: list[str]) -> None:
    program = load_program(f"examples/verify/gallery.py:cured_{name}").smaller(num_layers=1, micro_batches=2)
    verifier = Verifier(program, steps=1)
    assert [verifier.verify(layout).equal for layout in layouts] == [True] * len(layouts)


@pytest.mark.parametrize(
    ("name", "layout", "difference"),
    [
        ("gathered_logits", "tp=2", "lm loss"),
        pytest.param("mtp_recomputation", "tp=2,dp=2", "mtp.layers.0.", marks=since_0_19),
        ("recomputation", "tp=2,dp=2", "decoder.layers."),
        pytest.param("scattered_mask", "tp=2,dp=2,sp", "mlp.router.weight", marks=since_0_19),
        pytest.param("cross_attention", "tp=2,dp=2", "cross_attention.linear_q.weight", marks=since_0_19),
        pytest.param("scattered_embeddings", "tp=2,dp=2,sp", "lm loss", marks=since_0_19),
        ("counted_on_each_rank", "cp=2", "gradient"),
        pytest.param("out_norm", "tp=2", "self_attention.out_norm.weight", marks=since_0_19),
    ],
)
def test_a_finding_differs_and_a_change_repairs_it(name: str, layout: str, difference: str) -> None:
    from examples.verify.findings import FINDINGS

    _, program, _, change = FINDINGS[name]
    layers = {} if name == "out_norm" else {"num_layers": 1}  # its pattern has the layers
    verifier = Verifier(program.smaller(micro_batches=2, **layers), steps=1)
    verifier.locates = False
    outcome = verifier.verify(layout)
    assert outcome.failure is None
    assert any(difference in f"{found.kind} {found.name}" for found in outcome.differences)
    with change() if change else contextlib.nullcontext():
        assert verifier.verify(layout).equal is bool(change)
