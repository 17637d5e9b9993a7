"""The script that counts which planted faults verify finds, on the smallest of its modules."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from examples.verify import mutations

pytestmark = pytest.mark.simulated


def test_faults_of_the_loss_are_found_and_located(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.modules["megatron.core.tensor_parallel.cross_entropy"]._VocabParallelCrossEntropy.forward.__code__
    with mock.patch.object(sys, "argv", ["mutations", "--files", "cross_entropy"]):
        mutations.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("{'found': 5, 'equivalent': 1} {'located': 5} ")
    assert sum("[located] first in the forward pass: output of GPTModel" in line for line in lines) == 5
    after = sys.modules["megatron.core.tensor_parallel.cross_entropy"]._VocabParallelCrossEntropy.forward.__code__
    assert after is before


def test_every_place_is_changed_in_two_ways() -> None:
    found = list(mutations.mutations("megatron.core.distributed.finalize_model_grads"))
    assert {each.how for each in found} == {"remove", "double"} and len(found) == 12
    text = "_allreduce_embedding_grad: remove collective torch.distributed.all_reduce(grad"
    assert any(text in str(each) for each in found)
