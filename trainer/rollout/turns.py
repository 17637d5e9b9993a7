"""Responses of several turns, between which an environment replies."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from mcontroller.config.registry import Registry
from mcontroller.errors import ConfigError, DataError
from trainer.config import MultiTurnConfig
from trainer.data.prompts import Demonstration
from trainer.data.tokenizers import TextTokenizer
from trainer.rollout.episode_loop import EpisodeRollout
from trainer.rollout.episodes import Episodes
from trainer.rollout.server.tool_calls import TOOL_FORMATS, tool_format
from trainer.rollout.trajectory import Trajectory
from workers.generate.vllm.interpreter import is_present
from workers.planning import is_planned

ENVIRONMENTS: Registry[Callable[..., TurnEnvironment]] = Registry("environment", key="multi_turn.environment")
"""Functions from the tokenizer and the options of ``multi_turn`` to an environment, by name."""


class TurnEnvironment(Protocol):
    """The other side of responses of several turns: tools, a simulated world or a user."""

    @property
    def stop_token_ids(self) -> Collection[int]:
        """Tokens that end a turn of the policy, such as the end of a tool call. The response may go on after them."""

    def reply(self, conversations: Sequence[Trajectory]) -> Sequence[Sequence[int] | None]:
        """Return the tokens to append to each response; None if the response has ended.

        A mistake of the policy, such as a malformed tool call, is answered with tokens too. What this method raises
        costs the response, which is counted and not trained on.

        Args:
            conversations: responses whose last turn ended with one of ``stop_token_ids``, to be read only.
        """


@runtime_checkable
class Demonstrating(Protocol):
    """The optional method of an environment that can show responses of several turns to the supervised phase."""

    def demonstrate(self, problem: Mapping[str, Any]) -> Demonstration:
        """Return a right response to a problem, with the environment's replies in it.

        Args:
            problem: ``prompt``, ``answer`` and ``record`` of the problem.
        """


def make_environment(config: MultiTurnConfig, tokenizer: TextTokenizer) -> TurnEnvironment | None:
    """Return the environment of a configuration, if it names one.

    Raises:
        ConfigError: there is no such environment, or it rejects the tokenizer or an option.
    """
    if config.environment is None:
        return None
    make = ENVIRONMENTS.get_or_raise(config.environment)
    try:
        inspect.signature(make).bind(tokenizer, **config.options)
    except TypeError as error:
        raise ConfigError(
            f"multi_turn.options do not fit the environment {config.environment!r}: {error}", key="multi_turn.options"
        ) from error
    return make(tokenizer, **config.options)


def make_episodes(config: MultiTurnConfig, tokenizer: Any, vllm_python: str | None = None) -> Episodes | None:
    """Return the episodes of a configuration, if it names a function.

    Args:
        config: of turns and episodes.
        tokenizer: of the policy.
        vllm_python: the interpreter of the engines if they are vLLM's.

    Raises:
        ConfigError: the function cannot be imported, is not async, or does not take the options; vLLM has no such
            parser of tool calls.
    """
    if config.episode is None:
        return None
    options, parser = dict(config.options), config.options.get("tool_calls")
    if parser is not None and parser not in TOOL_FORMATS:
        python = options.setdefault("vllm_python", vllm_python)
        if python is None or (is_present(python) and not is_planned()):
            tool_format(parser, tokenizer, python)
    limits = {"processes": config.processes, "concurrency": config.concurrency, "timeout_s": config.timeout_s}
    return Episodes(config.episode, options, tokenizer=tokenizer, **limits)  # type: ignore[arg-type]


class MultiTurnRollout(Episodes):
    """Episodes in the controller: the policy writes a turn, an environment replies, until the response ends.

    A response ends at a stop token of the batch, if the environment says so, after ``max_turns``, or when the next turn
    has no room in ``response_length``. All turns and replies of a response together have that length. ``truncated`` is
    true for responses that ended for lack of room or turns.

    Args:
        environment: replies to the turns that end with one of its ``stop_token_ids``.
        max_turns: [turns] most turns of the policy in one response.
    """

    def __init__(self, environment: TurnEnvironment, max_turns: int) -> None:
        options = {"environment": environment, "max_turns": max_turns}
        super().__init__(episode_of_turns, options, processes=0, concurrency=sys.maxsize, timeout_s=math.inf)


async def episode_of_turns(
    rollout: EpisodeRollout, problem: Mapping[str, Any], *, environment: TurnEnvironment, max_turns: int
) -> Trajectory:
    """Return a response of turns, between which the environment replies.

    Raises:
        DataError: the environment returned another number of replies than one.
    """
    asks, others = environment.stop_token_ids, {name: value for name, value in problem.items() if name != "prompt_ids"}
    made = await rollout.submit(Trajectory(problem["prompt_ids"], others), stop_token_ids=asks)
    while made.ended == "turn":
        made.ended = "length"
        if made.turns == max_turns or len(made.tokens) == rollout.response_length:
            break
        replies = environment.reply([made])
        if len(replies) != 1:
            raise DataError(
                f"{type(environment).__name__}.reply returned {len(replies)} replies to 1 responses",
                replies=len(replies),
                responses=1,
            )
        if replies[0] is None:
            made.ended = "environment"
        elif len(made.tokens) + len(replies[0]) < rollout.response_length:
            made.replied(list(replies[0]))
            made = await rollout.submit(made, stop_token_ids=asks)
    return made
