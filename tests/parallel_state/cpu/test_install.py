"""``cpu.install``: when it patches a process, when it changes nothing, and when it raises."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from parallel_state import cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def run_fresh(program: str, *paths: Path) -> str:
    """Run ``program`` in a new interpreter, with ``paths`` first in ``sys.path``, and return its output."""
    start = f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_install_returns_true_on_every_call() -> None:
    assert cpu.install() is True
    assert cpu.install() is True


@pytest.mark.processes
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


@pytest.mark.processes
def test_install_after_an_import_of_megatron_is_rejected() -> None:
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


@pytest.mark.processes
def test_a_transformer_engine_that_fails_on_import_does_not_break_megatron(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise RuntimeError('no GPU')")
    program = """
        from parallel_state import cpu
        cpu.install()
        from megatron.core.models.gpt import gpt_layer_specs
        print(gpt_layer_specs.HAVE_TE)
    """
    assert run_fresh(program, tmp_path) == "False"


@pytest.mark.processes
def test_packages_that_are_named_are_rewritten_others_are_not_and_imported_ones_are_rejected(tmp_path: Path) -> None:
    for name in ("team", "team_b", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "model.py").write_text("DEVICE = 'cuda'")
    program = """
        import other.model
        from parallel_state import cpu
        from parallel_state.errors import ParallelStateError
        cpu.install(packages=["team"])
        cpu.install(packages=["team_b"])
        import team.model, team_b.model
        print(team.model.DEVICE, team_b.model.DEVICE, other.model.DEVICE)
        try:
            cpu.install(packages=["other"])
        except ParallelStateError as error:
            print(error.module)
    """
    assert run_fresh(program, tmp_path).split() == ["cpu", "cpu", "cuda", "other"]


@pytest.mark.processes
def test_megatron_training_starts_without_cuda_and_nvcc(tmp_path: Path) -> None:
    for folder in ("training", "legacy/fused_kernels"):
        (tmp_path / "megatron" / folder).mkdir(parents=True)
    (tmp_path / "megatron/legacy/fused_kernels/__init__.py").write_text("def load(args): raise OSError('nvcc')")
    (tmp_path / "megatron/training/__init__.py").write_text("from .initialize import initialize_megatron")
    (tmp_path / "megatron/training/initialize.py").write_text(
        textwrap.dedent("""
            import torch
            from megatron.core.transformer.custom_layers.batch_invariant_kernels import enable_batch_invariant_mode
            from megatron.legacy import fused_kernels

            def initialize_megatron(provider=None, defaults={}, ignore_unknown=False, allow_no_cuda=False):
                assert allow_no_cuda
                fused_kernels.load(None)
                return torch.cuda.get_device_properties(torch.device("cuda:0")).major
        """)
    )
    program = """
        from parallel_state import cpu
        cpu.install()
        from megatron.training import initialize_megatron
        print(initialize_megatron(), initialize_megatron(None, {}, True, False))
    """
    assert run_fresh(program, tmp_path) == "0 0"
