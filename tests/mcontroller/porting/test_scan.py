"""The verb ``port``: it reports each line that must change or means something else, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mcontroller.cli.main import main
from mcontroller.porting.rules import RULES
from mcontroller.porting.scan import scan

WORKER = Path(__file__).with_name("ported_worker.py.txt")
PAGE = Path(__file__).parents[3] / "docs" / "porting.md"


def marked(source: str) -> list[tuple[int, str]]:
    """The lines of a file and the rules that their comments name."""
    lines = enumerate(source.splitlines(), 1)
    return [(number, rule) for number, line in lines for rule in re.findall(r"# port: ([\w-]+)", line)]


def test_every_marked_line_of_a_worker_is_reported_and_no_other() -> None:
    source = WORKER.read_text()
    assert sorted({(found.line, found.rule) for found in scan(source)}) == sorted(marked(source))
    assert {rule for _, rule in marked(source)} == set(RULES)


def test_every_rule_has_a_row_in_the_documentation_of_its_kind() -> None:
    silent, errors = PAGE.read_text().split("## What must change", 1)
    documented = {"silent": silent, "error": errors}
    for name, rule in RULES.items():
        assert f"| `{name}` |" in documented[rule.kind], name


def test_imports_are_replaced_by_those_of_this_project() -> None:
    replaced = {found.line: found.replacement for found in scan(WORKER.read_text()) if found.rule == "import"}
    lines = WORKER.read_text().splitlines()
    by_line = {lines[line - 1].partition("  #")[0]: replacement for line, replacement in replaced.items()}
    assert by_line["from verl import DataProto"] == "from mcontroller import DataProto"
    assert by_line["from verl.protocol import all_gather_data_proto, union_tensor_dict"] == (
        "from mcontroller.porting import all_gather_data_proto; from mcontroller import union_tensor_dict"
    )
    assert "from workers import MegatronWorker" in by_line.values()
    assert "MegatronPPOActor of verl.workers.actor.megatron_actor: port that file too, and import it from there" in (
        by_line.values()
    )


def test_the_verb_prints_the_lines_with_their_replacement(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "worker.py"
    file.write_text("def f(batch, other):\n    batch.union(other)\n")
    assert main(["port", str(file)]) == 1
    assert capsys.readouterr().out == (
        f"{file}:2: silent [union] union returns a new batch and leaves its first argument as it is\n"
        "    batch.union(other)\n    -> batch = batch.union(other)\n"
        "1 files: 1 findings would mean something else here, 0 must change\n"
    )
    file.write_text("def f(batch, other):\n    return other\n")
    assert main(["port", str(file)]) == 0
    file.write_text("def f(:\n")
    assert main(["port", str(file)]) == 2
    assert "cannot be read as Python" in capsys.readouterr().err
