"""The patches of Megatron's own functions."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from parallel_state import cpu
from parallel_state.patches import adam
from parallel_state.simulated import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")

cpu.install()


def test_the_random_tracker_has_a_separate_stream() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("separate", 11)
    torch.manual_seed(3)
    expected_outside = torch.rand(2)
    torch.manual_seed(3)
    with tracker.fork("separate"):
        first = torch.rand(2)
    assert torch.equal(torch.rand(2), expected_outside)
    with tracker.fork("separate"):
        second = torch.rand(2)
    torch.manual_seed(11)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(2), torch.rand(2)]))


def test_splits_for_all_to_all_are_converted_to_numpy_on_request() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    splits = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([2, 3]), as_numpy=True)
    assert type(splits).__name__ == "ndarray" and splits.tolist() == [2, 3]
    assert token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None


@pytest.mark.simulated
def test_a_buffer_of_fsdp_has_the_current_stream() -> None:
    dbuffer = pytest.importorskip("megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.dbuffer")

    def create() -> None:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        buffer = dbuffer.DBuffer(mesh, [dbuffer.Replicate()], [torch.Size([2])], torch.float32, "cpu")
        assert buffer.allocation_stream == torch.cuda.current_stream()

    run_ranks(1, create)


def test_megatron_uses_the_fused_adam() -> None:
    import megatron.core.optimizer
    from megatron.core.optimizer import distrib_optimizer

    assert megatron.core.optimizer.Adam is distrib_optimizer.Adam is adam.FusedAdam
    assert distrib_optimizer.HAVE_APEX_OR_TE and not megatron.core.optimizer.USING_PYTORCH_OPTIMIZER
