"""A missing package is reported with the command that installs it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest

from parallel_state.errors import MControllerError, MissingPackageError
from parallel_state.requirements import require


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


def test_what_is_installed_passes() -> None:
    require("torch", "megatron.core")


def test_a_missing_package_is_named_with_the_command_that_installs_it(without_tensordict: None) -> None:
    command = r"tensordict is not installed: run pip install 'mcontroller\[cpu\]'"
    with pytest.raises(MissingPackageError, match=command) as caught:
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
    with pytest.raises(MissingPackageError, match=r"tensordict.* is not installed"):
        load("Name")
