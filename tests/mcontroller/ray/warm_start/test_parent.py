"""A worker command that is started through the warm parent, without Ray."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mcontroller.ray.warm_start import client
from mcontroller.ray.warm_start.exits import status_in

WORKER = """
import gc, importlib, json, os, random, sys
import numpy, torch
gc.collect()
with open("/proc/self/smaps_rollup") as memory:
    [private] = [int(line.split()[1]) for line in memory if line.startswith("Private_Dirty")]
print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "arguments": sys.argv, "folder": os.getcwd(), "main": __name__,
    "mark": os.environ.get("OLDPWD"), "threads": torch.get_num_threads(),
    "drawn": [random.random(), numpy.random.rand(), torch.rand(1).item()],
    "warm": "of_the_user" in sys.modules, "private": private * 1024,
    "forked": "mcontroller.ray.warm_start.parent" in sys.modules,
    "record": importlib.import_module("mcontroller.ray.warm_start.exits").record_of_this_process(),
}), flush=True)
if "--fork" in sys.argv and os.fork() == 0:
    print(json.dumps({"pid": os.getpid()}), flush=True)
if "--sleep" in sys.argv or "--fork" in sys.argv:
    import time
    time.sleep(60)
sys.exit(3)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray") / "session_1"
    folder.mkdir()
    folder.joinpath("worker.py").write_text(WORKER)
    return folder


@pytest.fixture(scope="module")
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    """A process in the place of the node's raylet."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


LIGHT = {
    "tensordict": "",
    "torch": """
import random
import types

def rand(count):
    return types.SimpleNamespace(item=random.random)

def get_num_threads():
    return 0

cuda = types.SimpleNamespace(is_initialized=lambda: False)
default_generator = types.SimpleNamespace(seed=lambda: None)
""",
}
"""What a parent and WORKER use of the libraries that take seconds to import."""


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH with libraries that are imported at once."""
    folder = tmp_path_factory.mktemp("light")
    for name, text in LIGHT.items():
        (folder / f"{name}.py").write_text(text)
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def start(session: Path, raylet: subprocess.Popen[bytes], light: str) -> Start:
    """Starts the worker as Ray does, with other arguments; keywords are environment variables."""

    def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        named = [f"--temp-dir={session.parent}", f"--session-name={session.name}"]
        command = [sys.executable, "-S", "-c", Path(client.__file__).read_text(), "2"]
        left_out = {"OMP_NUM_THREADS", "PYTEST_CURRENT_TEST"}
        inherited = {name: value for name, value in os.environ.items() if name not in left_out}
        environment = {**inherited, "RAY_RAYLET_PID": str(raylet.pid), "PYTHONPATH": light, **variables}
        return subprocess.Popen(
            [*command, str(session / "worker.py"), *named, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=session,
        )

    return start


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, "the status of the worker is the status of the process that Ray started"
    return dict(json.loads(output))


def folder_of(session: Path) -> Path:
    [folder] = session.glob("warm_start_*")
    return folder


@pytest.mark.processes
def test_workers_are_forks_of_one_parent(start: Start, session: Path) -> None:
    path = os.environ.get("PYTHONPATH", "")
    first, second = [finish(start("--own", OLDPWD=mark, PYTHONPATH=path)) for mark in ("a", "b")]
    assert first["forked"]
    assert first["parent"] == second["parent"]
    assert (first["mark"], second["mark"]) == ("a", "b"), "each has its own environment"
    assert first["arguments"][0] == str(session / "worker.py")
    assert first["arguments"][-1] == "--own"
    assert first["folder"] == str(session)
    assert first["main"] == "__main__"
    assert first["threads"] == 2, "the threads that Ray sets, although torch was loaded before"
    assert not set(first["drawn"]) & set(second["drawn"]), "forks draw different numbers"
    assert first["private"] < 30e6, "a collection copies no pages of the libraries, which have more than 100 MB"
    assert folder_of(session).stat().st_mode & 0o777 == 0o700


@pytest.mark.processes
def test_another_environment_has_another_parent(start: Start) -> None:
    first, second = finish(start()), finish(start(OMP_NUM_THREADS="1"))
    assert first["parent"] != second["parent"]


@pytest.mark.processes
def test_a_worker_ends_with_the_process_that_asked_for_it(start: Start) -> None:
    process = start("--sleep")
    assert process.stdout is not None
    worker = json.loads(process.stdout.readline())
    process.kill()
    process.wait()
    wait_until(lambda: not running(worker["pid"]))


@pytest.mark.processes
def test_what_a_worker_has_forked_ends_with_it(start: Start) -> None:
    process = start("--fork")
    assert process.stdout is not None
    worker, child = (json.loads(process.stdout.readline()) for _ in range(2))
    os.kill(worker["pid"], signal.SIGKILL)
    process.wait(timeout=30)
    wait_until(lambda: not running(child["pid"]))


def test_a_folder_that_is_replaced_after_its_check_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "session_1").mkdir()
    folder = client.open_folder([f"--temp-dir={tmp_path}", "--session-name=session_1"])
    [path] = (tmp_path / "session_1").iterdir()
    path.rename(tmp_path / "own")
    path.mkdir()
    with socket.socket(socket.AF_UNIX) as of_a_stranger, socket.socket(socket.AF_UNIX) as listener:
        of_a_stranger.bind(str(path / "key.sock"))
        of_a_stranger.listen()
        assert client.connect(folder, "key") is None
        listener.bind(str(tmp_path / "own" / "key.sock"))
        listener.listen()
        connection = client.connect(folder, "key")
        assert connection is not None and listener.accept()
        connection.close()
    os.close(folder)


def test_a_link_in_the_place_of_the_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "session_1").mkdir()
    (tmp_path / "session_1" / f"warm_start_{os.getuid()}").symlink_to(tmp_path / "own")
    with pytest.raises(OSError) as caught:
        client.open_folder([f"--temp-dir={tmp_path}", "--session-name=session_1"])
    assert caught.value.errno in (errno.ENOTDIR, errno.ELOOP)


@pytest.mark.processes
def test_a_killed_worker_reports_its_signal(start: Start) -> None:
    process = start("--sleep")
    assert process.stdout is not None
    worker = json.loads(process.stdout.readline())
    os.kill(worker["pid"], signal.SIGKILL)
    assert process.wait(timeout=30) == -signal.SIGKILL
    assert status_in(worker["record"], worker["pid"]) == -signal.SIGKILL


@pytest.mark.processes
def test_a_worker_starts_by_itself_if_the_parent_is_not_safe_to_fork(start: Start, session: Path) -> None:
    [*notes] = [path.with_suffix(".unsafe") for path in folder_of(session).glob("*.sock")]
    for note in notes:
        note.touch()
    worker = finish(start())
    for note in notes:
        note.unlink()
    assert notes
    assert not worker["forked"]


@pytest.mark.processes
def test_a_worker_starts_by_itself_if_the_parent_cannot_import_its_libraries(
    start: Start, session: Path, tmp_path: Path, light: str
) -> None:
    (tmp_path / "tensordict.py").write_text("raise ImportError('no tensordict')")
    path = os.pathsep.join([str(tmp_path), light])
    assert not finish(start(PYTHONPATH=path))["forked"]
    [note] = folder_of(session).glob("*.unsafe")
    assert note.read_text() == "no tensordict"


@pytest.mark.processes
def test_modules_that_a_class_names_are_imported_once(start: Start, tmp_path: Path, light: str) -> None:
    module = tmp_path / "of_the_user.py"
    module.touch()
    path = os.pathsep.join([str(tmp_path), light])

    def warm(file: Path) -> dict[str, Any]:
        return finish(start(PYTHONPATH=path, **{client.WARM_IMPORTS: f"of_the_user:{file}"}))

    first = warm(module)
    assert first["warm"] and first["forked"]
    os.utime(module, (0, 0))
    assert not warm(module)["forked"]  # the file has changed: the parent ends
    again = warm(module)
    assert again["warm"] and again["parent"] != first["parent"]
    other = warm(tmp_path / "elsewhere" / module.name)
    assert not other["warm"] and not other["forked"]


@pytest.mark.processes
def test_another_parent_is_started_if_the_first_was_killed(start: Start) -> None:
    first = finish(start())
    os.kill(first["parent"], signal.SIGKILL)
    wait_until(lambda: not running(first["parent"]))
    second = finish(start())
    assert second["forked"]
    assert second["parent"] != first["parent"]


@pytest.mark.processes
def test_a_parent_ends_with_the_raylet_and_with_its_agents(start: Start, tmp_path: Path) -> None:
    agent = tmp_path / "ray::RuntimeEnvAgent"
    agent.symlink_to(str(shutil.which("sleep")))
    other = subprocess.Popen(["sh", "-c", '"$0" 600 & wait', str(agent)])
    wait_until(lambda: [child.name() for child in psutil.Process(other.pid).children()] == [agent.name])
    [child] = psutil.Process(other.pid).children()
    worker = finish(start(RAY_RAYLET_PID=str(other.pid)))
    assert worker["forked"]
    other.kill()
    other.wait()
    wait_until(lambda: not running(worker["parent"]))
    wait_until(lambda: not running(child.pid), seconds=1.0)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)
