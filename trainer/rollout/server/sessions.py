"""Sessions of agents: their conversations, as trajectories of exact tokens, and the turns that are generated."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import logging
import secrets
import time
from array import array
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mcontroller.errors import ConfigError, DataError
from trainer.data.tokenizers import TextTokenizer
from trainer.rollout.seeds import seed_of
from trainer.rollout.server.chat_tokens import (
    PrefixChange,
    prefix_change,
    rendered_text,
    text_after_reply,
    tokens_after_reply,
)
from trainer.rollout.server.request_error import reject
from trainer.rollout.server.tool_calls import ToolFormat
from trainer.rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from trainer.rollout.server.chat_requests import ChatRequest

logger = logging.getLogger(__name__)

POLL_S = 0.02
"""[s] Time between two looks at the tokens of a stream."""


@dataclass(eq=False)
class Conversation:
    """Messages, and the trajectory that they are.

    Attributes:
        messages: with the policy's.
        tools: of all its requests.
        trajectory: its tokens.
        replies: the indices of the policy's messages.
        stop: the stop token at the end of the trajectory; None: it ends with another token.
    """

    messages: list[dict[str, Any]]
    tools: list[Any]
    trajectory: Trajectory
    replies: list[int] = field(default_factory=list)
    stop: int | None = None


class Turn:
    """A choice of a request: a turn of the policy.

    Attributes:
        conversation: continued by this turn.
        index: of the choice.
        request: that it belongs to.
        start: [tokens] of the response before this turn.
        submitted: the trajectory in flight.
        tokens: token ids that have arrived.
        text: of these tokens, up to a stop text of the request, which is ``stopped_at``.
        content, calls: once the turn has ended: the text around the tool calls, and these as OpenAI's API has them.
        reason: once the turn has ended: ``stop``, ``length`` or ``tool_calls``.
    """

    def __init__(self, conversation: Conversation, index: int, request: ChatRequest, tool_format: ToolFormat) -> None:
        self.conversation, self.index, self.request, self._format = conversation, index, request, tool_format
        self.start = len(conversation.trajectory.tokens)
        self.submitted: Future[Trajectory] = Future()
        self.tokens: list[int] = []
        self.text, self.content, self.reason = "", "", ""
        self.stopped_at: str | None = None
        self.calls: list[dict[str, Any]] = []
        self._sent = ""

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens in front of this turn."""
        return len(self.conversation.trajectory.prompt) + self.start

    @property
    def log_probs(self) -> list[float]:
        """The log-probabilities of ``tokens``."""
        return self.conversation.trajectory.log_probs[self.start : self.start + len(self.tokens)].tolist()

    def read(self, tokenizer: TextTokenizer, *, is_last: bool = False) -> None:
        """Read the tokens that have arrived; unless it is the last time, not before they are 1% more than before.

        The text of all is decoded again: for every token, that would take longer than to generate it.
        """
        trajectory = self.conversation.trajectory
        end, known = len(trajectory.mask), len(self.tokens)  # the mask is the last column to grow
        if self.stopped_at is not None or end - self.start - known <= (0 if is_last else known // 100):
            return
        self.tokens = made = trajectory.tokens[self.start : end].tolist()
        self.text = tokenizer.decode(made)
        ends = []
        for stop in self.request.stop:
            if (place := self.text.find(stop)) >= 0:
                counts = range(1, len(made))
                count = 1 + bisect_left(counts, True, key=lambda count: stop in tokenizer.decode(made[:count]))
                ends.append((count, place, stop))
        if ends:
            count, place, self.stopped_at = min(ends)  # the first one, however many tokens have arrived at once
            self.tokens, self.text = made[:count], self.text[:place]

    def next_text(self) -> str:
        """Return the text that can be sent: it is neither in a stop text nor in a tool call, however it goes on."""
        if self.reason:
            text = self.content
        else:
            starts = [*self.request.stop, *(self._format.starts if self.request.tools else ())]
            text = self.text[: _end_before(self.text, starts)].rstrip("\N{REPLACEMENT CHARACTER}")
        sent, self._sent = self._sent, max(self._sent, text, key=len)
        return self._sent[len(sent) :]

    def end(self, numbers: itertools.count[int]) -> None:
        """Complete the conversation with this turn.

        Args:
            numbers: of the tool calls.
        """
        made = self.conversation.trajectory
        if self.stopped_at is not None:
            made = self.conversation.trajectory = _shortened(made, self.start + len(self.tokens))
        self.content = self.text
        calls: list[tuple[str, str]] = []
        if self.request.functions:
            whole = self.tokens if self.stopped_at is None else ()
            self.content, calls = self._format.parse(self.text, self.request.functions, whole)
        self.calls = [
            # some templates ask for nine letters and digits
            {"id": f"call{next(numbers):05d}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ]
        self.conversation.replies.append(len(self.conversation.messages))
        self.conversation.messages.append(self.message)
        if self.stopped_at is None and made.ended in ("stop", "turn"):
            self.conversation.stop = made.tokens[-1]
        is_cut = self.stopped_at is None and made.ended in ("length", "max_tokens")
        self.reason = "tool_calls" if calls else "length" if is_cut else "stop"

    @property
    def message(self) -> dict[str, Any]:
        """The message of the assistant."""
        if not self.calls:
            return {"role": "assistant", "content": self.content}
        return {"role": "assistant", "content": self.content.strip() or None, "tool_calls": self.calls}


class ChatSession:
    """The requests of one agent, which has the key of the session.

    Attributes:
        name: of the session.
        api_key: of the agent's client. Nobody without it can take part in the session.
        conversations: one, and another for each request that did not continue the messages and tools of one.
        prefix_changes: the first text of the conversations, if there is one, that the chat template has written
            otherwise than it was recorded. The trajectories have the recorded tokens.
        error: why it has ended without a trajectory; None: it has not.
    """

    def __init__(
        self, rollout: Any, tokenizer: TextTokenizer, tool_format: ToolFormat, name: str, seed: int | None
    ) -> None:
        self.rollout, self.name, self.seed = rollout, name, seed
        self.api_key = secrets.token_urlsafe()
        self.conversations: list[Conversation] = []
        self.prefix_changes: list[PrefixChange] = []
        self.error: str | None = None
        self.is_closed = self.in_use = False
        self._tokenizer, self._format, self._numbers = tokenizer, tool_format, itertools.count()
        self._turns: list[Turn] = []
        self._parent: Conversation | None = None

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories of the conversations."""
        return [conversation.trajectory for conversation in self.conversations]

    def cancel(self) -> None:
        """End the session: no request is accepted any more, and one that is running is cancelled."""
        self.is_closed = True
        for turn in self._turns:
            turn.submitted.cancel()

    def close(self) -> list[Trajectory]:
        """End the session, and return its trajectories.

        Raises:
            DataError: a request is running, a client has disconnected in the middle of one, or there was none.
        """
        if self.in_use:
            self.error = self.error or "a request is running"
        self.cancel()
        if self.error is None and not self.conversations:
            self.error = "no request has arrived"
        if self.error is not None:
            raise DataError(f"session {self.name!r} has no trajectory: {self.error}", session=self.name)
        made, self.conversations = self.trajectories, []
        return made

    def begin(self) -> None:
        """Begin a request.

        Raises:
            RequestError: another one is running, or the session has ended.
        """
        if self.in_use:
            reject(f"session {self.name!r} is in use by another request: open one for each agent")
        if self.error is not None:
            reject(f"session {self.name!r} has ended: {self.error}")
        self.in_use = True

    def end(self) -> None:
        """End a request; a session whose client disconnects in the middle of one has ended."""
        if self._turns and not self.is_closed:
            self.error = self.error or "its client has disconnected in the middle of a request"
        self._abandon()
        self.in_use = False

    async def submit(self, request: ChatRequest) -> list[Turn]:
        """Submit a request to the rollout, and return its turns.

        Raises:
            RequestError: the session has been closed.
            ConfigError, DataError: the chat template or the rollout rejects it.
        """
        parent = max(
            (known for known in self.conversations if self._continues(known, request)),
            key=lambda known: len(known.messages),
            default=None,
        )
        self._parent = parent
        try:
            for index in range(request.n):  # in threads: a long conversation takes long to render and to encode
                self._turns.append(await asyncio.to_thread(self._submitted, request, parent, index))
        except (ConfigError, DataError):
            self._abandon()
            raise
        if self.is_closed:
            self._abandon()
            reject(f"session {self.name!r} was closed")
        return [*self._turns]

    def _submitted(self, request: ChatRequest, parent: Conversation | None, index: int) -> Turn:
        conversation = self._opened(request, index) if parent is None else self._continued(parent, request)
        turn = Turn(conversation, index, request, self._format)
        options = {"seed": conversation.trajectory.seed, **request.settings}
        if index and type(options["seed"]) is int and (parent is not None or request.seed is not None):
            options["seed"] = seed_of(options["seed"], "choice", index)
        options["stream"] = request.stream or bool(request.stop)  # a stop text ends a turn at once
        turn.submitted = self.rollout.submit(conversation.trajectory, **options)
        return turn

    @staticmethod
    def _continues(known: Conversation, request: ChatRequest) -> bool:
        return known.tools == request.functions and _same_conversation(known.messages, request.conversation)

    def _opened(self, request: ChatRequest, index: int) -> Conversation:
        count = len(self.conversations) + index
        text = rendered_text(self._tokenizer, request.conversation, request.functions)
        seed = self.seed if self.seed is None or not count else seed_of(self.seed, "conversation", count)
        trajectory = Trajectory(array("q", self._tokenizer.encode(text)), seed=seed)
        return Conversation([*request.conversation], request.functions, trajectory)

    def _continued(self, parent: Conversation, request: ChatRequest) -> Conversation:
        messages = [*parent.messages, *request.conversation[len(parent.messages) :]]
        trajectory = copy.deepcopy(parent.trajectory)
        trajectory.replied(self._tokens_after(messages, parent))
        if not self.prefix_changes:
            recorded, reply = trajectory.prompt + trajectory.tokens, parent.replies[-1]
            change = prefix_change(self._tokenizer, messages, parent.tools, reply, recorded)
            if change is not None:
                self.prefix_changes.append(change)
                logger.warning(
                    "session %r: the chat template writes %r, and the tokens that were recorded, and stay, are %r",
                    self.name,
                    *reversed(change.excerpts()),
                )
        return Conversation(messages, parent.tools, trajectory, [*parent.replies])

    def _tokens_after(self, messages: list[dict[str, Any]], parent: Conversation) -> list[int]:
        """Return the tokens between the last message of the policy and its next one.

        Some templates reject results of tools without their calls, or end calls with another token than texts; and the
        policy may end a message with a stop token that the template never writes.
        """
        reply = parent.replies[-1]
        is_call, errors = "tool_calls" in messages[reply], []
        for keeps_calls, stop in ((False, parent.stop), (True, parent.stop), (False, None)):
            try:
                after = text_after_reply(self._tokenizer, messages, reply, parent.tools, keeps_calls=keeps_calls)
                return tokens_after_reply(self._tokenizer, after, stop, is_within_call=keeps_calls and is_call)
            except DataError as error:
                errors.append(error)
        raise errors[0]

    async def generate(
        self, turns: Sequence[Turn], advance: Callable[[Any], Awaitable[None]], *, timeout_s: float
    ) -> AsyncIterator[Turn]:
        """Yield turns that have new tokens, or have ended, until all have; then record the conversations.

        Args:
            turns: of ``submit``.
            advance: makes a step of a rollout whose engine does nothing by itself, or waits for the one in flight.
            timeout_s: [s] the longest time of all turns.

        Raises:
            RequestError: a turn has failed or was cancelled, or the time is over.
        """
        changed, loop = asyncio.Event(), asyncio.get_running_loop()
        for turn in turns:
            turn.submitted.add_done_callback(lambda _: loop.call_soon_threadsafe(changed.set))
        until, pending = time.monotonic() + timeout_s, list(turns)
        is_watched = turns[0].request.stream or bool(turns[0].request.stop)
        while pending:
            if self.rollout.stepped is None:
                with contextlib.suppress(TimeoutError):
                    left = POLL_S if is_watched else max(until - time.monotonic(), 0.0)
                    await asyncio.wait_for(changed.wait(), left)
                changed.clear()
            elif not any(turn.submitted.done() for turn in pending):
                await advance(self.rollout)
            for turn in [*pending]:
                is_done = turn.submitted.done()
                if is_done:
                    self._raise_failure(turn.submitted)
                turn.read(self._tokenizer, is_last=is_done)
                if is_done or turn.stopped_at is not None:
                    turn.submitted.cancel()
                    pending.remove(turn)
                    turn.end(self._numbers)
                yield turn
            if pending and time.monotonic() > until:
                self.error = f"a turn took longer than {timeout_s} s"
                reject(f"session {self.name!r} has ended: {self.error}", status=504, code="timeout")
        place = len(self.conversations) if self._parent is None else self.conversations.index(self._parent)
        self.conversations[place : place + 1] = [turn.conversation for turn in turns]
        self._turns = []

    def _raise_failure(self, submitted: Future[Trajectory]) -> None:
        if self.is_closed:
            reject(f"session {self.name!r} was closed")
        if submitted.cancelled():
            self.error = "its trajectory was cancelled"
            reject(f"session {self.name!r} has ended: {self.error}")
        error = submitted.exception()
        if isinstance(error, DataError | ConfigError):
            self._abandon()
        if error is not None:
            raise error

    def _abandon(self) -> None:
        """Cancel the turns in flight."""
        turns, self._turns = self._turns, []
        for turn in turns:
            turn.submitted.cancel()


def _same_conversation(before: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the messages begin with those before, and go on."""
    return len(messages) > len(before) > 0 and [*map(_said, before)] == [*map(_said, messages[: len(before)])]


def _said(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a message says.

    Clients add a name to the policy's messages, write no content in several ways, drop the space around it, and write
    the JSON of arguments again.
    """
    content = message.get("content") or ""
    if message["role"] == "assistant":
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [(function["name"], _value(function["arguments"])) for function in functions]
        return "assistant", content.strip(), calls
    return message["role"], message.get("name"), content, message.get("tool_call_id")


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _end_before(text: str, starts: Sequence[str]) -> int:
    """Return the place before the first of these texts, or before the end of the text if it may begin one."""
    end = min((place for start in starts if (place := text.find(start)) >= 0), default=len(text))
    sizes = [size for start in starts for size in range(1, len(start)) if text.endswith(start[:size], 0, end)]
    return end - max(sizes, default=0)


def _shortened(trajectory: Trajectory, length: int) -> Trajectory:
    """Return a copy of a trajectory that ends a turn after a number of tokens of the response."""
    experts = trajectory.experts_before(length)
    made = copy.deepcopy(trajectory)  # a step in flight may still add to the other
    for column in (made.tokens, made.mask, made.log_probs, made.versions, made.temperatures):
        del column[length:]
    made.experts, made.ended = experts, "turn"
    return made
