"""Responses of several turns, between which an environment replies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from mcontroller.config.registry import Registry
from mcontroller.data.protocol import DataProto
from mcontroller.errors import ConfigError, DataError
from mcontroller.ppo.agents.trajectories import Trajectory, append_sampled, contexts, log_probs_of, trajectory_batch
from mcontroller.ppo.config import MultiTurnConfig
from mcontroller.ppo.data import columns
from mcontroller.ppo.datasets.prompts import Demonstration
from mcontroller.ppo.datasets.tokenizers import TextTokenizer


class TurnEnvironment(Protocol):
    """The other side of responses of several turns: tools, a simulated world or a user."""

    @property
    def stop_token_ids(self) -> Collection[int]:
        """Tokens that end a turn of the policy, such as the end of a tool call. The response may go on after them."""

    def reply(self, conversations: Sequence[Trajectory]) -> Sequence[Sequence[int] | None]:
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


class MultiTurnRollout:
    """A rollout function: the policy writes a turn, an environment replies, until the response ends.

    A response ends at a stop token of the batch, if the environment says so, after ``max_turns``, or when the next turn
    has no room in ``response_length``. All turns and replies of a response together have that length. Every turn is
    generated from the prompt and the token ids so far; nothing is encoded or decoded in between.

    Args:
        environment: replies to the turns that end with one of its ``stop_token_ids``.
        max_turns: [turns] most turns of the policy in one response.
    """

    def __init__(self, environment: TurnEnvironment, max_turns: int) -> None:
        self.environment = environment
        self.max_turns = max_turns

    def __call__(self, problems: DataProto, generate: Callable[[DataProto], DataProto]) -> DataProto:
        """Return the responses to problems.

        Args:
            problems: ``input_ids`` and ``attention_mask`` ``[rows, prompt]`` and other columns, which the
                environment can read; ``meta_info`` of ``generate_sequences``.
            generate: ``generate_sequences``.

        Returns:
            The columns of ``generate_sequences``. ``response_mask`` is 0 for the environment's tokens, which are in
            ``attention_mask``; their log-probabilities are 0. ``truncated``, bool ``[rows]``, is true for responses
            that ended for lack of room or turns. ``routed_experts`` of a token, if the rollout returns them, are those
            of the turn in which the next token was sampled. ``meta_info["metrics"]`` has numbers of turns.

        Raises:
            DataError: the environment returned another number of replies than there are responses.
        """
        ends = set(stop_ids(problems.meta_info["eos_token_id"]))
        prompts = problems.select(["input_ids", "attention_mask"], non_tensor_batch_keys=[])
        prompts.meta_info = {
            **problems.meta_info,
            "eos_token_id": sorted(ends.union(self.environment.stop_token_ids)),
        }
        first = generate(prompts)
        longest, width = _widths(first)
        conversations = _begun(first, problems)
        append_sampled(conversations, first, [longest] * len(conversations))
        going, calls = self.continued(conversations, ends, longest), 1
        while going:
            room = max(longest - len(each.tokens) for each in going)
            turn = generate(contexts(going, prompts.meta_info, room, width + longest))
            append_sampled(going, turn, [longest] * len(going))
            going, calls = self.continued(going, ends, longest), calls + 1
        first.meta_info["eos_token_id"] = problems.meta_info["eos_token_id"]
        metrics = {**turn_metrics(conversations), "multi_turn/generate_calls": float(calls)}
        return _batch(first, conversations, metrics)

    def continued(self, conversations: Sequence[Trajectory], ends: Collection[int], longest: int) -> list[Trajectory]:
        """Return the responses that go on, after the environment has replied to those that ask it.

        Args:
            conversations: responses of which the policy has made a turn.
            ends: the stop tokens of responses.
            longest: [tokens] the longest response.
        """
        asks = self.environment.stop_token_ids
        for each in conversations:
            each.ended = "stop" if each.tokens[-1] in ends and each.tokens[-1] not in asks else "length"
        open_ones = [each for each in conversations if len(each.tokens) < longest]
        asking = [each for each in open_ones if each.tokens[-1] in asks and each.turns < self.max_turns]
        cut = [each for each in open_ones if each.tokens[-1] not in asks and each.tokens[-1] not in ends]
        replies = self.environment.reply(asking) if asking else []
        if len(replies) != len(asking):
            raise DataError(
                f"{type(self.environment).__name__}.reply returned {len(replies)} replies to {len(asking)} responses",
                replies=len(replies),
                responses=len(asking),
            )
        answered = []
        for conversation, reply in zip(asking, replies, strict=True):
            conversation.ended = "environment" if reply is None else "length"
            if reply is not None and len(conversation.tokens) + len(reply) < longest:
                conversation.replied(list(reply))
                answered.append(conversation)
        return cut + answered


def _begun(first: DataProto, problems: DataProto) -> list[Trajectory]:
    """Return an empty response for every row of the first turn."""
    repeats = len(first) // len(problems)
    prompts, attention = columns(first, "prompts", "attention_mask")
    kept = attention[:, : prompts.shape[1]].bool()
    others = problems.non_tensor_batch
    return [
        Trajectory(ids[inside].tolist(), {name: column[row // repeats] for name, column in others.items()})
        for row, (ids, inside) in enumerate(zip(prompts, kept, strict=True))
    ]


def _batch(first: DataProto, trajectories: Sequence[Trajectory], metrics: dict[str, float]) -> DataProto:
    """Return the batch of the first turn with the whole responses."""
    longest, width = _widths(first)
    whole = trajectory_batch(
        trajectories,
        prompt_length=width,
        response_length=longest,
        pad_token_id=int(first.meta_info["pad_token_id"]),
        log_probs=log_probs_of(first),
    )
    others = {name: column for name, column in first.tensors().items() if name not in whole}
    meta_info = {**first.meta_info, "metrics": {**first.meta_info.get("metrics", {}), **metrics}}
    return DataProto.from_dict({**others, **whole}, first.non_tensor_batch, meta_info)


def turn_metrics(conversations: Sequence[Trajectory]) -> dict[str, float]:
    """Return the numbers of turns and of the environment's tokens."""
    turns = [each.turns for each in conversations]
    replies = sum(len(each.own) - sum(each.own) for each in conversations)
    return {
        "multi_turn/turns_mean": sum(turns) / len(turns),
        "multi_turn/turns_max": float(max(turns)),
        "multi_turn/reply_tokens_mean": replies / len(turns),
    }


def _widths(first: DataProto) -> tuple[int, int]:
    """Return the tokens of the longest response, and of a padded prompt."""
    responses, prompts = columns(first, "responses", "prompts")
    return responses.shape[1], prompts.shape[1]


def stop_ids(value: int | Sequence[int]) -> list[int]:
    """Return the stop tokens, of which there are one or several."""
    return [value] if isinstance(value, int) else list(value)
