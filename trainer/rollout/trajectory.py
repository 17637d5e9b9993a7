"""A response as it grows: its tokens, and who sampled each of them and how."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ARRAYS = {"prompt": "q", "tokens": "q", "mask": "b", "log_probs": "d", "versions": "q", "temperatures": "d"}
"""The type codes of the arrays of a trajectory."""
IN_FLIGHT = "submit: the trajectory is in flight: wait for its turn, or submit a copy, which is another branch"


@dataclass
class Trajectory:
    """One response so far: the exact tokens that the policy sampled, and those that an environment replied with.

    Sequences of numbers are kept as arrays, which the garbage collector does not read; lists that are passed are copied
    into arrays. To compare with a list, or add one, take ``tokens.tolist()``.

    Attributes:
        prompt: token ids of the prompt, without padding.
        problem: the other columns of the problem, such as ``answer`` and ``record``.
        tokens: token ids of the response.
        mask: for each token, 1 if the policy sampled it, 0 if it is the environment's.
        log_probs: for each token, that of the policy when it sampled it; 0 for the environment's.
        versions: for each token, the version of the policy that sampled it; -1 for the environment's.
        experts: the experts of the first tokens of prompt and response, in parts ``[tokens, layers, experts]``, if the
            rollout returns them; tokens after the last turn of the policy have none.
        seed: of the random numbers of this response, 64 bits, signed. None: ``submit`` gives it one.
        turn: the position in ``tokens`` at which the policy's last turn begins.
        turns: the number of turns that the policy has begun.
        ended: why it ended: ``stop`` at a stop token, ``turn`` at a token that ends a turn, ``length`` for lack of
            room or turns, ``max_tokens`` at the limit of its request, ``environment`` by its decision; empty while it
            goes on.
        score: of the response, if the episode that made it has one.
        metrics: other numbers that the episode reports, by name.
        temperatures: for each token, the temperature at which it was sampled, which it is scored at; 0 for the most
            probable token on request, which cannot be scored; 1 for the environment's, and if none are passed.
        seeded: the identity of the object that was submitted with ``seed``. A copy of it is another branch.
    """

    prompt: array[int]
    problem: Mapping[str, Any] = field(default_factory=dict)
    tokens: array[int] = field(default_factory=lambda: array("q"))
    mask: array[int] = field(default_factory=lambda: array("b"))
    log_probs: array[float] = field(default_factory=lambda: array("d"))
    versions: array[int] = field(default_factory=lambda: array("q"))
    experts: list[Tensor] = field(default_factory=list)
    seed: int | None = None
    turn: int = 0
    turns: int = 1
    ended: str = ""
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    temperatures: array[float] = field(default_factory=lambda: array("d"))
    seeded: int | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, code in ARRAYS.items():
            if not isinstance(getattr(self, name), array):
                setattr(self, name, array(code, getattr(self, name)))
        if not self.temperatures:
            self.temperatures.extend(array("d", (1.0,)) * len(self.tokens))

    @property
    def last_turn(self) -> list[int]:
        """Token ids of the policy's last turn."""
        return self.tokens[self.turn :].tolist()

    def experts_before(self, position: int) -> list[Tensor]:
        """Return the experts of the tokens before the last one in front of a position of the response."""
        return [torch.cat(self.experts)[: len(self.prompt) + position - 1]] if self.experts else []

    def sampled(
        self, tokens: Sequence[int], log_probs: Sequence[float], version: int = 0, temperature: float = 1.0
    ) -> None:
        """Append tokens that the policy of a version sampled at a temperature to its turn."""
        self.temperatures.extend(array("d", (temperature,)) * len(tokens))
        self.tokens.extend(tokens)
        self.log_probs.extend(log_probs)
        self.versions.extend(array("q", (version,)) * len(tokens))
        self.mask.extend(array("b", (1,)) * len(tokens))

    def replied(self, tokens: Sequence[int]) -> None:
        """Append the environment's tokens, and begin the policy's next turn."""
        self.temperatures.extend(array("d", (1.0,)) * len(tokens))
        self.tokens.extend(tokens)
        self.log_probs.extend(array("d", (0.0,)) * len(tokens))
        self.versions.extend(array("q", (-1,)) * len(tokens))
        self.mask.extend(array("b", (0,)) * len(tokens))
        self.turn, self.turns, self.ended = len(self.tokens), self.turns + 1, ""
