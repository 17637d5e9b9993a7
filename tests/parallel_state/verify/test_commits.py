"""Every commit of a checkout: what is run, what is known already, and which commit changed the numbers."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from mcontroller.cli.main import main
from parallel_state.verify import commits, results
from parallel_state.verify.commits import History, write_results
from parallel_state.verify.program import VerifyError
from parallel_state.verify.results import Result
from tests.parallel_state.verify.programs import EXAMPLES

# In place of a verification: the fingerprint is the content of one file, which is also what is imported.
CHILD = """
import json, pathlib, sys
output, steps, layouts, *programs = sys.argv[1:]
numbers = pathlib.Path("megatron/numbers.py").absolute()
content = numbers.read_text().strip()
failure = {"failure": "SyntaxError"} if content == "broken" else {}
differs = "output of attention" if content == "wrong" else ""
result = {"fingerprint": content, "layouts": {"tp=2": differs}, "bits": {"tp=2": content}, **failure}
result["imported"] = [str(numbers), HELPER]
pathlib.Path(output).write_text(json.dumps({program: result for program in programs}))
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of nine commits: the numbers change twice, and a layout differs from the eighth on."""
    monkeypatch.setattr(commits, "_CHILD", CHILD.replace("HELPER", repr(str(tmp_path / "helper.py"))))
    repository = tmp_path / "checkout"
    (repository / "megatron").mkdir(parents=True)
    git(repository, "init", "--quiet", "--initial-branch", "main", ".")
    for index, numbers in enumerate(["1", "1", "1", "2", "2", "2", "3", "wrong", "wrong"]):
        (repository / "megatron" / "numbers.py").write_text(numbers)
        (repository / "megatron" / "unused.py").write_text(str(index))
        git(repository, "add", ".")
        git(repository, "-c", "user.name=a", "-c", "user.email=b", "commit", "--quiet", "-m", f"commit {index}")
    return repository


def git(repository: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=repository, check=True)


def history(checkout: Path, revisions: str = "main~8..main") -> History:
    return History(checkout, revisions, ["team.model:program"], cache=checkout.parent / "cache")


def fingerprints(checkout: Path, every: int = 1) -> tuple[dict[int, str], int]:
    with history(checkout) as commits_of_range:
        verified = {index: results["model"].fingerprint for index, results in commits_of_range.verified(every)}
        return verified, commits_of_range.runs


@pytest.mark.processes
def test_a_commit_that_changes_nothing_imported_costs_no_run_and_results_are_kept(checkout: Path) -> None:
    verified, runs = fingerprints(checkout)
    assert list(verified.values()) == ["1", "1", "1", "2", "2", "2", "3", "wrong", "wrong"]
    assert runs == 4
    assert fingerprints(checkout) == (verified, 0)


@pytest.mark.processes
def test_a_record_in_git_knows_the_results_of_a_machine_without_a_cache(checkout: Path) -> None:
    def with_record(cache: str, revisions: str) -> tuple[list[str], int]:
        folder, record = checkout.parent / cache, checkout.parent / "record.json"
        with History(checkout, revisions, ["team.model:program"], cache=folder, record=record) as commits_of_range:
            verified = [results["model"] for _, results in commits_of_range.verified()]
            return [result.fingerprint + "".join(result.differing) for result in verified], commits_of_range.runs

    first, runs = with_record("cache", "main~8..main~4")
    assert (first, runs) == (["1", "1", "1", "2", "2"], 2)
    assert with_record("elsewhere", "main~8..main") == ([*first, "2", "3", "wrongtp=2", "wrongtp=2"], 3)
    assert with_record("a third", "main~8..main")[1] == 0
    (checkout.parent / "helper.py").write_text("changed")
    results.hash_of.cache_clear()
    assert with_record("a fourth", "main~8..main~4")[1] == 2
    assert with_record("a fifth", "main~8..main~4")[1] == 0


@pytest.mark.processes
def test_changes_between_two_verified_commits_are_bisected(checkout: Path) -> None:
    verified, runs = fingerprints(checkout, every=8)
    assert verified[2] == "1" and verified[3] == "2" and verified[5] == "2" and verified[6] == "3"
    assert runs == 4


@pytest.mark.processes
def test_the_report_names_the_commits_that_changed_something(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = checkout.parent / "report.md"
    arguments = ["--program", "team.model:program", "--cache", str(checkout.parent / "cache"), "--report", str(report)]
    assert main(["verify", "--commits", str(checkout), "main~8..main~2", *arguments]) == 0
    assert main(["verify", "--commits", str(checkout), "main~8..main", *arguments]) == 1
    changed = [row.split("|")[3].strip() for row in report.read_text().splitlines() if row.startswith("| `")]
    assert changed == [
        "",
        "commit 3<br>model: numbers of one process changed",
        "commit 6<br>model: numbers of one process changed",
        "commit 7<br>model: layout tp=2 began to differ: output of attention<br>model: numbers of one process changed",
    ]
    assert "9 of 9 commits verified, with 1 processes" in capsys.readouterr().out


@pytest.mark.processes
def test_a_failure_is_a_result_and_is_tried_again_if_any_file_changes(checkout: Path) -> None:
    for name in ("numbers", "unused"):
        (checkout / "megatron" / f"{name}.py").write_text("broken")
        git(checkout, "-c", "user.name=a", "-c", "user.email=b", "commit", "--quiet", "-am", "broken")
    with history(checkout, "main~2..main") as commits_of_range:
        before, first, second = (results["model"] for _, results in commits_of_range.verified())
        assert commits_of_range.runs == 3
    assert first.failure == second.failure == "SyntaxError" and first.is_regression(before)


@pytest.mark.processes
def test_a_failure_is_tried_again_if_a_file_beside_the_program_changes(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = checkout.parent / "team"
    team.mkdir()
    (team / "model.py").write_text("import losses")
    (team / "losses.py").write_text("this is a syntax error")
    monkeypatch.setattr(commits, "_CHILD", "raise SystemExit('SyntaxError')")

    def runs() -> int:
        results.hash_of.cache_clear()
        program, record = f"{team / 'model.py'}:program", checkout.parent / "record.json"
        with History(checkout, "main..main", [program], cache=checkout.parent / "cache", record=record) as of_range:
            assert [one["model"].failure != "" for _, one in of_range.verified()] == [True]
            return of_range.runs

    assert [runs(), runs()] == [1, 0]
    (team / "losses.py").write_text("repaired = True")
    assert runs() == 1


def test_changes_are_named() -> None:
    before = Result("a", {"tp=2": "", "pp=2": "loss"}, {"tp=2": "1", "pp=2": "1"})
    assert before.changes(before) == []
    after = Result("a", {"tp=2": "", "pp=2": ""}, {"tp=2": "2", "pp=2": "2"})
    assert after.changes(before) == ["layout pp=2 is equal again", "other rounding in tp=2"]
    assert before.is_regression(after) and not after.is_regression(before)


@pytest.mark.processes
def test_a_range_that_git_does_not_know_and_options_that_do_not_fit_are_errors(checkout: Path) -> None:
    for revisions in ("main", "nothing..main", "main~1...main"):
        with pytest.raises(VerifyError):
            history(checkout, revisions)
    assert main(["verify", "--commits", str(checkout), "main~1..main", "--exact"]) == 1
    with pytest.raises(VerifyError):
        history(checkout / "missing")
    with pytest.raises(VerifyError):
        History(checkout, "main~1..main", ["missing.py:program"], cache=checkout)
    record = checkout / "record.json"
    for text in ("no JSON", "[]", '{"model": 1}', '{"model": [{"key": "1"}]}'):
        record.write_text(text)
        with pytest.raises(VerifyError):
            History(checkout, "main~1..main", ["team.model:program"], cache=checkout, record=record)


@pytest.mark.processes
def test_a_program_that_fails_at_all_commits_is_a_failure(checkout: Path) -> None:
    (checkout / "megatron" / "numbers.py").write_text("broken")
    git(checkout, "-c", "user.name=a", "-c", "user.email=b", "commit", "--quiet", "-am", "broken")
    arguments = ["--program", "team.model:program", "--cache", str(checkout.parent / "cache")]
    assert main(["verify", "--commits", str(checkout), "main..main", *arguments]) == 1


@pytest.mark.simulated
def test_a_process_writes_results_and_the_files_that_they_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, program = tmp_path / "results.json", "team_of_commits.model:program"
    (tmp_path / "team_of_commits").mkdir()
    (tmp_path / "team_of_commits" / "model.py").write_text("from common_of_commits import program")
    shutil.copy(EXAMPLES / "gpt.py", tmp_path / "common_of_commits.py")
    monkeypatch.syspath_prepend(tmp_path)
    write_results(str(output), "1", "pp=2", program, "no_such_file.py:program")
    results = json.loads(output.read_text())
    assert results[program]["layouts"] == {"pp=2": ""} and len(results[program]["fingerprint"]) == 16
    imported = {Path(file) for file in results[program]["imported"]}
    assert {tmp_path / "team_of_commits" / "model.py", tmp_path / "common_of_commits.py"} <= imported
    assert results["no_such_file.py:program"]["failure"].startswith("VerifyError")
