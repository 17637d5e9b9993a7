"""The structure of the packages: layers, circles, private names, shared names, and modules without torch or Ray.

The rules read the source (``tests/layers.py``) and import nothing. Below them, each rule is tested on small trees with
planted violations.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.layers import RULES, SourceTree, strongly_connected

ROOT = Path(__file__).parents[1]

SHARED_FUNCTIONS = {
    "add_arguments": "each verb of the command line defines it",
    "run": "each verb of the command line defines it",
}
"""Public functions that may share a name, with the reason."""

PURE = (
    "parallel_state",
    "parallel_state.describe",
    "parallel_state.infos",
    "parallel_state.layout",
    "parallel_state.topology",
    "mcontroller",
    "mcontroller.dispatch.modes",
    "mcontroller.errors",
    "mcontroller.partition",
    "trainer.report.verb",
)
"""Modules that load neither torch nor Ray."""

LIGHT = ("trainer", "mcontroller.testing", "mcontroller.ray.worker_group")
"""Modules that load neither transformers nor Megatron."""

MakeTree = Callable[..., SourceTree]


@pytest.fixture(scope="module")
def tree() -> SourceTree:
    return SourceTree(ROOT)


@pytest.mark.parametrize("rule", RULES)
def test_there_are_no(tree: SourceTree, rule: str) -> None:
    violations = RULES[rule](tree)
    if rule == "public functions that share a name":
        violations = [line for line in violations if line.split()[0] not in SHARED_FUNCTIONS]
    assert not violations, "\n".join(["", *violations])


def test_names_of_tests_are_shorter_than_75_characters() -> None:
    named = re.compile(r"^ *(?:async )?def (test_\w{70,})\(", re.MULTILINE)
    found = [f"{path}: {name}" for path in (ROOT / "tests").rglob("*.py") for name in named.findall(path.read_text())]
    assert not found, "\n".join(["", *found])


def test_functions_that_may_share_a_name_still_do(tree: SourceTree) -> None:
    shared = {line.split()[0] for line in tree.shared_functions()}
    assert SHARED_FUNCTIONS.keys() - shared == set(), "remove these from SHARED_FUNCTIONS"


def test_the_tree_covers_all_packages(tree: SourceTree) -> None:
    assert {file.name.partition(".")[0] for file in tree.of("parallel_state", "mcontroller", "workers")} == {
        "parallel_state",
        "mcontroller",
        "workers",
    }
    assert "parallel_state.layout" in tree.edges["parallel_state.topology"]
    assert "parallel_state.layout" in tree.edges["mcontroller.group"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [(PURE, {"torch", "ray"}), (LIGHT, {"transformers", "megatron"})],
    ids=["pure modules load neither torch nor Ray", "the controller loads neither transformers nor Megatron"],
)
def test_imports(modules: tuple[str, ...], forbidden: set[str]) -> None:
    program = f"""
import importlib, sys
for name in {modules}:
    importlib.import_module(name)
    loaded = {forbidden} & set(sys.modules)
    if loaded:
        sys.exit(f"{{name}} loads {{', '.join(sorted(loaded))}}")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The rules themselves, on small trees.


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    def make(**sources: str) -> SourceTree:
        """A tree of files; ``mcontroller__ray__pool`` names mcontroller/ray/pool.py."""
        for name, source in sources.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        for folder in [path for path in tmp_path.rglob("*") if path.is_dir()]:
            (folder / "__init__.py").touch()
        return SourceTree(tmp_path)

    return make


def test_an_import_of_a_higher_package_is_found_wherever_it_is(make_tree: MakeTree) -> None:
    tree = make_tree(
        parallel_state__a="def f():\n    from mcontroller import b\n",
        parallel_state__d="import importlib\nimportlib.import_module('workers.c')\n",
        mcontroller__b="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from workers.c import C\n",
        workers__c="import mcontroller.b\nimport tests.helpers\nclass C: pass\n",
        tests__helpers="",
    )
    assert tree.upward_imports() == [
        "parallel_state/a.py:2 imports mcontroller.b",
        "parallel_state/d.py:2 imports workers.c",
        "mcontroller/b.py:3 imports workers.c",
        "workers/c.py:2 imports tests.helpers",
    ]


def test_a_circle_through_functions_and_type_checking_is_found(make_tree: MakeTree) -> None:
    tree = make_tree(
        workers__a="from workers.b import f\n",
        workers__b="def f():\n    from . import c\n",
        workers__c="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import x\n",
        workers__d="from workers import a\n",
    )
    (circle,) = tree.module_circles()
    assert circle == (
        "workers.a and workers.b and workers.c: workers.a:1 imports workers.b; workers.b:2 imports workers.c; "
        "workers.c:3 imports workers.a"
    )


def test_lazy_exports_are_no_circle_and_imports_of_them_are_resolved(make_tree: MakeTree, tmp_path: Path) -> None:
    make_tree(
        mcontroller__a="from mcontroller import B\nclass A: pass\n",
        mcontroller__b="class B: pass\n",
    )
    (tmp_path / "mcontroller" / "__init__.py").write_text(
        "if TYPE_CHECKING:\n    from mcontroller.a import A as A\n    from mcontroller.b import B as B\n"
    )
    tree = SourceTree(tmp_path)
    assert tree.module_circles() == []
    assert list(tree.edges["mcontroller.a"]) == ["mcontroller.b"]
    (tmp_path / "mcontroller" / "b.py").write_text("from mcontroller import A\nclass B: pass\n")
    assert len(SourceTree(tmp_path).module_circles()) == 1


def test_folders_that_import_each_other_are_found_without_a_circle_of_modules(make_tree: MakeTree) -> None:
    tree = make_tree(
        workers__model__build="from workers.weights import load\n",
        workers__model__head="",
        workers__weights__load="",
        workers__weights__hf__names="from workers.model import head\n",
    )
    assert tree.module_circles() == []
    assert tree.folder_circles() == [
        "in workers: workers.model and workers.weights: workers.model.build:1 imports workers.weights.load; "
        "workers.weights.hf.names:1 imports workers.model.head"
    ]


def test_a_subfolder_and_its_neighbours_are_a_circle_if_they_import_each_other(make_tree: MakeTree) -> None:
    sources = {
        "mcontroller__errors": "",
        "mcontroller__ray__pool": "from mcontroller.errors import x\n",
        "mcontroller__group": "from mcontroller.ray.pool import x\n",
    }
    assert make_tree(**sources).folder_circles() == []
    assert len(make_tree(**sources, mcontroller__ray__host="import mcontroller.group\n").folder_circles()) == 1


def test_private_names_of_other_files_are_found(make_tree: MakeTree) -> None:
    tree = make_tree(
        mcontroller__a=(
            "_LIMIT = 3\n"
            "class A:\n"
            "    __slots__ = ('_s',)\n"
            "    def __init__(self):\n"
            "        self._batch = 1\n"
            "    def _with(self, other):\n"
            "        return other._batch\n"
        ),
        workers__b=(
            "import os\n"
            "from mcontroller import a\n"
            "from mcontroller.a import _LIMIT\n"
            "a._LIMIT\n"
            "def f(batches, part):\n"
            "    batches[0]._batch\n"
            "    getattr(part, '_s')\n"
            "    part.rows()._with()\n"
            "    os._exit(0)\n"
            "    part._replace(x=1)\n"
            "    part._not_ours\n"
        ),
        workers__c="from mcontroller.a import A\nclass B(A):\n    def f(self, x):\n        return self._batch\n",
    )
    assert tree.private_uses() == [
        "workers/b.py:3 uses _LIMIT of mcontroller.a",
        "workers/b.py:4 uses _LIMIT of mcontroller.a",
        "workers/b.py:6 uses batches[0]._batch, which mcontroller.a defines",
        "workers/b.py:7 uses part._s, which mcontroller.a defines",
        "workers/b.py:8 uses part.rows()._with, which mcontroller.a defines",
    ]


def test_types_and_functions_of_one_name_are_found(make_tree: MakeTree) -> None:
    tree = make_tree(
        mcontroller__a="class Plan: pass\nclass _P: pass\nShard = range | tuple\nWIDTH = a.b\ndef size(): ...\n",
        workers__b="class Plan: pass\nclass _P: pass\nclass Shard: pass\nWIDTH = a.b\ndef size(): ...\ndef _s(): ...\n",
    )
    assert tree.shared_types() == [
        "Plan is defined in mcontroller.a, workers.b",
        "Shard is defined in mcontroller.a, workers.b",
    ]
    assert tree.shared_functions() == ["size is defined in mcontroller.a, workers.b"]


def test_strongly_connected_groups() -> None:
    graph = {"a": "b", "b": "c", "c": "ad", "d": "e", "e": "d", "f": "a"}
    assert strongly_connected(graph) == [["a", "b", "c"], ["d", "e"]]
