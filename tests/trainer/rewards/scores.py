"""Reward functions of the tests, which processes import from this file."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import time

NOT_CALLABLE = 3


def right(response, answer):
    return float(response == answer)


def with_values(response, answer, level):
    return {"score": 2.0 * level, "length": len(response)}


def sometimes(response):
    """Fail in the way that the response names."""
    if response == "raise":
        raise KeyError("no such thing")
    if response == "hang":
        time.sleep(60)
    if response == "die":
        os._exit(7)
    if response == "text":
        return "good"
    if response == "nan":
        return float("nan")
    return None if response == "none" else 1.0


def lengths(response, offset=0):
    return [len(text) + offset for text in response]


def too_few(response):
    return [1.0]


def returns_text(response):
    return "good"


async def slow(response):
    """Return after a moment, or fail in the way that the response names."""
    await asyncio.sleep(60 if response == "hang" else 0.3)
    if response == "exit":
        raise SystemExit(3)
    if response == "cancel":
        raise asyncio.CancelledError
    if response == "timeout":
        raise TimeoutError("the judge did not answer")
    return 1.0


def huge(response):
    """Return an integer that is no float for every response of several characters."""
    return [1 if len(text) == 1 else 10**400 for text in response]


def none_beside(response):
    return {"score": 1.0, "length": len(response), "depth": None}


def hides_the_response(response):
    return {"score": 1.0, "response": 2.0}


def process_id(response):
    return os.getpid()


def starts_a_child(response):
    """Start a process that keeps a lock on the file that the response names, and hang, or end, as its suffix says."""
    file = open(response, "w")  # noqa: SIM115 - the child keeps it open
    fcntl.flock(file, fcntl.LOCK_EX)
    subprocess.Popen(["sleep", "600"], pass_fds=[file.fileno()])
    if response.endswith("die"):
        os._exit(7)
    time.sleep(600)
