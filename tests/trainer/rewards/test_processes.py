"""Processes of reward functions that are killed or stopped, and the children of late ones."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.rewards.config import RewardFunctionConfig
from trainer.rewards.processes import ScoreOutcome, ScoringProcesses, Task

SCORES = Path(__file__).with_name("scores.py")
LARGE = "x" * (4 << 20)
"""More than a pipe takes from a writer before its reader reads."""

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


@pytest.fixture
def pool() -> Iterator[ScoringProcesses]:
    functions = {name: RewardFunctionConfig(f"{SCORES}:{name}") for name in ("process_id", "starts_a_child")}
    made = ScoringProcesses(functions, processes=2, timeout_s=2.0)
    yield made
    made.close()


def scored(pool: ScoringProcesses, name: str, *responses: str) -> list[ScoreOutcome]:
    """Score every response in a separate task."""
    outcomes = pool.run([Task(name, [{"response": response}], [row]) for row, response in enumerate(responses)])[name]
    return [outcomes[row] for row in range(len(responses))]


def process_ids(pool: ScoringProcesses) -> list[int]:
    return [int(outcome.score or 0) for outcome in scored(pool, "process_id", "a", "b")]


def test_a_process_that_was_killed_while_it_was_idle_is_replaced(pool: ScoringProcesses) -> None:
    killed = process_ids(pool)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    actual = process_ids(pool)
    assert all(actual) and not set(actual) & set(killed)


def test_a_stopped_process_ends_at_the_deadline_and_is_replaced(pool: ScoringProcesses) -> None:
    stopped = process_ids(pool)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    late = scored(pool, "process_id", LARGE, LARGE)
    assert [outcome.error for outcome in late] == ["it did not return within 2 s"] * 2
    actual = process_ids(pool)
    assert all(actual) and not set(actual) & set(stopped)


@pytest.mark.parametrize(
    ("suffix", "error"),
    [("hang", "it did not return within 2 s"), ("die", "its process ended with exit code 7")],
)
def test_children_of_a_function_end_with_its_process(
    pool: ScoringProcesses, tmp_path: Path, suffix: str, error: str
) -> None:
    path = tmp_path / suffix
    assert [outcome.error for outcome in scored(pool, "starts_a_child", str(path))] == [error]
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits until the child has ended
