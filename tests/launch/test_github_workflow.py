"""The workflow that verifies pull requests: its scripts, with stand-ins for the verification and for GitHub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.launch.manifests import ROOT
from tests.parallel_state.verify.test_commits import CHILD, git

WORKFLOW = ROOT / "launch" / "github" / "verify.yml"
JOB = yaml.safe_load(WORKFLOW.read_text())["jobs"]["verify"]
SCRIPTS = {step["name"]: step["run"] for step in JOB["steps"] if "run" in step}
PYTHON = f"""#!{sys.executable}
import sys
from mcontroller.cli.main import main
from parallel_state.verify import commits
commits._CHILD = {CHILD.replace("HELPER", repr(__file__))!r}
sys.exit(main(sys.argv[3:]))
"""
GH = """#!/bin/bash
[[ "$*" == *--paginate* ]] && { [ -e earlier ] && echo "$COMMENTS/1"; exit 0; }
echo "$2 $4" >> requests && touch earlier
"""
pytestmark = pytest.mark.processes


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """A checkout of a pull request whose second commit changes the numbers."""
    repository = tmp_path / "fork"
    (repository / "megatron").mkdir(parents=True)
    git(repository, "init", "--quiet", ".")
    for index, numbers in enumerate("1122"):
        (repository / "megatron" / "numbers.py").write_text(numbers)
        (repository / "megatron" / "other.py").write_text(str(index))
        git(repository, "add", ".")
        git(repository, "-c", "user.name=a", "-c", "user.email=b", "commit", "--quiet", "-m", f"commit {index}")
    for name, script in (("python", PYTHON), ("gh", GH)):
        (repository / name).write_text(script)
        (repository / name).chmod(0o755)
    return repository


def run(step: str, fork: Path) -> None:
    variables = {"BASE": "HEAD~3", "HEAD": "HEAD", "PROGRAMS": "team.model:program team.moe:small"}
    variables |= {"GITHUB_STEP_SUMMARY": "summary.md", "COMMENTS": "comments", "PYTHONPATH": str(ROOT)}
    variables["PATH"] = os.pathsep.join([str(fork), os.environ["PATH"]])
    script = ["bash", "-e", "-o", "pipefail", "-c", SCRIPTS[step]]
    subprocess.run(script, cwd=fork, env={**os.environ, **variables}, check=True)


def test_the_report_of_a_pull_request_is_one_comment(fork: Path) -> None:
    run("Verify", fork)
    rows = [row.split("|")[1:] for row in (fork / "report.md").read_text().splitlines() if row.startswith("| `")]
    assert [row[3].strip() for row in rows] == [
        "",
        "commit 2<br>model: numbers of one process changed<br>small: numbers of one process changed",
    ]
    run("Comment", fork)
    run("Comment", fork)
    assert (fork / "requests").read_text().splitlines() == ["comments POST", "comments/1 PATCH"]
    assert (fork / "comment.md").read_text().startswith("<!-- verify -->\n| commits |")


@pytest.mark.parametrize("step", ["Verify", "Comment"])
def test_the_scripts_pass_shellcheck(step: str) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    checked = subprocess.run([shellcheck, "--shell=bash", "-"], input=SCRIPTS[step], capture_output=True, text=True)
    assert checked.stdout == ""
