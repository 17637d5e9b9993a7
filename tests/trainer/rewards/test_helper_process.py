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
from trainer.rewards.helper_process import HelperProcess
from trainer.rollout import episode_loop

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


@pytest.mark.parametrize("code", [processes.SERVER, episode_loop.SERVER], ids=["rewards", "episodes"])
def test_a_process_whose_program_ends_before_its_first_message_ends_without_an_error(code: str) -> None:
    ours, theirs = Pipe()
    command = [sys.executable, "-c", code, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as process:
        ours.close()
        theirs.close()
        assert process.communicate()[1] == b"" and process.returncode == 0


@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), signal.SIGKILL)", -9), ("os._exit(3)", 3)])
def test_a_process_that_ends_while_it_starts_is_an_error(end: str, code: int) -> None:
    with pytest.raises(ConfigError) as raised:
        HelperProcess.start(f"import os, signal; {end}", None, "nothing", "rewards.functions", 1.0)
    assert raised.value.key == "rewards.functions" and f"exit code {code} " in str(raised.value)


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
