"""The gallery of faulty programs: each differs in its layout, and its report, which the docs have, names the fault."""

from __future__ import annotations

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


def test_the_change_of_an_open_request_repairs_what_it_describes() -> None:
    from examples.verify.findings import FINDINGS

    _, program, _, change = FINDINGS["counted_on_each_rank"]
    verifier = Verifier(program.smaller(num_layers=1, micro_batches=2), steps=1)
    assert not verifier.verify("cp=2").equal
    with change():
        assert verifier.verify("cp=2").equal
