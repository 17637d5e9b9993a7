"""The Adam that Megatron uses on a CPU, against torch's."""

from __future__ import annotations

import pytest
import torch

from parallel_state.patches import adam

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_are_those_of_torchs_adam(decoupled: bool) -> None:
    ours, theirs = (torch.nn.Parameter(torch.arange(6.0) - 2) for _ in range(2))
    fused = adam.FusedAdam([ours], lr=0.1, weight_decay=0.1, adam_w_mode=decoupled)
    plain = (torch.optim.AdamW if decoupled else torch.optim.Adam)([theirs], lr=0.1, weight_decay=0.1)
    for _ in range(5):
        for parameter, optimizer in ((ours, fused), (theirs, plain)):
            parameter.grad = parameter.detach() ** 2 + 1
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
    assert fused.param_groups[0]["step"] == 5
    assert set(fused.state[ours]) == {"exp_avg", "exp_avg_sq"}
