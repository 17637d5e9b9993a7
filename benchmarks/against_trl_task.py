"""What both sides of ``against_trl.py`` share: the task, the settings, and the blocks of steps that are timed."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from pathlib import Path

__all__ = ["DIGITS", "PAD", "PROMPT", "RESPONSE", "Blocks", "Settings", "answer", "random_prompt", "share_correct"]

DIGITS = "0123456789"
PAD, EOS = "<pad>", "<eos>"
PROMPT, RESPONSE = 8, 16
"""[tokens] Lengths of every prompt, and of every response."""
PROMPTS, SAMPLES = 32, 8
"""Prompts of a step, and responses to each."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one side, as JSON in the only argument of its program."""

    directory: str
    """Directory with the initial model and tokenizer in ``model``, the prompts, and the socket of the parent."""
    socket: str
    """Socket on which the parent waits for this side."""
    ranks: int
    """Processes with a copy of the model each."""
    threads: int
    """Threads of each of them."""
    steps: int
    """Steps of the run, of one optimizer step each."""
    micro_batch: int
    """[rows] Rows of all ranks in one pass forward and backward."""
    lr: float = 3e-4
    """Learning rate of Adam, constant."""
    seed: int = 0
    """Seed of the order of the prompts, and of sampling."""

    @classmethod
    def parsed(cls, text: str) -> Settings:
        return cls(**json.loads(text))

    @property
    def model(self) -> Path:
        return Path(self.directory) / "model"

    @property
    def prompts(self) -> Path:
        return Path(self.directory) / "prompts.jsonl"


def random_prompt(numbers: random.Random) -> str:
    return "".join(numbers.choices(DIGITS, k=PROMPT))


def answer(prompt: str) -> str:
    """Return the right response: every digit is the one ``PROMPT`` tokens before, plus one (mod 10)."""
    text = prompt
    while len(text) < PROMPT + RESPONSE:
        text += DIGITS[(int(text[-PROMPT]) + 1) % 10]
    return text[PROMPT:]


def share_correct(prompt: str, response: str) -> float:
    """Return the share of the digits of a response that are right, which is its reward."""
    return sum(left == right for left, right in zip(response, answer(prompt), strict=False)) / RESPONSE


class Blocks:
    """Runs as many steps at a time as the parent asks for, and reports the seconds and the score of each.

    Args:
        socket: on which the parent listens. None on ranks that only follow.
        agree: makes all ranks wait for rank 0, and returns its value on each of them.
    """

    def __init__(self, socket: str | None, agree: Callable[[int], int] = lambda value: value) -> None:
        self.connection = None if socket is None else Client(socket)
        self.agree = agree
        self.left = 0
        self.done: list[tuple[float, float]] = []
        self.started = 0.0

    def start(self) -> bool:
        """Wait for the next block, and return whether there is one."""
        if self.connection is not None:
            self.connection.send(self.done)
        self.left = self.agree(0 if self.connection is None else int(self.connection.recv()))
        self.done, self.started = [], time.perf_counter()
        return self.left > 0

    def step_ended(self, score: float) -> bool:
        """Record a step, and return whether there is another one."""
        now = time.perf_counter()
        self.done.append((now - self.started, score))
        self.started, self.left = now, self.left - 1
        return self.left > 0 or self.start()
