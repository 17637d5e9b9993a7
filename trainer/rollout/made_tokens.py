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

MAX_METRICS = 64
"""The most metrics of an episode."""


class EpisodeError(MControllerError):
    """An episode made no trajectory.

    Attributes:
        kind: of ``FAILURE_KINDS``, which is ``ended`` of the trajectory in its place.
    """

    kind: str


@dataclass(eq=False)
class Turn:
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


def checked_trajectory(turns: Collection[Turn], returned: Any, limits: Mapping[str, Any]) -> Trajectory:
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
    made: dict[tuple[int, ...], list[Turn]] = {}
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
    """Raise EpisodeError unless tokens, marks and counts have the types and ranges of a trajectory."""
    for name, end in (("prompt", 1 << 63), ("tokens", vocab_size), ("mask", 2)):  # submit checks the prompt further
        column = getattr(returned, name)
        is_array = isinstance(column, array) and column.typecode == ARRAYS[name]
        if not is_array or not (name == "prompt" or 0 <= min(column, default=0) <= max(column, default=0) < end):
            shown = f"{min(column)} to {max(column)}" if is_array else type(column).__name__
            raise EpisodeError(f"its {name} has {shown}; expected integers from 0 to {end - 1}", kind="invalid")
    length = len(returned.tokens)
    for name, least, most in (("turn", 0, length), ("turns", 1, length + 1)):
        value = getattr(returned, name)
        if type(value) is not int or not least <= value <= most:
            raise EpisodeError(
                f"its {name} is of {type(value).__name__}, or not from {least} to {most}; return the Trajectory of "
                "rollout.submit",
                kind="invalid",
            )


def _checked_outcome(returned: Trajectory) -> tuple[float | None, dict[str, float]]:
    """Return score and metrics of an episode as floats.

    Raises:
        EpisodeError: one of them is no finite number, or there are too many metrics.
    """
    metrics = returned.metrics
    is_named = isinstance(metrics, dict) and all(isinstance(name, str) for name in metrics)
    if not is_named or len(metrics) > MAX_METRICS:
        text = f"its metrics are of {type(metrics).__name__}; expected a dict of up to {MAX_METRICS} numbers by name"
        raise EpisodeError(text, kind="invalid")
    outcome = metrics if returned.score is None else {**metrics, "score": returned.score}
    for name, value in outcome.items():
        try:
            is_finite = isinstance(value, Real) and math.isfinite(value)
        except OverflowError:  # an integer that no float has
            is_finite = False
        if not is_finite:
            text = f"its {name[:60]} is of type {type(value).__name__}; expected a finite number"
            raise EpisodeError(text, kind="invalid")
    score = None if returned.score is None else float(returned.score)
    return score, {name: float(value) for name, value in metrics.items()}
