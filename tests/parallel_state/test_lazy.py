"""Packages whose ``__init__`` imports its public names on first use."""

from __future__ import annotations

import importlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

INIT = """
from typing import TYPE_CHECKING
from parallel_state.lazy import lazy_exports
from pathlib import Path as Path
if TYPE_CHECKING:
    from lazypkg.light import Feather as Feather
    from lazypkg.heavy import Anvil as Anvil, anvil_weight as weight
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
"""
FILES = {
    "lazypkg/__init__.py": INIT,
    "lazypkg/light.py": "class Feather: pass\n",
    "lazypkg/heavy.py": "class Anvil: pass\ndef anvil_weight(): return 50\n",
}


@pytest.fixture(params=["folder", "zip archive"])
def package(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    if request.param == "folder":
        (tmp_path / "lazypkg").mkdir()
        for name, source in FILES.items():
            (tmp_path / name).write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
    else:
        with zipfile.ZipFile(tmp_path / "lazypkg.zip", "w") as archive:
            for name, source in FILES.items():
                archive.writestr(name, source)
        monkeypatch.syspath_prepend(tmp_path / "lazypkg.zip")
    yield importlib.import_module("lazypkg")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazypkg"]:
        del sys.modules[name]


def test_a_module_is_imported_when_its_name_is_first_used(package: ModuleType) -> None:
    assert not {"lazypkg.light", "lazypkg.heavy"} & set(sys.modules)
    feather = package.Feather
    assert feather is sys.modules["lazypkg.light"].Feather
    assert "lazypkg.heavy" not in sys.modules


def test_a_name_is_looked_up_once(package: ModuleType) -> None:
    anvil = package.Anvil
    assert vars(package)["Anvil"] is anvil is package.Anvil


def test_a_name_can_differ_from_the_name_in_its_module(package: ModuleType) -> None:
    assert package.weight() == 50
    assert "anvil_weight" not in package.__all__


def test_all_and_dir_are_the_exported_names(package: ModuleType) -> None:
    assert package.__all__ == dir(package) == ["Anvil", "Feather", "weight"]
    assert "lazypkg.light" not in sys.modules


def test_an_unknown_name_is_an_error_for_which_python_suggests_near_matches(package: ModuleType) -> None:
    with pytest.raises(AttributeError) as caught:
        _ = package.Fether
    assert (caught.value.name, caught.value.obj) == ("Fether", package)
    with pytest.raises(ImportError):
        exec("from lazypkg import Fether")


@pytest.mark.parametrize("name", ["parallel_state", "mcontroller", "trainer", "mcontroller.ray", "workers"])
def test_every_name_that_a_package_exports_exists(name: str) -> None:
    package = importlib.import_module(name)
    assert len(package.__all__) > 2
    for exported in package.__all__:
        assert getattr(package, exported) is not None
