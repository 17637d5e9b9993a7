"""The import hook that rewrites Megatron's sources, and its bytecode cache."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from parallel_state import cpu
from parallel_state.cpu import literals

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")

cpu.install()


def evaluated(expression: str) -> object:
    namespace: dict[str, object] = {"keywords": lambda **kwargs: kwargs, "device": lambda *args: args}
    exec(compile(literals.rewrite(f"value = {expression}".encode()), "<test>", "exec"), namespace)
    return namespace["value"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("'cuda'", "cpu"),
        ("'cuda:3'", "cpu"),
        ("'torch.cuda.FloatTensor'", "torch.FloatTensor"),
        ("'torch.cuda.BFloat16Tensor, '", "torch.BFloat16Tensor, "),
        ("keywords(pin_memory=True, device='cuda')", {"pin_memory": False, "device": "cpu"}),
        ("keywords(pin_memory=False)", {"pin_memory": False}),
        ("f'cuda:{1 + 1}'", "cpu"),
        ("'cuda:%d' % 3", "cpu"),
        ("device('cuda', 3)", ("cpu",)),
    ],
)
def test_devices_become_the_cpu(source: str, expected: object) -> None:
    assert evaluated(source) == expected


@pytest.mark.parametrize("source", ["'cuda_graph'", "'only cuda devices'", "f'cuda'", "b'cuda'", "'torch.cuda.Stream'"])
def test_other_literals_are_unchanged(source: str) -> None:
    assert evaluated(source) == eval(source)


def test_megatron_has_no_cuda_tensor_types_left() -> None:
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler

    assert ConstantGradScaler(2.0).scale.device == torch.device("cpu")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The source of a module of a package that the hook covers."""
    source = tmp_path / "mbridge" / "device.py"
    source.parent.mkdir()
    (source.parent / "__init__.py").touch()
    source.write_text("DEVICE = 'cuda'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    yield source
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mbridge"]:
        del sys.modules[name]


def imported_device() -> str:
    forget()
    importlib.invalidate_caches()
    return str(importlib.import_module("mbridge.device").DEVICE)


def test_the_second_import_reads_the_cache(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert imported_device() == "cpu"
    monkeypatch.setattr(literals, "rewrite", None)  # a second compilation would call it
    assert imported_device() == "cpu"


def test_a_changed_source_is_compiled_again(package: Path) -> None:
    imported_device()
    package.write_text("DEVICE = 'cuda:1', 'changed'\n")
    assert imported_device() == "('cpu', 'changed')"


def test_a_module_that_cannot_be_cached_is_still_imported(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", os.devnull)
    assert imported_device() == "cpu"


@pytest.mark.processes
def test_processes_that_write_the_cache_at_the_same_time_read_it_whole(package: Path) -> None:
    package.write_text("DEVICE = 'cuda'\nPADDING = '" + "x" * 1_000_000 + "'\n")
    children = []
    for _ in range(6):
        child = os.fork()
        if child == 0:
            os._exit(0 if imported_device() == "cpu" else 1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 6
    assert imported_device() == "cpu"
    assert [path.suffix for path in (package.parent / "__pycache__").glob("device*")] == [".pyc"]
