"""Patches of Megatron for runs without Transformer Engine."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
from megatron.core import utils
from megatron.core.tensor_parallel import CheckpointWithoutOutput, random


@pytest.mark.skipif(
    not version("megatron-core").startswith("0.16."), reason="later releases restore tensors with a compiled extension"
)
def test_an_activation_is_computed_again_without_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"):  # the test initializes them
        monkeypatch.setattr(random, name, getattr(random, name))
    rows = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(4, 2)
    expected = torch.autograd.grad((rows.exp() @ weight).sin().sum(), rows)[0]
    checkpoint = CheckpointWithoutOutput()
    activated = checkpoint.checkpoint(torch.exp, rows)
    output = activated @ weight.requires_grad_()
    checkpoint.discard_output_and_register_recompute(output)
    assert activated.untyped_storage().nbytes() == 0
    output.sin().sum().backward()
    torch.testing.assert_close(rows.grad, expected)


@pytest.mark.skipif(utils.get_te_version() is not None, reason="needs an environment without Transformer Engine")
def test_no_version_of_an_engine_that_is_not_installed_is_new_enough() -> None:
    assert utils.is_te_min_version("1.0") is False
    assert utils.is_te_min_version("1.0", check_equality=False) is False
