"""The script that counts which planted faults verify finds, on the smallest of its modules."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
from megatron.core.tensor_parallel import cross_entropy

from examples.verify import mutations

pytestmark = pytest.mark.simulated


def test_faults_of_the_loss_are_found_and_located(capsys: pytest.CaptureFixture[str]) -> None:
    before = cross_entropy._VocabParallelCrossEntropy.forward.__code__
    with mock.patch.object(sys, "argv", ["mutations", "--files", "cross_entropy"]):
        mutations.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("{'found': 6, 'equivalent': 3} {'forward': 6} ")
    assert sum("[forward] first in the forward pass: output of GPTModel" in line for line in lines) == 6
    assert cross_entropy._VocabParallelCrossEntropy.forward.__code__ is before


def test_every_place_is_changed_in_three_ways() -> None:
    actual = list(mutations.mutations("megatron.core.distributed.finalize_model_grads"))
    assert {mutation.how for mutation in actual} == {"remove", "double", "move"} and len(actual) > 12
    text = "_allreduce_embedding_grad: remove collective torch.distributed.all_reduce(grad"
    assert any(text in str(mutation) for mutation in actual)
