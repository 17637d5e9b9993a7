"""An engine's process: its answers, and its errors, death and silence, each with the cause.

The program of the process is a small one, without vLLM.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from workers.generate.vllm import engine_process
from workers.generate.vllm.engine_process import EngineDied, EngineError, EngineHung, EngineProcess

pytestmark = pytest.mark.processes

PROGRAM = """
import os, signal, sys
from multiprocessing.connection import Connection

connection = Connection(int(sys.argv[1]))
method, arguments = connection.recv()
print("started with", sorted(arguments), flush=True)
if arguments.get("hang"):
    signal.pause()
if arguments.get("end"):
    sys.exit(arguments["end"])
print("KeyError: 'of the start'", flush=True)
connection.send(("result", None))
while True:
    method, arguments = connection.recv()
    if method == "add":
        connection.send(("result", arguments["a"] + arguments["b"]))
    elif method == "variables":
        connection.send(("result", {name: os.environ.get(name) for name in ("GREETING", "RANK")}))
    elif method == "report":
        connection.send(("progress",))
        connection.send(("progress",))
        connection.send(("result", "done"))
    elif method == "fail":
        print("(EngineCore pid=7) ERROR 11-29 12:55:03 [core.py:1186] OSError: [Errno 28] No space left", flush=True)
        connection.send(("error", "ValueError: no such weight", "Traceback ..."))
    elif method == "die":
        print("about to end", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    elif method == "exit":
        sys.exit(7)
    elif method in ("hang", "check"):
        signal.pause()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "engine.py"
    file.write_text(PROGRAM)
    return file


@pytest.fixture
def engine(program: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProcess]:
    monkeypatch.setenv("RANK", "3")
    environment = {"GREETING": "hello", "RANK": None}
    process = EngineProcess({}, environment, start_timeout_s=60, silence_timeout_s=60, program=program)
    yield process
    process.close()


def has_ended(pid: int) -> bool:
    if not os.path.exists(f"/proc/{pid}"):
        return True
    return bool(wait([os.pidfd_open(pid)], 20))


def test_calls_return_their_results_and_the_environment_is_the_engine_s(engine: EngineProcess) -> None:
    assert engine.call("variables") == {"GREETING": "hello", "RANK": None}
    assert engine.call("add", a=2, b=3) == 5
    engine.send("add", a=1, b=1)
    assert engine.result() == 2
    assert engine.call("report") == "done"  # after two reports of progress


def test_an_exception_of_the_engine_has_its_traceback_and_leaves_it_usable(engine: EngineProcess) -> None:
    with pytest.raises(EngineError) as caught:
        engine.call("fail")
    error = caught.value
    assert (error.method, error.pid) == ("fail", engine.pid) and error.log_tail.endswith("\nTraceback ...")
    assert "OSError: [Errno 28]" in str(error) and "KeyError" not in str(error)  # not of an earlier call
    assert engine.call("add", a=2, b=3) == 5


@pytest.mark.parametrize(("method", "cause"), [("die", "signal 9 (SIGKILL)"), ("exit", "exit code 7")])
def test_the_death_of_an_engine_is_reported_with_its_cause_and_its_last_words(
    engine: EngineProcess, method: str, cause: str
) -> None:
    with pytest.raises(EngineDied) as caught:
        engine.call(method)
    assert (caught.value.exit_cause, caught.value.method) == (cause, method)
    assert ("about to end" if method == "die" else "started with []") in caught.value.log_tail


def test_an_engine_that_is_silent_for_too_long_is_reported_with_the_limit_and_ended(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineProcess({}, {}, start_timeout_s=60, silence_timeout_s=0.2, program=program)
    with pytest.raises(EngineHung) as caught:
        engine.call("hang")
    assert (caught.value.method, caught.value.timeout_s) == ("hang", 0.2) and isinstance(caught.value, TimeoutError)
    assert has_ended(engine.pid)
    with pytest.raises(EngineHung) as starting:
        EngineProcess({"hang": True}, {}, start_timeout_s=0.3, silence_timeout_s=60, program=program)
    assert (starting.value.setting, starting.value.timeout_s) == ("start_timeout_s", 0.3)
    monkeypatch.setattr(engine_process, "_ANSWER_S", 0.2)
    engine = EngineProcess({}, {}, start_timeout_s=60, silence_timeout_s=50, program=program)
    with pytest.raises(EngineHung) as checked:  # after requests have waited for 50 s
        engine.check(was_silent=True)
    assert (checked.value.setting, checked.value.timeout_s) == ("silence_timeout_s", 50)


def test_an_engine_that_does_not_start_is_reported_with_its_exit_code(program: Path) -> None:
    with pytest.raises(EngineDied) as caught:
        EngineProcess({"end": 5}, {}, start_timeout_s=60, silence_timeout_s=60, program=program)
    assert (caught.value.method, caught.value.exit_cause) == ("start", "exit code 5")
    assert caught.value.log_tail == "started with ['end']"
    with pytest.raises(EngineError) as not_there:
        EngineProcess({}, {}, start_timeout_s=60, silence_timeout_s=60, program=program, python="/no/such/python")
    assert not_there.value.method == "start" and isinstance(not_there.value.__cause__, FileNotFoundError)


def test_the_process_ends_with_the_object(program: Path) -> None:
    engine = EngineProcess({}, {}, start_timeout_s=60, silence_timeout_s=60, program=program)
    pid = engine.pid
    del engine
    assert has_ended(pid)


STARTING = """
import multiprocessing, os, pathlib, time

def serve(folder, depth):
    if depth:
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(folder, depth - 1))
        process.start()
    (folder / f"{depth}.pid").write_text(str(os.getpid()))
    (folder / f"{depth}.pid").rename(folder / str(depth))
    time.sleep(600)
"""
"""An engine's processes while it starts: the engine core starts its workers, and all are busy."""

VLLM = {
    "__init__.py": "",
    "engine/__init__.py": "",
    "engine/arg_utils.py": "AsyncEngineArgs = dict",
    "usage/__init__.py": "",
    "usage/usage_lib.py": "class UsageContext:\n    LLM_CLASS = None",
    "v1/__init__.py": "",
    "v1/engine/__init__.py": "",
    "v1/engine/async_llm.py": """
import pathlib
from starting import serve

class AsyncLLM:
    @staticmethod
    def from_engine_args(arguments, usage_context):
        serve(pathlib.Path(arguments["model"]), 2)
""",
}


def test_all_processes_of_an_engine_end_with_a_worker_that_is_killed_while_it_starts(tmp_path: Path) -> None:
    for name, content in VLLM.items():
        (tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / name).write_text(content)
    (tmp_path / "starting.py").write_text(STARTING)
    start = (
        "from workers.generate.vllm.engine_process import EngineProcess\n"
        f"EngineProcess({{'model': {str(tmp_path)!r}}}, {{}}, start_timeout_s=60, silence_timeout_s=60)"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", os.getcwd())])
    worker = subprocess.Popen([sys.executable, "-c", start], env={**os.environ, "PYTHONPATH": path})
    deadline = time.monotonic() + 60
    while not all((tmp_path / str(depth)).exists() for depth in range(3)):
        assert worker.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    worker.kill()
    worker.wait()
    for depth in range(3):
        assert has_ended(int((tmp_path / str(depth)).read_text()))
