"""Endpoint: the side of a worker process. It receives calls on the main thread, and answers queries on another."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import zmq
from typing_extensions import Buffer

from mcontroller.channel.address import ChannelKeys
from mcontroller.channel.links import receive_frames, send_frames
from mcontroller.channel.messages import CallHeader, pack_answer, unpack_call
from mcontroller.channel.order import MISSING_SECONDS, CallOrder, CallQueue, Cancellation
from mcontroller.channel.server import QueryServer, Reply
from mcontroller.errors import DataError, GroupError

_logger = logging.getLogger(__name__)

WAIT_MS = 200
"""Milliseconds between looks for a call that is missing in the order of several controllers."""


Received = tuple[bytes, CallHeader, memoryview, list[Buffer]]
"""A call, as it arrived: its controller, its header, the pickle of its arguments, and their buffers."""


class Endpoint:
    """Receives the calls of controllers and answers their queries, until the process ends.

    If a call arrives twice, because its connection was lost, its answer is sent again. See ``messages`` for the frames.

    Args:
        host: the address of this machine, as other machines know it.
        keys: the keys of the group.
        queries: a function for each query; it gets a ``Reply`` and the arguments of the query, and runs on a thread.
        ports: the first and the last port to listen on; None for any.
        folder: the folder for sockets of this machine, see ``QueryServer``.
        forget: called with a controller that has ended, when another one calls; its answers have been dropped.

    Attributes:
        address: where controllers connect to.
        query_thread: the operating system's id of the thread that answers queries.

    Raises:
        OSError: no port is free.
    """

    def __init__(
        self,
        host: str,
        keys: ChannelKeys,
        queries: Mapping[str, Callable[..., None]],
        ports: tuple[int, int] | None = None,
        folder: str | None = None,
        forget: Callable[[bytes], None] = lambda caller: None,
    ) -> None:
        self.cancellation = Cancellation()
        self._queue: CallQueue[Received] = CallQueue()
        self._answers: dict[bytes, OrderedDict[int, list[bytes]]] = {}
        self._forget = forget
        self._unreachable: dict[bytes, float] = {}
        order = CallOrder()
        own: dict[str, Callable[..., None]] = {
            "prepare": lambda reply, *call: reply(self.cancellation.prepare(*call)),
            "commit": self._commit,
            "ping": lambda reply: reply(None),
            "place": lambda reply, *call: reply(order.assign(*call)),
        }
        server = QueryServer(host, keys, ports, folder)
        self._calls, call_port = server.listen("calls")
        self._calls.router_mandatory = True  # sending to a controller that is not connected raises
        server.start({**own, **queries}, call_port)
        self.address, self.query_thread = server.address, server.thread

    def receive(self) -> Received:
        """Wait for the next call in order and return it. Called by the main thread.

        A message that is not a call is dropped and logged.
        """
        while True:
            call = self._queue.next()
            if call is not None:
                return call
            if not self._queue.waiting or self._calls.poll(WAIT_MS):
                caller, frames = self._calls.recv(), receive_frames(self._calls.recv)
                if not caller.startswith(b"\0"):  # else ZeroMQ has renamed a lost connection: they are sent again
                    self._add(caller, frames)

    def _add(self, caller: bytes, frames: list[Buffer]) -> None:
        try:
            header, data = unpack_call(frames.pop(0))
        except DataError as error:
            _logger.warning("dropped a message of controller %r: %s", caller, error)
            return
        if caller not in self._answers:
            self._look_for_unreachable()
        if self._unreachable:
            self._drop_unreachable()
        answers = self._answers.get(caller)
        while answers and next(iter(answers)) < header.settled:
            answers.popitem(last=False)
        added = self._queue.add(caller, header.number, header.after, (caller, header, data, frames))
        if not added and header.number in self._answers.get(caller, ()):  # else it has not run yet
            self._send(caller, self._answers[caller][header.number])

    def answer(
        self,
        caller: bytes,
        number: int,
        data: bytes,
        frames: Sequence[bytes] = (),
        error: GroupError | None = None,
        stored: bool = False,
    ) -> None:
        """Send the answer of a call, see ``pack_answer``; ``frames`` are the buffers of the value."""
        answer = [pack_answer(number, error, stored, data), *frames]
        self._answers.setdefault(caller, OrderedDict())[number] = answer
        self._send(caller, answer)

    def _commit(self, reply: Reply, caller: bytes, number: int, cancelled: bool) -> None:
        self.cancellation.commit(caller, number, cancelled)
        reply(None)

    def _send(self, caller: bytes, answer: Sequence[bytes]) -> bool:
        """Send an answer; return False if its controller is not connected, which asks again if it lives."""
        try:
            send_frames(self._calls, [caller, *answer])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _look_for_unreachable(self) -> None:
        """Note the controllers that are not connected now. Sending an answer again is harmless."""
        for caller, answers in self._answers.items():
            if answers and not self._send(caller, next(iter(answers.values()))):
                self._unreachable.setdefault(caller, time.monotonic())

    def _drop_unreachable(self) -> None:
        """Drop what is kept for controllers that have not connected again for longer than a living one takes."""
        for caller, since in tuple(self._unreachable.items()):
            if time.monotonic() - since > MISSING_SECONDS:
                del self._unreachable[caller]
                answers = self._answers[caller]
                if answers and not self._send(caller, next(iter(answers.values()))):
                    del self._answers[caller]
                    self._forget(caller)
