"""Requests of a rollout, the engines that generate by themselves, and the router before them.

A request goes where its prefix is, and where load is least. An engine that is lost gives its requests to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from mcontroller.errors import DataError, MControllerError
from workers.config.sampling import OF_REQUESTS
from workers.generate.engine_protocol import Engine, EngineLost, RequestFailed, Sampled, check_answer
from workers.generate.sampling import later_seed

BLOCK_TOKENS = 64
"""[tokens] A prefix is known in whole blocks of this many."""
BLOCKS_KNOWN = 1 << 16
"""The most blocks that are known of an engine; the oldest are forgotten."""
UNEVEN = 8
"""[requests] How many more than the idlest engine one may have to get a request for its prefix."""
_OF_ENGINES = ("eos_token_id", *(name for name in OF_REQUESTS if name != "max_tokens"))
_TAKE_S = 0.02
_STOP_S = 5.0


class Request(Future[Any]):
    """A request to the engines of a rollout; its result is their answer. ``cancel()`` takes it out of its engine.

    Args:
        prompt: token ids of the prompt, and of the response so far.
        settings: the ``meta_info`` of ``generate_sequences``; requests with one object share a batch.
        seed: of the random numbers of the response, 64 bits, signed.
        generated: [tokens] of the response so far.
        left: [tokens] the most to add.
        streams: whether an engine is to hand out tokens while it goes on.

    Attributes:
        prompt, settings, seed, generated, left, streams: as passed, now.
        sent: the engine's answer, if it generates by itself.
        sends: how often it was sent to engines that generate by themselves.
        is_repeated: whether it was sent again because all engines were lost.
    """

    sent: Future[Sampled] | None = None
    sends = 0
    is_repeated = False

    def __init__(
        self,
        prompt: array[int],
        settings: Mapping[str, Any],
        seed: int,
        generated: int,
        left: int,
        *,
        streams: bool = False,
    ) -> None:
        super().__init__()
        self.prompt, self.settings, self.seed = prompt, settings, seed
        self.generated, self.left, self.streams = generated, left, streams

    def received(self, part: Sampled) -> None:
        """Go on after these tokens of the response."""
        self.prompt.extend(part.tokens)
        self.generated, self.left = self.generated + len(part.tokens), self.left - len(part.tokens)

    def answered(self, answer: Any) -> bool:
        """Take an engine's answer or error, and return whether the request is to be sent again, for the rest."""
        if self.set_running_or_notify_cancel():
            self.set_exception(answer) if isinstance(answer, BaseException) else self.set_result(answer)
        return False

    def cancel(self) -> bool:
        """Take it out of its engine, and return whether it had not ended."""
        was_cancelled = super().cancel()
        if was_cancelled and self.sent is not None:
            self.sent.cancel()
        return was_cancelled


class NoEngineLeft(MControllerError):
    """All engines of a rollout were lost.

    Attributes:
        engines: their names.
        cause: the error of the last one.
    """

    engines: Sequence[str]
    cause: str


class _Routed:
    """An engine with the number of its requests in flight, and the blocks of the prompts that it has had."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.in_flight = engine, 0
        self.blocks: dict[int, None] = {}

    def known(self, blocks: Sequence[int]) -> int:
        """Return how many of the first blocks of a prompt the engine has had."""
        return next((count for count, block in enumerate(blocks) if block not in self.blocks), len(blocks))

    def learn(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.blocks.pop(block, None)
            self.blocks[block] = None
        while len(self.blocks) > BLOCKS_KNOWN:
            del self.blocks[next(iter(self.blocks))]


class Router:
    """Sends requests to engines. Its methods run on one event loop.

    Args:
        engines: of one policy.

    Attributes:
        lost: the names of the engines that were lost.
        moved: how many requests were sent to another engine because theirs was lost.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._routed = [_Routed(engine) for engine in engines]
        self.lost: list[str] = []
        self.moved = 0

    async def generate(
        self, prompt: array[int], sampling: Mapping[str, Any], on_part: Callable[[Sampled], None] | None = None
    ) -> Sampled:
        """Return the response of an engine; if that is lost meanwhile, the response of another one.

        If it is lost after ``on_part`` was called, what is returned has no tokens and ``is_partial``.

        Raises:
            NoEngineLeft: all engines were lost.
            RequestFailed: an engine rejects the request.
        """
        blocks, cause, has_parts = prefix_blocks(prompt), "there was none", False

        def hand_out(part: Sampled) -> None:
            nonlocal has_parts
            has_parts = True
            assert on_part is not None
            on_part(part)

        while self._routed:
            routed = self._chosen(blocks)
            routed.learn(blocks)
            routed.in_flight += 1
            try:
                return await routed.engine.generate(prompt, sampling, on_part and hand_out)
            except EngineLost as error:
                cause = str(error)
                if routed in self._routed:
                    self._routed.remove(routed)
                    self.lost.append(routed.engine.name)
                self.moved += bool(self._routed)
                if has_parts:
                    return Sampled(array("q"), array("d"), (), is_partial=True)
            finally:
                routed.in_flight -= 1
        raise NoEngineLeft(
            f"no engine is left of {', '.join(self.lost)}: {cause}. Start the rollout's group again, as "
            "RayPPOTrainer.fit does by itself",
            engines=tuple(self.lost),
            cause=cause,
        )

    async def close(self) -> None:
        """Close the connections to all engines."""
        for routed in self._routed:
            await routed.engine.close()

    def _chosen(self, blocks: Sequence[int]) -> _Routed:
        least = min(routed.in_flight for routed in self._routed)
        free = [routed for routed in self._routed if routed.in_flight <= least + UNEVEN]
        return max(free, key=lambda routed: (routed.known(blocks), -routed.in_flight))


def prefix_blocks(prompt: array[int]) -> list[int]:
    """Return a number for every whole block of a prompt, which depends on all tokens before its end."""
    content, size = memoryview(prompt).cast("B"), BLOCK_TOKENS * prompt.itemsize
    blocks, before = [], 0
    for end in range(size, len(content) + 1, size):
        before = hash((before, bytes(content[end - size : end])))
        blocks.append(before)
    return blocks


class RequestLoop:
    """An event loop on a thread of its own, for requests that nobody drives; both end with this object."""

    def __init__(self) -> None:
        loop = self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run_until_stopped, args=(loop,), name="requests", daemon=True)
        thread.start()
        weakref.finalize(self, _stop, loop, thread)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine on the loop, and return its future, which can be cancelled."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # which cancels the tasks that are left
        runner.get_loop().run_forever()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(_STOP_S)


class RoutedEngines:
    """Sends requests to engines, which go on by themselves, through a ``Router``.

    Args:
        group: whose workers have the engines, with their weights.
        engines: that take the requests. None: those of the group.
        driven: whether requests are sent by ``step`` and answered by ``take``, on the thread of a program; otherwise on
            a thread of this object.
        vocab_size: of the policy: a request that is answered with other tokens fails.

    Attributes:
        lock: held while a request is sent or answered.
        router: before the engines, once there was a request.
    """

    def __init__(self, group: Any, engines: Sequence[Engine] | None, *, driven: bool, vocab_size: int) -> None:
        self._group, self._engines, self._driven, self._vocab_size = group, engines, driven, vocab_size
        self.lock, self.router = threading.RLock(), None if engines is None else Router(engines)
        self._loop, self._addresses = RequestLoop(), list[Any]()
        self._in_flight: dict[Request, None] = {}
        self._unsent: list[Request] = []
        self._arrived: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def start(self, request: Request) -> None:
        """Take a request. The first ones of a driven rollout wait for ``step``, which brings the engines up to date."""
        with self.lock:
            others_are_sent = len(self._in_flight) > len(self._unsent)
            self._in_flight[request] = None
            self._unsent.append(request)
            if self._driven:
                if others_are_sent and self.router is not None:
                    self._send(connect=False)
                return
            try:
                self._send(connect=not others_are_sent)
            except MControllerError:  # its caller does not get it, and may submit its trajectory again
                request.cancel()
                raise

    def requests(self, *, begun: bool = False) -> list[Request]:
        """Return the requests in flight: an engine may have begun each of them."""
        with self.lock:
            return [request for request in self._in_flight if not request.done()]

    def step(self, requests: Sequence[Request] | None = None, tokens: int | None = None) -> bool:
        """Send the requests that wait, and return whether one is in flight; engines choose themselves what goes on.

        Raises:
            GroupError: no engine of the group is left, for the cause that the group reports.
        """
        with self.lock:
            self._send(connect=len(self._unsent) == len(self._in_flight))
            return bool(self._in_flight)

    def ready(self) -> bool:
        """Whether an answer or a part of one has arrived."""
        return not self._arrived.empty()

    def take(self) -> None:
        """Answer the requests whose answers have arrived; wait a moment for the first one."""
        with contextlib.suppress(Empty):
            handle = self._arrived.get(timeout=_TAKE_S)
            while True:
                handle()
                handle = self._arrived.get_nowait()

    def _send(self, *, connect: bool) -> None:
        """Send what waits to the engines, which are brought up to date first if none has a request."""
        for request in [request for request in self._unsent if request.done()]:
            self._in_flight.pop(request, None)
        unsent = self._unsent = [request for request in self._unsent if not request.done()]
        if not unsent:
            return
        if self._engines is None and (connect or self.router is None):
            self._connect()
        self._unsent = []
        assert self.router is not None
        for request in unsent:
            settings = {name: request.settings[name] for name in _OF_ENGINES if name in request.settings}
            seed = later_seed(request.seed, request.generated)
            settings |= {"response_length": request.left, "seed": seed}
            request.sends += 1
            on_part = partial(self._on_loop, self._add_part, request, request.sends) if request.streams else None
            request.sent = self._loop.start(self.router.generate(request.prompt, settings, on_part))
            request.sent.add_done_callback(partial(self._on_loop, self._settle, request))

    def _connect(self) -> None:
        """Use the engines of the group's workers, with their current weights."""
        addresses = [address for address in self._group.engine_addresses() if address is not None]
        if self.router is not None and not self.router.lost and addresses == self._addresses:
            return
        if self.router is not None:
            self._loop.start(self.router.close())
        self._addresses = addresses
        self.router = Router([address.connect() for address in addresses])

    def _on_loop(self, handle: Callable[..., None], *arguments: Any) -> None:
        """Handle what has arrived on the thread of the engines' loop, or let ``take`` do it."""
        if self._driven:
            self._arrived.put(partial(handle, *arguments))
        else:
            handle(*arguments)

    def _add_part(self, request: Request, sends: int, part: Sampled) -> None:
        with self.lock:
            if sends != request.sends or request.done():  # it was sent again meanwhile, or has ended
                return
            try:
                check_answer(part, request.left, self._vocab_size)
            except DataError as error:
                request.answered(error)
                assert request.sent is not None
                request.sent.cancel()
            else:
                request.received(part)

    def _settle(self, request: Request, sent: Future[Sampled]) -> None:
        """Answer a request, or let the next ``step`` send it once more, to other engines, if all were lost."""
        with self.lock:
            if sent is not request.sent:  # it was sent again meanwhile
                return
            answer = self._answer(request, sent)
            may_repeat = self._engines is None and self._driven and not request.is_repeated
            if isinstance(answer, NoEngineLeft) and may_repeat:
                request.is_repeated = True
                self._unsent.append(request)
                self.router = None
            elif not request.done() and request.answered(answer):
                self.start(request)
            else:
                self._in_flight.pop(request, None)

    def _answer(self, request: Request, sent: Future[Sampled]) -> Sampled | Exception:
        if sent.cancelled():  # by its engine, unless the request was
            return RequestFailed("an engine cancelled a request by itself", engine="", length=len(request.prompt))
        try:
            check_answer(answer := sent.result(), request.left, self._vocab_size)
        except Exception as error:
            return error
        return answer
