"""``doctor`` on a cluster of two raylets, and each of its checks with a fault."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcontroller.cli import doctor
from mcontroller.cli.doctor import check_ports, check_shared_memory, check_versions, findings_of, listen, versions
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
def test_little_shared_memory_fails_on_a_node_with_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int, has_driver: bool, failed: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=size * MIB))
    monkeypatch.setattr(doctor, "DRIVER", tmp_path if has_driver else tmp_path / "none")
    assert check_shared_memory()[0] is failed


def test_nodes_reach_each_other_and_report_why_they_do_not() -> None:
    assert check_ports({"127.0.0.1": listen()}) == (False, "reaches all")
    failed, facts = check_ports({"127.0.0.1": 1})
    assert failed and "127.0.0.1:1 " in facts


class Folders:
    """Nodes that have their directories of checkpoints in other places; one without a place is gone.

    Args:
        ends: a node that is gone when this function is called there.
    """

    def __init__(self, threads: ThreadPoolExecutor, ends: tuple[str, Callable[..., Any]] | None = None) -> None:
        self.threads, self.ends = threads, ends

    def node(self, address: str, folder: Path | None) -> Callable[..., Future[Any]]:
        def call(function: Callable[..., Any], *arguments: Any) -> Any:
            if folder is None or self.ends == (address, function):
                raise RuntimeError("the node is gone")
            return function(*[folder / it.name if isinstance(it, Path) else it for it in arguments])

        return partial(self.threads.submit, call)

    def failures(self, folders: Mapping[str, Path | None], checkpoints: Path) -> list[tuple[str, str]]:
        nodes = {address: self.node(address, folder) for address, folder in folders.items()}
        return [(found.check, found.node) for found in findings_of(nodes, str(checkpoints)) if found.failed]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.fixture(autouse=True)
def every_port_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "check_ports", lambda ports: (False, "reaches all"))


@pytest.mark.parametrize(
    ("folder", "failed"),
    [
        ("shared", []),
        ("other", [("checkpoints", "second")]),
        ("nowhere", [("checkpoints", "second")]),
        (None, [("agent", "second")]),
    ],
)
def test_a_node_that_does_not_answer_or_has_another_directory_fails(
    threads: ThreadPoolExecutor, tmp_path: Path, folder: str | None, failed: list[tuple[str, str]]
) -> None:
    for name in ("shared", "other"):
        (tmp_path / name).mkdir()
    folders = {"first": tmp_path / "shared", "second": None if folder is None else tmp_path / folder}
    assert Folders(threads).failures(folders, tmp_path / "shared") == failed
    assert not [file for file in tmp_path.rglob(".doctor*")]


def test_a_directory_that_cannot_be_made_fails(threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    failed = Folders(threads).failures({"first": tmp_path}, tmp_path / "a file" / "checkpoints")
    assert failed == [("checkpoints", "this machine")]


@pytest.mark.parametrize("function", [versions, check_shared_memory, listen])
def test_a_node_that_ends_between_two_checks_fails_once_and_the_others_go_on(
    threads: ThreadPoolExecutor, tmp_path: Path, function: Callable[..., Any]
) -> None:
    nodes = Folders(threads, ends=("second", function))
    assert nodes.failures(dict.fromkeys(("first", "second"), tmp_path), tmp_path) == [("agent", "second")]
