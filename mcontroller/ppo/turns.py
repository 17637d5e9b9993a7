"""Responses of several turns, between which an environment replies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mcontroller.config.registry import Registry
from mcontroller.data.protocol import DataProto
from mcontroller.errors import ConfigError, DataError
from mcontroller.ppo.config import MultiTurnConfig
from mcontroller.ppo.data import ROUTED_EXPERTS, columns
from mcontroller.ppo.datasets.prompts import Demonstration
from mcontroller.ppo.datasets.tokenizers import TextTokenizer
from mcontroller.ppo.generation import GenerateSequences

__all__ = [
    "ENVIRONMENTS",
    "Conversation",
    "Demonstrating",
    "MultiTurnRollout",
    "TurnEnvironment",
    "make_environment",
]


@dataclass
class Conversation:
    """One response so far: the exact tokens that the policy sampled, and those that the environment replied with.

    Attributes:
        prompt: token ids of the prompt, without padding.
        problem: the other columns of the problem, such as ``answer`` and ``record``.
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


LOG_PROBS = ("rollout_log_probs", "engine_log_probs")
"""The columns with a log-probability for each token; a rollout returns one of them."""


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

    def __call__(self, problems: DataProto, generate: GenerateSequences) -> DataProto:
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
        ends = set(_token_ids(problems.meta_info["eos_token_id"]))
        prompts = problems.select(["input_ids", "attention_mask"], non_tensor_batch_keys=[])
        prompts.meta_info = {
            **problems.meta_info,
            "eos_token_id": sorted(ends.union(self.environment.stop_token_ids)),
        }
        first = generate(prompts)
        longest, width = _widths(first)
        conversations = _begun(first, problems)
        _record(conversations, first, longest)
        going, calls = self._continued(conversations, ends, longest), 1
        while going:
            _record(going, generate(_contexts(going, prompts.meta_info, longest, width + longest)), longest)
            going, calls = self._continued(going, ends, longest), calls + 1
        first.meta_info["eos_token_id"] = problems.meta_info["eos_token_id"]
        return _batch(first, conversations, _metrics(conversations, calls))

    def _continued(
        self, conversations: Sequence[Conversation], ends: Collection[int], longest: int
    ) -> list[Conversation]:
        """Return the responses that go on, after the environment has replied to those that ask it."""
        asks = self.environment.stop_token_ids
        for each in conversations:
            each.ended = each.tokens[-1] in ends and each.tokens[-1] not in asks
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
            conversation.ended = reply is None
            if reply is not None and len(conversation.tokens) + len(reply) < longest:
                conversation.replied(list(reply))
                answered.append(conversation)
        return cut + answered


def _begun(first: DataProto, problems: DataProto) -> list[Conversation]:
    """Return an empty response for every row of the first turn."""
    repeats = len(first) // len(problems)
    prompts, attention = columns(first, "prompts", "attention_mask")
    kept = attention[:, : prompts.shape[1]].bool()
    others = problems.non_tensor_batch
    return [
        Conversation(ids[inside].tolist(), {name: column[row // repeats] for name, column in others.items()})
        for row, (ids, inside) in enumerate(zip(prompts, kept, strict=True))
    ]


def _record(conversations: Sequence[Conversation], turn: DataProto, longest: int) -> None:
    """Append the tokens of a turn to each response, as far as there is room."""
    responses, mask = columns(turn, "responses", "response_mask")
    tokens, kept, name = responses.tolist(), mask.sum(1).tolist(), _log_probs_of(turn)
    log_probs = [[0.0] * len(row) for row in tokens] if name is None else columns(turn, name)[0].tolist()
    experts, prompt_columns = turn.tensors().get(ROUTED_EXPERTS), _widths(turn)[1]
    for row, conversation in enumerate(conversations):
        count = min(int(kept[row]), longest - len(conversation.tokens))
        if experts is not None:
            known, before = sum(map(len, conversation.experts)), len(conversation.prompt) + len(conversation.tokens)
            conversation.experts.append(experts[row, prompt_columns - before + known : prompt_columns + count - 1])
        conversation.sampled(tokens[row][:count], log_probs[row][:count])


def _contexts(going: Sequence[Conversation], meta_info: dict[str, Any], longest: int, width: int) -> DataProto:
    """Return prompts and responses so far as prompts, padded on the left, for at most ``width`` tokens in all."""
    contexts = [each.prompt + each.tokens for each in going]
    widest = max(map(len, contexts))
    ids = torch.full((len(going), widest), int(meta_info["pad_token_id"]), dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row, context in enumerate(contexts):
        ids[row, widest - len(context) :] = torch.tensor(context)
        attention[row, widest - len(context) :] = 1
    room = max(longest - len(each.tokens) for each in going)
    meta_info = {**meta_info, "n": 1, "response_length": min(room, width - widest)}
    return DataProto.from_dict({"input_ids": ids, "attention_mask": attention}, meta_info=meta_info)


def _batch(first: DataProto, conversations: Sequence[Conversation], metrics: dict[str, float]) -> DataProto:
    """Return the batch of the first turn with the whole responses."""
    longest, width = _widths(first)
    prompts, prompt_mask = columns(first, "prompts", "attention_mask")
    responses = torch.full((len(conversations), longest), int(first.meta_info["pad_token_id"]), dtype=torch.long)
    mask, attended = torch.zeros_like(responses), torch.zeros_like(responses)
    log_probs = torch.zeros(responses.shape)
    for row, each in enumerate(conversations):
        length = len(each.tokens)
        responses[row, :length] = torch.tensor(each.tokens)
        mask[row, :length] = torch.tensor(each.own)
        log_probs[row, :length] = torch.tensor(each.log_probs)
        attended[row, :length] = 1
    attention = torch.cat((prompt_mask[:, :width], attended), 1)
    whole: dict[str, Tensor] = {
        "responses": responses,
        "response_mask": mask,
        "input_ids": torch.cat((prompts, responses), 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "truncated": torch.tensor([not each.ended for each in conversations]),
    }
    name = _log_probs_of(first)
    if name is not None:
        whole[name] = log_probs
    experts = first.tensors().get(ROUTED_EXPERTS)
    if experts is not None:
        whole[ROUTED_EXPERTS] = _experts(experts, conversations, width, longest)
    others = {name: column for name, column in first.tensors().items() if name not in whole}
    meta_info = {**first.meta_info, "metrics": {**first.meta_info.get("metrics", {}), **metrics}}
    return DataProto.from_dict({**others, **whole}, first.non_tensor_batch, meta_info)


def _experts(first: Tensor, conversations: Sequence[Conversation], width: int, longest: int) -> Tensor:
    """Return the column ``routed_experts`` of whole responses; -1 for tokens that have none."""
    column = first.new_full((len(conversations), width + longest, *first.shape[2:]), -1)
    for row, each in enumerate(conversations):
        found, start = torch.cat(each.experts), width - len(each.prompt)
        column[row, start : start + len(found)] = found
    return column


def _metrics(conversations: Sequence[Conversation], calls: int) -> dict[str, float]:
    turns = [each.turns for each in conversations]
    replies = sum(len(each.own) - sum(each.own) for each in conversations)
    return {
        "multi_turn/turns_mean": sum(turns) / len(turns),
        "multi_turn/turns_max": float(max(turns)),
        "multi_turn/reply_tokens_mean": replies / len(turns),
        "multi_turn/generate_calls": float(calls),
    }


def _widths(first: DataProto) -> tuple[int, int]:
    """Return the tokens of the longest response, and of a padded prompt."""
    responses, prompts = columns(first, "responses", "prompts")
    return responses.shape[1], prompts.shape[1]


def _log_probs_of(turn: DataProto) -> str | None:
    return next((name for name in LOG_PROBS if name in turn.tensors()), None)


def _token_ids(value: int | Sequence[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)
