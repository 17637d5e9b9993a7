"""The command line finds its verbs, lists them quickly, and helps with a wrong one."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcontroller.cli import main as command_line
from mcontroller.cli.main import CONFIGS, VERBS, entry_points, main, summary_of

CHECKOUT = Path(__file__).parents[3]


def test_verbs_are_listed_with_the_first_line_of_their_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    for name, text in (
        ("topology", "Draw the grid of ranks of a layout, and what a dispatch mode does on it."),
        ("help", "Explain"),
    ):
        assert re.search(rf"^  {name} +{re.escape(text)}", printed, re.MULTILINE)


@pytest.mark.processes
def test_listing_verbs_imports_neither_torch_nor_ray() -> None:
    program = (
        "import sys; from mcontroller.cli.main import main; main([]);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, check=False).returncode == 0


def test_an_unknown_verb_is_rejected_with_near_matches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topologie"]) == 2
    assert capsys.readouterr().err == "mcontroller: there is no verb 'topologie'; did you mean topology?\n"


def test_errors_of_a_verb_are_one_line_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--world-size", "10", "--tp", "4"]) == 1
    assert capsys.readouterr().err.startswith("mcontroller topology: LayoutError: tp 4 x pp 1 x cp 1 = 4 does not")


def test_a_checkout_without_metadata_has_the_verbs_of_its_pyproject(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ())
    assert {"help", "topology"} <= set(entry_points(VERBS))
    assert entry_points(CONFIGS)["run"].value == "trainer.run.config:RunConfig"


def test_a_checkout_replaces_the_old_metadata_of_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    other = EntryPoint("extra", "extra.verb", VERBS)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: (Owned("old", "gone.verb", VERBS), other))
    names = set(entry_points(VERBS))
    assert "extra" in names and "old" not in names


def test_an_installed_package_has_the_verbs_of_its_metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: (Owned("train", "some.verb", VERBS),))
    assert set(entry_points(VERBS, tmp_path)) == {"train"}
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "someone-elses"\n')
    assert set(entry_points(VERBS, tmp_path)) == {"train"}


def test_a_verb_of_a_package_that_is_not_there_is_listed_as_not_available() -> None:
    assert summary_of("no_such_package.verb") == "(not available: there is no module no_such_package.verb)"
    assert summary_of("mcontroller.cli.no_such_verb").startswith("(not available")
    assert "not available" in command_line.list_of({"x": EntryPoint("x", "no_such_package.verb", VERBS)})


class Owned(EntryPoint):
    """An entry point of the distribution ``mcontroller``."""

    @property
    def dist(self):  # type: ignore[no-untyped-def, override]
        return type("Distribution", (), {"name": "mcontroller"})


@pytest.mark.processes
def test_ray_does_not_print_the_death_of_a_worker_which_the_program_reports() -> None:
    program = (
        "from mcontroller.cli.main import main; main(['topology', '--world-size', '1'])\n"
        "from ray._private.worker import print_to_stdstream\n"
        "died = 'A worker died or was killed while executing a task by an unexpected system error.'\n"
        "for line in (died, 'Another'):\n"
        "    print_to_stdstream({'lines': [line], 'pid': 'raylet', 'is_err': False}, False)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0 and "Another" in done.stdout and "A worker died" not in done.stdout


def test_a_file_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    verb = SimpleNamespace(
        add_arguments=lambda parser: None, run=lambda arguments: (tmp_path / "no" / "file").open("w")
    )
    monkeypatch.setattr(command_line, "entry_points", lambda group: {"write": SimpleNamespace(load=lambda: verb)})
    assert main(["write"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("mcontroller write: DataError: ") and str(tmp_path / "no" / "file") in line
