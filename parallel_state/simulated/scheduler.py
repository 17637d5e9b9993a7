"""Threads of which one runs at a time: a thread that waits passes its baton to one that can go on."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parallel_state.simulated.calls import Call, KeyWait
from parallel_state.simulated.errors import RankStopped, UnsupportedError

Waiting = Call | KeyWait

_STACK_BYTES = 16 << 20  # of address space; torch's backward pass needs more than Python's
_IDLE_POLLS = 1000  # of ranks that poll while no call completes, until that is a deadlock
_SIGNAL_SECONDS = 0.5  # between two checks for signals that another thread received
_STOP_SECONDS = 5.0  # for the running rank to come to a call after KeyboardInterrupt


def _join(thread: threading.Thread) -> None:
    """Wait until a thread has ended, and the system's thread below it.

    That one goes on after Python's: it frees what libraries have kept for it, and holds their locks meanwhile (MKL's,
    of its memory). A process that is forked then has these locks for ever, and waits for them in its first product.
    """
    thread.join()
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        time.sleep(1e-4)


class RankThread:
    """One rank of a scheduler.

    Attributes:
        rank: the rank.
        ended: whether it runs no function.
        waits_for: what it waits for; None if it can go on.
        polls: what it last asked for without waiting; None if it has not.
        result: what its function returned.
        error: what its function raised.
        thread: the thread of its function.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.baton = threading.Lock()
        self.baton.acquire()
        self.ended = True
        self.waits_for: Waiting | None = None
        self.polls: Waiting | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None


class Scheduler:
    """Runs functions on ranks, one at a time.

    Args:
        world_size: the number of ranks.
        seed: None for round robin; otherwise the next rank is drawn from this seed among those that can go on.
        on_switch: called with the rank that runs next, in the thread of the one before it.
        on_stall: called if no rank can go on; it wakes one, or calls ``fail``.
        on_error: called with the rank that raised first and its error, before the others are ended.

    Attributes:
        ranks: the ranks.
        current: the rank that runs; None outside of ``run``.
        failure: what ended the ranks; None if nothing has.
    """

    def __init__(
        self,
        world_size: int,
        seed: int | None,
        on_switch: Callable[[int], None],
        on_stall: Callable[[], None],
        on_error: Callable[[int, BaseException], None],
    ) -> None:
        self.ranks = [RankThread(rank) for rank in range(world_size)]
        self.current: RankThread | None = None
        self.failure: BaseException | None = None
        self._random = None if seed is None else random.Random(seed)
        self._on_switch, self._on_stall, self._on_error = on_switch, on_stall, on_error
        self._ready: deque[RankThread] = deque()
        self._all_ended = threading.Event()
        self._idle_polls = 0
        self._interrupt: BaseException | None = None

    def run(self, functions: Mapping[int, Callable[[], Any]]) -> None:
        """Run each function on its rank until all have ended; the results are in ``ranks``.

        If a rank fails, ``failure`` is set, and every other rank raises RankStopped at its next call.
        """
        taking_part = [self.ranks[rank] for rank in functions]
        self._all_ended.clear()
        # KeyboardInterrupt arrives in the calling thread, which therefore only waits.
        starter = threading.Thread(target=self._start, args=(taking_part, functions), name="start of the ranks")
        starter.daemon = True
        try:
            starter.start()
            while not self._all_ended.wait(_SIGNAL_SECONDS):
                pass
        except BaseException as error:
            if starter.ident is not None:
                self._stop(error)
            raise
        finally:
            if self._all_ended.is_set():
                for thread in [starter, *(participant.thread for participant in taking_part)]:
                    if thread is not None:
                        _join(thread)
            for participant in taking_part:
                participant.thread = None
            self.current = None

    def fail(self, error: BaseException) -> None:
        """End all ranks because of ``error``, unless they end because of another one."""
        if self.failure is None:
            self.failure = error
            self._ready = deque(rank for rank in self.ranks if not rank.ended and rank is not self.current)

    def check_running(self) -> None:
        """Raise RankStopped if another rank has failed."""
        self._check_interrupt()
        if self.failure is not None:
            raise RankStopped

    def running(self) -> RankThread:
        """Return the rank that runs; raise RankStopped if another one has failed."""
        self.check_running()
        if self.current is None:
            raise UnsupportedError("a call of a simulated rank, while none runs", ranks=())
        return self.current

    def wait(self, waiting: Waiting) -> None:
        """Let other ranks run until ``waiting`` is done."""
        rank = self.running()
        while not waiting.done:
            rank.waits_for = waiting
            self._park(rank)
        rank.waits_for = None

    def give_way(self, polls: Waiting | None = None) -> None:
        """Let other ranks run once; a stall if all ranks do nothing but ask whether something is done."""
        rank = self.running()
        rank.polls = polls or rank.polls
        self._idle_polls += polls is not None
        if self._idle_polls > _IDLE_POLLS * len(self.ranks):
            self._on_stall()
            self.check_running()
        if self._ready:
            self._ready.append(rank)
            self._park(rank)

    def wake(self, ranks: Mapping[int, Waiting]) -> None:
        """Let ranks go on that wait for something that is done now."""
        self._idle_polls = 0
        for rank, done in ranks.items():
            thread = self.ranks[rank]
            if thread.waits_for is done and thread is not self.current:
                thread.waits_for = None
                self._ready.append(thread)

    def _start(self, ranks: Sequence[RankThread], functions: Mapping[int, Callable[[], Any]]) -> None:
        """Start a thread for each rank, and let the first one run."""
        before = threading.stack_size(_STACK_BYTES)
        try:
            for rank in ranks:
                rank.waits_for, rank.polls, rank.result, rank.error = None, None, None, None
                thread = threading.Thread(
                    target=self._live, args=(rank, functions[rank.rank]), name=f"rank {rank.rank}", daemon=True
                )
                thread.start()  # it waits for its baton
                rank.thread, rank.ended = thread, False
        except RuntimeError as error:  # the system has no further thread
            self.fail(error)
        finally:
            threading.stack_size(before)
        self._ready = deque(rank for rank in ranks if not rank.ended)
        self._pass_on()

    def _live(self, rank: RankThread, function: Callable[[], Any]) -> None:
        rank.baton.acquire()
        try:
            if self.failure is None:
                rank.result = function()
        except RankStopped:
            pass
        except BaseException as error:
            rank.error = error
            if self.failure is None:
                self._on_error(rank.rank, error)
            self.fail(error)
        rank.ended = True
        self._pass_on()

    def _park(self, rank: RankThread) -> None:
        self._pass_on(rank)
        rank.baton.acquire()
        if self.failure is not None:
            raise RankStopped

    def _pass_on(self, waiting: RankThread | None = None) -> None:
        """Let the next rank go on; if there is none and some have not ended, that is a deadlock."""
        if self._interrupt is not None:
            self.current = None  # the waiting rank ends too
            self._check_interrupt()
        following = self._next()
        if following is None and any(not rank.ended for rank in self.ranks):
            self.current = None
            self._on_stall()
            following = self._next()
        if following is None:
            self.current = None
            self._all_ended.set()
            return
        if following is not waiting:
            try:
                self._on_switch(following.rank)
            except BaseException as error:  # this thread may be of no rank, and the others wait for their batons
                self.current = None
                self.fail(error)
        self.current = following
        following.baton.release()

    def _next(self) -> RankThread | None:
        while self._ready:
            if self._random is not None:
                self._ready.rotate(-self._random.randrange(len(self._ready)))
            rank = self._ready.popleft()
            if not rank.ended:
                return rank
        return None

    def _stop(self, error: BaseException) -> None:
        """End the ranks from another thread; a rank that computes without a call is interrupted."""
        self._interrupt = error  # the rank that runs handles it, because no other thread may
        if not self._all_ended.wait(_STOP_SECONDS):
            running = self.current
            if running is not None and running.thread is not None and running.thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(running.thread.ident), ctypes.py_object(RankStopped)
                )
            self._all_ended.wait(_STOP_SECONDS)
        if self.failure is None:
            self.failure = error

    def _check_interrupt(self) -> None:
        if self._interrupt is not None:
            self.fail(self._interrupt)
