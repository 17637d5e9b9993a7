"""Environments, which reply to the policy between its turns: the interface, and those that a configuration names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from mcontroller.config.checks import check_at_least
from mcontroller.config.fields import strict_fields
from mcontroller.config.registry import Registry
from mcontroller.errors import ConfigError
from mcontroller.ppo.datasets.prompts import Demonstration
from mcontroller.ppo.datasets.tokenizers import TextTokenizer

__all__ = ["ENVIRONMENTS", "Conversation", "Demonstrating", "MultiTurnConfig", "TurnEnvironment", "make_environment"]


@dataclass
class Conversation:
    """One response so far: the exact tokens that the policy sampled, and those that the environment replied with.

    Attributes:
        prompt: token ids of the prompt, without padding.
        problem: the further columns of the problem, such as ``answer`` and ``record``.
        tokens: token ids of the response.
        own: for each token, 1 if the policy sampled it, 0 if it is the environment's.
        log_probs: for each token, that of the policy when it sampled it; 0 for the environment's.
        experts: the experts of the first tokens of prompt and response, in parts ``[tokens, layers, experts]``, if the
            rollout returns them; tokens after the last turn of the policy have none.
        turn: the position in ``tokens`` at which the policy's last turn begins.
        turns: the number of turns that the policy has begun.
        ended: whether the policy or the environment has ended the response. A response that is over without it was cut
            off for lack of room or turns.
    """

    prompt: list[int]
    problem: Mapping[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    turn: int = 0
    turns: int = 1
    ended: bool = False

    @property
    def last_turn(self) -> list[int]:
        """Token ids of the policy's last turn."""
        return self.tokens[self.turn :]

    def sampled(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Append tokens that the policy sampled to its turn."""
        self.tokens += tokens
        self.log_probs += log_probs
        self.own += [1] * len(tokens)

    def replied(self, tokens: Sequence[int]) -> None:
        """Append the environment's tokens, and begin the policy's next turn."""
        self.tokens += tokens
        self.log_probs += [0.0] * len(tokens)
        self.own += [0] * len(tokens)
        self.turn, self.turns = len(self.tokens), self.turns + 1


class TurnEnvironment(Protocol):
    """The other side of responses of several turns: tools, a simulated world or a user."""

    @property
    def stop_token_ids(self) -> Collection[int]:
        """Tokens that end a turn of the policy, such as the end of a tool call. The response may go on after them."""

    def reply(self, conversations: Sequence[Conversation]) -> Sequence[Sequence[int] | None]:
        """Return the tokens to append to each response; None if the response has ended.

        A mistake of the policy, such as a malformed tool call, is answered with tokens too. What this method raises
        ends the run.

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


ENVIRONMENTS: Registry[Callable[..., TurnEnvironment]] = Registry("environment", key="multi_turn.environment")
"""Functions from the tokenizer and the options of ``multi_turn`` to an environment, by name."""


@strict_fields
@dataclass(frozen=True, slots=True)
class MultiTurnConfig:
    """Responses of several turns, between which an environment replies."""

    environment: str | None = None
    """Name of a registered environment. None: the responses have one turn."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the environment."""
    max_turns: int = 8
    """[turns] Most turns of the policy in one response."""

    def __post_init__(self) -> None:
        check_at_least("multi_turn.max_turns", self.max_turns, 1)


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
