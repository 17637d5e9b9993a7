"""Megatron-Core runs on a CPU: what ``torch.cuda`` answers there, and when nothing at all is changed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from parallel_state import cpu
from parallel_state.cpu import adam as cpu_adam
from parallel_state.errors import ParallelStateError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")

assert cpu.install() or torch.cuda.is_available()


def run_fresh(program: str, *paths: Path) -> str:
    """What ``program`` prints in a fresh interpreter, with ``paths`` before all others to import from."""
    start = f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_install_is_true_again_on_every_call() -> None:
    assert cpu.install() is True
    assert cpu.install() is True


def test_the_current_device_is_the_cpu() -> None:
    torch.cuda.set_device(0)
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.zeros(1, device=torch.cuda.current_device()).device == torch.device("cpu")
    assert torch.cuda.device_count() == 1
    assert torch.cuda.is_available() is False


def test_the_device_random_state_is_the_cpus() -> None:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), first)
    assert torch.cuda.default_generators[0] is torch.default_generator
    assert torch.equal(torch.cuda.random.get_rng_state(), torch.get_rng_state())


def test_streams_have_always_finished() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream())
        event = stream.record_event()
    stream.wait_event(event)
    stream.synchronize()
    torch.cuda.synchronize()
    assert stream.query() and event.query()
    assert stream == torch.cuda.default_stream()
    assert torch.cuda.is_current_stream_capturing() is False


def test_events_tell_the_milliseconds_between_them() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.ones(300, 300) @ torch.ones(300, 300)
    end.record()
    assert 0 < start.elapsed_time(end) < 10_000


def test_memory_statistics_are_zero() -> None:
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    assert [getattr(torch.cuda, name)() for name in names] == [0, 0, 0, 0]
    assert torch.cuda.memory_stats() == {}
    assert torch.cuda.mem_get_info() == (1 << 34, 1 << 34)


def test_moving_to_the_device_and_pinning_give_the_same_object() -> None:
    tensor, module = torch.ones(2), torch.nn.Linear(2, 2)
    assert tensor.cuda(non_blocking=True) is tensor
    assert tensor.pin_memory() is tensor
    assert tensor.record_stream(torch.cuda.current_stream()) is None
    assert module.cuda(0) is module


def test_the_random_tracker_keeps_a_stream_of_its_own() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("own", 11)
    torch.manual_seed(3)
    expected_outside = torch.rand(2)
    torch.manual_seed(3)
    with tracker.fork("own"):
        first = torch.rand(2)
    assert torch.equal(torch.rand(2), expected_outside)
    with tracker.fork("own"):
        second = torch.rand(2)
    torch.manual_seed(11)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(2), torch.rand(2)]))


def test_splits_for_all_to_all_are_numpy_where_megatron_asks_for_it() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    splits = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([2, 3]), as_numpy=True)
    assert type(splits).__name__ == "ndarray" and splits.tolist() == [2, 3]
    assert token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None


@pytest.mark.parametrize("decoupled", [True, False])
def test_fused_adam_takes_the_steps_of_torchs(decoupled: bool) -> None:
    ours, theirs = (torch.nn.Parameter(torch.arange(6.0) - 2) for _ in range(2))
    fused = cpu_adam.FusedAdam([ours], lr=0.1, weight_decay=0.1, adam_w_mode=decoupled)
    plain = (torch.optim.AdamW if decoupled else torch.optim.Adam)([theirs], lr=0.1, weight_decay=0.1)
    for _ in range(5):
        for parameter, optimizer in ((ours, fused), (theirs, plain)):
            parameter.grad = parameter.detach() ** 2 + 1
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
    assert fused.param_groups[0]["step"] == 5
    assert set(fused.state[ours]) == {"exp_avg", "exp_avg_sq"}


def test_megatrons_optimizer_is_of_the_fused_kind() -> None:
    import megatron.core.optimizer
    from megatron.core.optimizer import distrib_optimizer

    assert megatron.core.optimizer.Adam is distrib_optimizer.Adam is cpu_adam.FusedAdam
    assert distrib_optimizer.HAVE_APEX_OR_TE and not megatron.core.optimizer.USING_PYTORCH_OPTIMIZER


def test_with_a_gpu_nothing_is_changed() -> None:
    program = """
        import torch, torch.distributed as dist
        torch.cuda.is_available = lambda: True
        from parallel_state import cpu
        watched = lambda: [dict(vars(torch.cuda)), dict(vars(dist)), torch.Tensor.cuda, torch.Tensor.pin_memory,
                           torch.nn.Module.cuda, list(sys.meta_path), sys.modules.get("transformer_engine", "absent")]
        before = watched()
        print(cpu.install(), watched() == before)
    """
    assert run_fresh(program) == "False True"


def test_install_is_refused_once_megatron_is_imported() -> None:
    program = """
        import megatron.core
        from parallel_state import cpu
        from parallel_state.errors import ParallelStateError
        try:
            cpu.install()
        except ParallelStateError as error:
            print(error.module, "|", error)
    """
    assert run_fresh(program).startswith("megatron.core | megatron.core was imported before")
    assert issubclass(ParallelStateError, Exception)


def test_a_transformer_engine_that_cannot_run_here_does_not_stop_megatron(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise RuntimeError('no GPU')")
    program = """
        from parallel_state import cpu
        cpu.install()
        from megatron.core.models.gpt import gpt_layer_specs
        print(gpt_layer_specs.HAVE_TE)
    """
    assert run_fresh(program, tmp_path) == "False"
