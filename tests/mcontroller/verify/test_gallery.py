"""The gallery of faulty programs: each differs in its layout, and the report names what is wrong."""

from __future__ import annotations

import pytest

from mcontroller.verify import Verifier
from mcontroller.verify.program import load_program
from tests.mcontroller.verify.programs import EXAMPLES

pytestmark = pytest.mark.simulated

REPORTS = {
    "label_smoothing": ("tp=2", "gradient of the output of GPTModel (GPTModel, "),
    "gathered_logits": ("tp=2", "loss lm loss, step 1, rank 0 (tp=0): off by 0.17; 4.8"),
    "padding_mask": ("tp=2,dp=2,sp", "computed by decoder.layers.1.mlp.router (TopKRouter, "),
    "attention_sinks": ("tp=2", "mark decoder.layers.self_attention.core_attention.softmax_offset[0], step 1"),
    "auxiliary_loss": ("mbs=2", "gradient decoder.layers.mlp.router.weight["),
    "tokens_over_dp": ("cp=2", "gradient of the output of GPTModel (GPTModel, "),
    "counted_on_each_rank": ("cp=2", "gradient of the output of GPTModel (GPTModel, "),
    "tied_embeddings": ("pp=2", "the sum over pp is that of one process: a reduction over pp is missing"),
    "norm_weights": ("tp=2,sp", "a reduction over tp is missing; it is not marked sequence_parallel"),
    "rope_positions": ("cp=2", "first in the forward pass: output of embedding.word_embeddings (Vocab"),
    "expert_bias": ("dp=2", "buffer decoder.layers.mlp.router.expert_bias[0], step 1, rank 0 (dp=0): off by 1"),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_faulty_program_differs_and_its_report_names_the_fault(name: str) -> None:
    layout, text = REPORTS[name]
    program = load_program(f"{EXAMPLES / 'gallery.py'}:{name}").smaller(num_layers=2)
    outcome = Verifier(program, steps=1).verify(layout)
    assert not outcome.equal and outcome.failure is None
    assert text in "\n".join(outcome.lines())
