"""The pages of the project: their examples run and print what the page shows, and what they refer to exists."""

from __future__ import annotations

import contextlib
import io
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcontroller import Registry
from mcontroller.cli.field_docs import fields_under
from mcontroller.cli.help import run_config

ROOT = Path(__file__).parents[2]
PACKAGES = ("parallel_state", "mcontroller", "workers", "trainer")
PAGES = sorted(page.relative_to(ROOT).as_posix() for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))

FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PATH = re.compile(r"\.?(?:[\w*.-]+/)+(?:[\w*.-]+\.(?:py|md|yaml|yml|toml|txt|png|svg|sh))?")
NAME = re.compile(
    r"(?:parallel_state|mcontroller|workers|examples|benchmarks|tests)(?:\.[A-Za-z]\w*)+"
)  # keys of a run have trainer.
PROGRAM = re.compile(r"python3? -m ((?:examples|benchmarks|mcontroller|workers)[\w.]*)")
TARGET = re.compile(r"^make ([a-z][\w-]*)", re.MULTILINE)
STATUS = re.compile(r"^(?:# )?Status: ([\w ]+\w)", re.MULTILINE)
WRITTEN_BY_RUNS = ("runs/",)


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in (ROOT / page).read_text()])
@pytest.mark.usefixtures("ray_cluster", "registries")
def test_python_blocks_run_and_print_what_the_page_says(page: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    if page == "README.md":  # its block starts Ray; test_small_examples.py runs the same lines
        [(code, _)] = EXAMPLE.findall((ROOT / page).read_text())
        example = (ROOT / "examples/quickstart.py").read_text()
        assert [line for line in code.splitlines() if line.strip() not in example] == []
        return
    names: dict[str, Any] = {"__name__": "page"}
    for code, expected in EXAMPLE.findall((ROOT / page).read_text()):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        assert without_blanks(printed.getvalue()) == without_blanks(expected)


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove what a page registers."""
    add, added = Registry.add, []

    def noted(registry: Registry[Any], name: str, entry: Any) -> None:
        add(registry, name, entry)
        added.append((registry, name, entry))

    monkeypatch.setattr(Registry, "add", noted)
    yield
    for registry, name, entry in added:
        if entry.__module__ == "page":
            del registry._entries[name]


@pytest.mark.parametrize("page", PAGES)
def test_blocks_have_a_language_and_are_well_formed(page: str) -> None:
    blocks = FENCE.findall((ROOT / page).read_text())
    assert {language for language, _ in blocks} <= {"bash", "python", "text", "toml", "yaml"}
    for language, text in blocks:
        if language == "yaml":
            yaml.safe_load(text)
        if language == "toml":
            tomllib.loads(text)


@pytest.mark.processes
def test_commands_are_well_formed(tmp_path: Path) -> None:
    scripts = []
    for page in PAGES:
        commands = [text for language, text in FENCE.findall((ROOT / page).read_text()) if language == "bash"]
        scripts.append(tmp_path / page.replace("/", "-"))
        scripts[-1].write_text("\n".join(["#!/bin/bash", *commands]))
    subprocess.run([Path(sys.executable).with_name("shellcheck"), "--severity=error", *scripts], check=True)


def test_the_table_of_states_has_the_status_lines_of_files() -> None:
    readme = (ROOT / "README.md").read_text()
    files = [path for folder in ("launch", *PACKAGES) for path in (ROOT / folder).rglob("*") if path.suffix != ".pyc"]
    statuses = [line for path in files if path.is_file() for line in STATUS.findall(path.read_text())]
    assert len(statuses) >= 10
    assert [line for line in statuses if f"| {line}" not in readme] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings_that_exist(page: str) -> None:
    links = [link for link in LINK.findall(prose(page)) if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in links if not leads_somewhere(link, ROOT / page)] == []


@pytest.mark.parametrize("page", PAGES)
def test_paths_that_are_named_exist(page: str) -> None:
    paths = [
        path for path in CODE.findall(prose(page)) if PATH.fullmatch(path) and not path.startswith(WRITTEN_BY_RUNS)
    ]
    assert [path for path in paths if not any(ROOT.glob(path.rstrip("/"))) and not in_a_package(path)] == []


@pytest.mark.parametrize("page", PAGES)
def test_modules_and_functions_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = [name for name in CODE.findall(prose(page)) if NAME.fullmatch(name) and not name.endswith(".py")]
    names = {*named, *PROGRAM.findall(text)}
    assert [name for name in sorted(names) if not is_importable(name)] == []


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = {
        target for code in (*CODE.findall(prose(page)), *FENCED.findall(text)) for target in TARGET.findall(code)
    }
    declared = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets - declared == set()


def test_settings_that_recipes_are_translated_to_are_keys_of_a_run() -> None:
    keys = {field.key for field in fields_under(run_config())}
    sections = {key.rsplit(".", count)[0] for key in keys for count in range(1, key.count(".") + 1)}
    tables = (ROOT / "docs/porting.md").read_text().partition("## Their setting, ours")[2]
    cells = [row.split(" | ")[1] for row in tables.splitlines() if row.startswith("| `")]
    named = [name.replace("A.", "actor_rollout_ref.", 1) for cell in cells for name in CODE.findall(cell)]
    named = [name.partition("=")[0] for name in named if "." in name and ":" not in name]
    assert len(named) > 80
    assert [name for name in named if name not in keys | sections and not name.startswith("pools.rollout.")] == []


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return FENCED.sub("", (ROOT / page).read_text())


def leads_somewhere(link: str, page: Path) -> bool:
    """Whether the file of a relative link exists, and the heading that it names."""
    path, _, heading = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not heading or heading in headings(target))


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def in_a_package(path: str) -> bool:
    """Whether a package has this path: pages say `ray/` for a folder of the package that they write about."""
    return any(any((ROOT / package).glob(path.rstrip("/"))) for package in PACKAGES)


def is_importable(name: str) -> bool:
    """Whether the module, or the name in a module, exists."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def without_blanks(text: str) -> str:
    """The text without trailing blanks, and without what a process prints once, when it builds its first model."""
    lines = [line for line in text.rstrip().splitlines() if not line.startswith("model.transformer_impl=")]
    return "\n".join(line.rstrip() for line in lines)
