"""What a type checker sees: types of calls through groups, and mistakes that it must report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

FOLDER = Path(__file__).parent
CONFIG = """
[mypy]
plugins = mcontroller.mypy_plugin
strict = true
follow_imports = silent
disable_error_code = empty-body
[mypy-torch.*,ray.*,tensordict.*,numpy.*,transformers.*,megatron.*,rich.*,omegaconf.*]
follow_imports = skip
"""
EXPECTED = re.compile(r"^(?P<code>.*?)  # (?:error: )?(?P<expected>.*)$")
LONG_NAMES = re.compile(r"\b(?:mcontroller|revealed|tests)\.[\w.]*?(?=\b[A-Z]\w*\b)")


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[str]]:
    """What mypy reports about the two files, by file and line."""
    folder = tmp_path_factory.mktemp("mypy")
    (folder / "mypy.ini").write_text(CONFIG)
    files = [str(FOLDER / "revealed.py"), str(FOLDER / "mistakes.py")]
    options = ["--config-file", str(folder / "mypy.ini"), "--cache-dir", str(folder / "cache")]
    output, errors, _ = api.run([*options, *files])
    assert not errors, errors
    found: dict[tuple[str, int], list[str]] = {}
    for line in output.splitlines()[:-1]:
        path, number, text = line.split(":", 2)
        found.setdefault((Path(path).name, int(number)), []).append(text.strip())
    return found


def expectations(name: str) -> dict[int, str]:
    lines = enumerate((FOLDER / name).read_text().splitlines(), start=1)
    return {number: match["expected"] for number, line in lines if (match := EXPECTED.match(line))}


def test_types_of_groups_calls_options_and_futures_are_known(reported: dict[tuple[str, int], list[str]]) -> None:
    expected = expectations("revealed.py")
    assert len(expected) > 30
    found = {number: texts for (name, number), texts in reported.items() if name == "revealed.py"}
    shown = {number: LONG_NAMES.sub("", " and ".join(texts)) for number, texts in found.items()}
    assert shown == {number: f'note: Revealed type is "{text}"' for number, text in expected.items()}


def test_mistakes_are_reported_and_nothing_else(reported: dict[tuple[str, int], list[str]]) -> None:
    expected = expectations("mistakes.py")
    assert len(expected) > 25
    found = {
        number: " and ".join(text for text in texts if not text.startswith("note: "))
        for (name, number), texts in reported.items()
        if name == "mistakes.py"
    }
    assert sorted(found) == sorted(expected)
    for number, text in expected.items():
        assert text in found[number], f"line {number}: {found[number]}"
