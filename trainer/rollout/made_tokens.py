"""What the engine made for an episode, and the check of what the episode returns."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from mcontroller.errors import MControllerError
from trainer.rollout.trajectories import Submitted
from trainer.rollout.trajectory import ARRAYS, Trajectory

FAILURE_KINDS = ("raised", "timed_out", "died", "invalid")
"""Why an episode made no trajectory; ``invalid``: what it returned cannot be trained on."""


class EpisodeError(MControllerError):
    """An episode made no trajectory.

    Attributes:
        kind: of ``FAILURE_KINDS``, which is ``ended`` of the trajectory in its place.
    """

    kind: str


@dataclass(eq=False)
class EpisodeTurn:
    """What an episode asked the policy for.

    Attributes:
        trajectory: the response up to the end of this turn, which has ended or goes on.
        before: [tokens] of the response, without this turn.
        submitted: the turn in flight.
        is_awaited: whether the episode waits for it; one that began again may not have asked yet.
        sent: [tokens] of the response that the episode has.
    """

    trajectory: Trajectory
    before: int
    submitted: Submitted | None = None
    is_awaited: bool = False
    sent: int = 0

    def context(self) -> tuple[int, ...]:
        """Return the tokens that this turn continues."""
        return (*self.trajectory.prompt, *self.trajectory.tokens[: self.before])

    def take_unsent(self) -> tuple[dict[str, Any], str]:
        """Return the tokens that the episode does not have, with all that belongs to them, and why the turn ended."""
        names = ("tokens", "log_probs", "versions", "temperatures")
        start, self.sent = self.sent, len(self.trajectory.tokens)
        return {name: getattr(self.trajectory, name)[start:] for name in names}, self.trajectory.ended


def checked_trajectory(turns: Collection[EpisodeTurn], returned: Any, limits: Mapping[str, Any]) -> Trajectory:
    """Return the trajectory with log-probabilities, versions, temperatures and experts of the engine.

    Args:
        turns: what the engine made for the episode.
        returned: what an episode returned or submitted. It may leave out the last tokens of a turn.
        limits: of the rollout: ``response_length`` and ``vocab_size``.

    Raises:
        EpisodeError: it is no trajectory, it is too long, it has something else than token ids, or the engine did
            not make a token that is marked as the policy's.
    """
    if not isinstance(returned, Trajectory):
        raise EpisodeError(f"it returned {returned}; expected a Trajectory", kind="invalid")
    length, limit = len(returned.tokens), limits["response_length"]
    _check_values(returned, limits["vocab_size"])
    score, metrics = _checked_outcome(returned)
    if length > limit or len(returned.mask) != length:
        raise EpisodeError(
            f"its response has {length} tokens and its mask {len(returned.mask)}; expected equally many, and at "
            f"most {limit}, which is rollout.response_length",
            kind="invalid",
        )
    log_probs, versions = array("d", [0.0]) * length, array("q", [-1]) * length
    temperatures = array("d", [1.0]) * length
    checked = replace(returned, log_probs=log_probs, versions=versions, temperatures=temperatures, experts=[])
    checked.score, checked.metrics = score, metrics
    tokens = checked.tokens
    made: dict[tuple[int, ...], list[EpisodeTurn]] = {}
    for turn in turns:
        if turn.trajectory.ended or turn.sent > turn.before:
            made.setdefault(turn.context(), []).append(turn)
    position = 0
    while position < length:
        if not returned.mask[position]:
            position += 1
            continue
        until = next((number for number in range(position, length) if not returned.mask[number]), length)
        for turn in made.get(tuple(returned.prompt + tokens[:position]), ()):
            after = turn.trajectory
            stop = min(until, len(after.tokens))
            if tokens[position:stop] == after.tokens[position:stop]:
                break
        else:
            raise EpisodeError(
                f"token {position} of its response is marked as the policy's, and the engine did not make it "
                "after the tokens before it: return the Trajectory of rollout.submit, and add the tokens of an "
                "environment with replied()",
                kind="invalid",
            )
        checked.log_probs[position:stop] = after.log_probs[position:stop]
        checked.versions[position:stop] = after.versions[position:stop]
        checked.temperatures[position:stop] = after.temperatures[position:stop]
        checked.seed, checked.experts = after.seed, after.experts_before(stop)
        position = stop
    return checked


def _check_values(returned: Trajectory, vocab_size: int) -> None:
    """Raise EpisodeError unless tokens, marks and counts are in the ranges of a trajectory."""
    length = len(returned.tokens)
    for name, least, most in (
        ("prompt", 0, (1 << 63) - 1),  # submit checks it further
        ("tokens", 0, vocab_size - 1),
        ("mask", 0, 1),
        ("turn", 0, length),
        ("turns", 1, length + 1),
    ):
        value = getattr(returned, name)
        column = value if isinstance(value, array) else array("q", [value])
        is_typed = column.typecode == ARRAYS.get(name, "q")
        if not is_typed or not least <= min(column, default=least) <= max(column, default=most) <= most:
            text = f"its {name} has values that are no integers from {least} to {most}"
            raise EpisodeError(f"{text}; return the Trajectory of rollout.submit", kind="invalid")


def _checked_outcome(returned: Trajectory) -> tuple[float | None, dict[str, float]]:
    """Return score and metrics of an episode as floats.

    Raises:
        EpisodeError: one of them is no finite number.
    """
    outcome = returned.metrics if returned.score is None else {**returned.metrics, "score": returned.score}
    for name, value in outcome.items():
        if not isinstance(value, Real) or not abs(value) < math.inf:
            text = f"its {name!s:.60} is of type {type(value).__name__}; expected a finite number"
            raise EpisodeError(text, kind="invalid")
    score = None if returned.score is None else float(returned.score)
    return score, {str(name): float(value) for name, value in returned.metrics.items()}
