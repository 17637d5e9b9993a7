"""A missing package is reported with the command that installs it."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from parallel_state.errors import BrokenPackageError, MControllerError, MissingPackageError
from parallel_state.requirements import naming_extras, require, require_importable


class Absent(importlib.abc.MetaPathFinder):
    """Makes the import of one top-level package fail as if it were not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


@pytest.fixture
def without_tensordict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensordict is not there, and what imports it has not been imported yet."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensordict"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent("tensordict"), *sys.meta_path])


def test_a_missing_package_is_named_with_the_command_that_installs_it(without_tensordict: None) -> None:
    with pytest.raises(MissingPackageError) as caught:
        require("torch", "tensordict")
    assert (caught.value.name, caught.value.extra) == ("tensordict", "torch")
    assert isinstance(caught.value, MControllerError) and isinstance(caught.value, ModuleNotFoundError)


def test_a_public_name_that_needs_a_missing_package_reports_it(
    without_tensordict: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "package", ModuleType("package"))
    monkeypatch.setattr(
        "parallel_state.lazy._type_checking_imports", lambda package: {"Name": ("tensordict.nn", "Name")}
    )
    from parallel_state.lazy import lazy_exports

    load, _, _ = lazy_exports("package")
    with pytest.raises(MissingPackageError) as caught:
        load("Name")
    assert caught.value.extra == "torch"


def test_a_package_that_no_extra_installs_is_reported_as_python_does() -> None:
    with pytest.raises(ModuleNotFoundError) as caught, naming_extras():
        importlib.import_module("no_such_package")
    assert not isinstance(caught.value, MissingPackageError)


@pytest.mark.parametrize("raised", ["ImportError('undefined symbol: a\\nb')", "RuntimeError('no CUDA\\ndriver')"])
def test_a_package_that_cannot_be_imported_is_reported_in_one_line(
    raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_engine").mkdir()
    (tmp_path / "broken_engine" / "__init__.py").write_text(f"raise {raised}")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BrokenPackageError) as caught:
        require_importable("broken_engine")
    assert caught.value.name == "broken_engine" and "\n" not in str(caught.value)
    assert isinstance(caught.value, MControllerError) and isinstance(caught.value, ImportError)


def test_a_package_that_is_absent_or_hidden_needs_no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hidden_engine", None)
    require_importable("hidden_engine")
    require_importable("absent_engine")
    assert "absent_engine" not in sys.modules
