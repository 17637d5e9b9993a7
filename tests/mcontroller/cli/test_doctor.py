"""``doctor`` on a cluster of two raylets, and each of its checks with a fault."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mcontroller.cli.doctor import check_shared_memory, check_versions, findings_of, listen, unreachable
from mcontroller.cli.main import main
from tests.mcontroller.cli.two_raylets import ADDRESS

MIB = 1 << 20


@pytest.mark.processes
def test_another_version_on_one_node_of_a_cluster_fails_and_names_the_node(tmp_path: Path) -> None:
    other = tmp_path / "packages" / "tensordict-0.0.1.dist-info" / "METADATA"
    other.parent.mkdir(parents=True)
    other.write_text("Metadata-Version: 2.1\nName: tensordict\nVersion: 0.0.1\n")
    directory = tempfile.mkdtemp(prefix="doctor")  # a short name: Ray puts its sockets there
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": directory}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "tests.mcontroller.cli.two_raylets", str(tmp_path / "packages")]
    options = ["--checkpoints", str(tmp_path / "checkpoints")]
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=200)
    shutil.rmtree(directory, ignore_errors=True)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = [line.split(maxsplit=3) for line in done.stdout.splitlines() if not line.startswith(" ")]
    [(_, node, check, facts)] = [row for row in rows if row[0] == "FAILURE"]
    assert (node, check) == ("all", "versions")
    assert "tensordict" in facts and f"'{ADDRESS}': '0.0.1'" in facts and "torch" not in facts
    checks = [row[2] for row in rows if row[0] == "ok" and row[2] != "shared"]
    assert checks == ["ports", "ports", "checkpoints", "checkpoints"]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_an_address_without_a_cluster_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--address", "no address"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("mcontroller doctor: ResourceError: ")


@pytest.mark.parametrize(
    ("other", "failed"),
    [
        ({"torch": "2.13.0", "NCCL": "2.28.9"}, False),
        ({"torch": "2.12.1", "NCCL": "2.28.9"}, True),
        ({"torch": "2.13.0"}, True),
    ],
)
def test_versions_that_differ_or_are_missing_on_a_node_fail(other: dict[str, str], failed: bool) -> None:
    assert check_versions({"10.0.0.1": {"torch": "2.13.0", "NCCL": "2.28.9"}, "10.0.0.2": other}).failed is failed


@pytest.mark.parametrize(("size", "has_driver", "failed"), [(64, True, True), (64, False, False), (16384, True, False)])
def test_little_shared_memory_fails_on_a_node_with_gpus(size: int, has_driver: bool, failed: bool) -> None:
    assert check_shared_memory("10.0.0.1", size * MIB, has_driver).failed is failed


def test_nodes_reach_each_other_and_report_why_they_do_not() -> None:
    assert unreachable({"127.0.0.1": listen()}) == []
    [error] = unreachable({"127.0.0.1": 1})
    assert error.startswith("127.0.0.1:1 ")


@pytest.mark.parametrize(
    ("folders", "failed"),
    [
        ({"first": "shared", "second": "shared"}, set()),
        ({"first": "shared", "second": "other"}, {("checkpoints", "second")}),
        ({"first": "shared", "second": "nowhere"}, {("checkpoints", "second")}),
        ({"first": "a file", "second": "shared"}, {("checkpoints", "first")}),
        ({"gone": None, "second": "shared"}, {("agent", "gone")}),
    ],
)
def test_a_node_that_does_not_answer_and_directories_that_differ_fail(
    tmp_path: Path, folders: dict[str, str | None], failed: set[tuple[str, str]]
) -> None:
    """Each node has its directory of checkpoints in another place; a node without a folder does not answer."""
    for name in ("shared", "other"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    (tmp_path / "a file").touch()

    def in_folder(folder: str | None) -> Callable[..., Future[Any]]:
        def call(function: Callable[..., Any], *arguments: Any) -> Any:
            if folder is None:
                raise ConnectionError("the node is gone")
            of_node = [tmp_path / folder / it.relative_to("/") if isinstance(it, Path) else it for it in arguments]
            return function(*of_node)

        return partial(threads.submit, call)

    with ThreadPoolExecutor(4) as threads:
        findings = list(
            findings_of({address: in_folder(folder) for address, folder in folders.items()}, "/checkpoints")
        )
    assert {
        (finding.check, finding.node) for finding in findings if finding.failed and finding.check != "ports"
    } == failed
    assert not [file for file in tmp_path.rglob(".doctor*")]
