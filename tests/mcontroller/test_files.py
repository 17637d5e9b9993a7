"""Files that are replaced as a whole; locks between processes: one holder at a time, which is named."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mcontroller.files import acquire_lock, release_lock, replace_text, replacing

WHAT = "the run in /runs/first"
HERE = socket.gethostname()


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as file:
        file.write(b"first ")
        replace_text(path, "other")  # as a thread of another node does, whose id may be the same
        assert path.read_text() == "other"
        file.write(b"writer")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"interrupted")
        raise KeyboardInterrupt
    assert path.read_text() == "first writer" and list(tmp_path.iterdir()) == [path]


def in_fork(action: Callable[[], object]) -> str:
    """Return the type and the text of the error of an action in a forked process; "" without one."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except Exception as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


@pytest.mark.processes
def test_a_lock_excludes_other_processes_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.lock"
    acquire_lock(path, WHAT)
    acquire_lock(path, WHAT)
    assert re.fullmatch(
        f"DataError: {WHAT} is in use by process {os.getpid()} on {HERE} since 20[-0-9 :+]+: wait for its end, or use "
        "another directory",
        in_fork(lambda: acquire_lock(path, WHAT)),
    )
    assert in_fork(lambda: release_lock(path)) == "" and path.exists()
    release_lock(path)
    assert not path.exists()
    assert in_fork(lambda: acquire_lock(path, WHAT)) == ""


@pytest.mark.processes
def test_a_holder_that_reads_its_lock_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    acquire_lock(path, WHAT)
    acquire_lock(tmp_path / ".." / tmp_path.name / "run.lock", WHAT)
    path.write_text(path.read_text().replace(HERE, "elsewhere"))  # of another node, for which only the kernel decides
    assert "in use by process" in in_fork(lambda: acquire_lock(path, WHAT))
    release_lock(path)


@pytest.mark.processes
def test_a_fork_does_not_hold_the_lock_of_its_parent_that_has_ended(tmp_path: Path) -> None:
    path, (reader, writer) = tmp_path / "run.lock", os.pipe()
    holder = os.fork()
    if holder == 0:
        os.close(writer)
        acquire_lock(path, WHAT)
        if os.fork() == 0:
            os.read(reader, 1)  # until the end of the test
        os._exit(0)
    os.waitpid(holder, 0)
    acquire_lock(path, WHAT)
    assert json.loads(path.read_text())["pid"] == os.getpid()
    release_lock(path)
    os.close(writer)
    os.close(reader)


@pytest.mark.processes
def test_the_lock_of_a_process_that_has_ended_is_free(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    assert in_fork(lambda: acquire_lock(path, WHAT)) == "" and path.exists()
    acquire_lock(path, WHAT)
    assert json.loads(path.read_text())["pid"] == os.getpid()
    release_lock(path)


def test_a_file_system_without_locks_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING):
        acquire_lock(tmp_path / "run.lock", WHAT)
    assert len(caplog.messages) == 1
    release_lock(tmp_path / "run.lock")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": 1}', "[" * 90])
def test_a_lock_file_without_a_name_is_taken_over(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.lock"
    path.write_text(content)
    acquire_lock(path, WHAT)
    assert json.loads(path.read_text())["host"] == HERE
    release_lock(path)


def test_a_lock_below_a_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        acquire_lock(tmp_path / "file" / "run.lock", WHAT)
