"""Processes that run functions of a program: killed while they start, and left by a program that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

import pytest

from mcontroller.errors import ConfigError
from trainer.rewards import processes
from trainer.rewards.config import RewardFunctionConfig
from trainer.rewards.helper_process import STARTS, HelperProcess
from trainer.rewards.processes import ScoreOutcome, ScoringProcesses, Task
from trainer.rollout import episode_loop

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]

KILLED = """
import os, signal, sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
def end():
    with open({starts!r}, "a") as file:
        file.write("x")
    if os.stat({starts!r}).st_size <= {killed}:
        os.kill(os.getpid(), signal.{signal})
{before}
connection.recv()
{after}
connection.send(None)
connection.recv()
"""


@pytest.mark.parametrize("code", [processes.SERVER, episode_loop.SERVER], ids=["rewards", "episodes"])
def test_a_process_whose_program_ends_before_its_first_message_ends_without_an_error(code: str) -> None:
    ours, theirs = Pipe()
    command = [sys.executable, "-c", code, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as process:
        ours.close()
        theirs.close()
        assert process.communicate()[1] == b"" and process.returncode == 0


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_that_is_killed_while_it_starts_is_replaced(tmp_path: Path, moment: str, name: str) -> None:
    places = {"before": "", "after": ""} | {moment: "end()"}
    code = KILLED.format(starts=str(tmp_path / "starts"), killed=STARTS - 1, signal=name, **places)
    large = "x" * (4 << 20)  # more than a connection takes from a writer before its reader reads
    helper = HelperProcess.start(code, large, "nothing", "key")
    assert helper.replaced == STARTS - 1 and helper.process.poll() is None
    assert helper.close() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("end", "starts"),
    [("os.kill(os.getpid(), signal.SIGKILL)", STARTS), ("os._exit(3)", 1)],
)
def test_a_process_that_exits_or_is_always_killed_is_an_error(tmp_path: Path, end: str, starts: int) -> None:
    code = f"import os, signal; open({str(tmp_path / 'starts')!r}, 'a').write('x'); {end}"
    with pytest.raises(ConfigError) as raised:
        HelperProcess.start(code, None, "nothing", "rewards.functions")
    assert raised.value.key == "rewards.functions" and len((tmp_path / "starts").read_text()) == starts


def test_scores_are_complete_although_processes_are_killed_while_they_start(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "import os, signal\n"
        f"with open({str(tmp_path / 'starts')!r}, 'a') as file:\n"
        "    file.write('x')\n"
        "if os.stat(file.name).st_size in (1, 3):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def score(response):\n"
        "    return float(response)\n"
    )
    pool = ScoringProcesses({"score": RewardFunctionConfig(f"{file}:score")}, processes=2, timeout_s=30.0)
    actual = pool.run([Task("score", [{"response": str(row)}], [row]) for row in range(4)])
    pool.close()
    assert actual == {"score": {row: ScoreOutcome(float(row)) for row in range(4)}}
    assert pool.replaced == 2


DRIVER = """
import sys, time
from trainer.rewards.helper_process import HelperProcess
helper = HelperProcess(sys.argv[1])
time.sleep(600)
"""
BUSY = """
import re, subprocess
file = open({fifo!r}, "w")
subprocess.Popen(["sleep", "600"], pass_fds=[file.fileno()])
print("busy", file=file, flush=True)
re.match("(a+)+$", "a" * 60 + "b")  # holds the interpreter for years
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_a_busy_process_and_its_children_end_with_a_killed_program(tmp_path: Path, signal_number: int) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = [sys.executable, "-c", DRIVER, BUSY.format(fifo=str(fifo))]
    driver = subprocess.Popen(command)
    with open(fifo) as file:
        assert file.readline() == "busy\n"
        driver.send_signal(signal_number)
        assert driver.wait() == -signal_number
        assert file.read() == ""  # the end of the file: no process has it open
