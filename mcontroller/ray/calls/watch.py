"""The watch of a group: two threads that find processes that end or freeze, also if no call waits for them.

One sleeps until something happens: a process that this one can see ends, a task on another node or Ray reports the end
of one, or a connection is lost. The other asks every process regularly whether it answers, and finds out about those
that do not: they are stopped, or in native code that holds the interpreter, or their node is silent. The threads do not
keep the group from being garbage-collected.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence

from mcontroller.channel.controller import ask
from mcontroller.channel.options import ChannelOptions
from mcontroller.ray.calls.hangs import frozen_ranks
from mcontroller.ray.process import ProcessInfo

IDLE_SECONDS = 1.0
"""Time after which a thread notices that its group does not exist any more."""

TICK_SECONDS = 0.5
"""Time between two looks whether a call is late or a question is due."""

ANSWER_SECONDS = 0.3
"""Time in which nearly every process answers; one that does not is asked again."""

SECONDS_OF_RANK = 0.002
"""Least time between two questions, for each rank: that of 1,000 ranks is 2 s, so that they take a bounded time."""


class Wake:
    """Wakes up a thread that waits in ``poll``. Any thread may call ``set``, at any time."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK)

    def set(self) -> None:
        """Wake up the thread, now or when it waits next."""
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Forget what was set."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def __del__(self) -> None:
        os.close(self.descriptor)


def watch_ends(
    look: weakref.WeakMethod[Callable[[], tuple[float, int] | None]], wake: Wake, processes: Sequence[int]
) -> None:
    """Call ``look`` whenever something has happened.

    Args:
        look: returns the seconds until it wants to be called again, and the descriptor of the events of connections;
            None if the group has ended.
        wake: something has happened.
        processes: descriptors of the processes that this one can see; they are closed at the end.
    """
    try:
        while (method := look()) is not None and (following := method()) is not None:
            del method
            seconds, connections = following
            poll = select.poll()
            for descriptor in (wake.descriptor, connections, *processes):
                poll.register(descriptor, select.POLLIN)
            poll.poll(min(seconds, IDLE_SECONDS) * 1e3)
            wake.clear()
    finally:
        for descriptor in processes:
            os.close(descriptor)


def watch_answers(
    report_late: weakref.WeakMethod[Callable[[], bool]],
    frozen: weakref.WeakMethod[Callable[[int, float, str], None]],
    infos: Sequence[ProcessInfo],
    options: ChannelOptions,
) -> None:
    """Ask every process regularly whether it answers, and find out about those that do not.

    Args:
        report_late: called before that; returns False if the group has ended.
        frozen: called with a rank that is frozen, the seconds since it has answered, and the reason: once, and once
            more after ``end_frozen_after``.
        infos: where the process of every rank runs.
        options: settings of the channel.
    """
    addresses = [info.address for info in infos]
    every = None if options.watch_every is None else max(options.watch_every, len(infos) * SECONDS_OF_RANK)
    asked = time.monotonic()
    silent: dict[int, float] = {}
    due: dict[int, float] = {}
    while (late := report_late()) is not None and late():
        del late
        time.sleep(TICK_SECONDS if every is None else min(every, TICK_SECONDS))
        if every is None or time.monotonic() - asked < every:
            continue
        asked = time.monotonic()
        answers = ask(addresses, "ping", timeout=ANSWER_SECONDS)
        silent = {rank: silent.get(rank, asked) for rank, answer in enumerate(answers) if answer is None}
        due = {rank: age for rank, age in due.items() if rank in silent}
        ages = {rank: time.monotonic() - since for rank, since in silent.items()}
        late_ranks = [rank for rank, age in ages.items() if age >= due.get(rank, options.frozen_after)]
        for rank, (reason, at_once) in (frozen_ranks(infos, late_ranks) if late_ranks else {}).items():
            wait = 0.0 if at_once else options.report_after
            report = frozen()
            if report is not None and reason and wait is not None and ages[rank] >= wait:
                report(rank, ages[rank], reason)
                due[rank] = options.end_frozen_after or float("inf")
            else:
                due[rank] = min(2 * ages[rank], wait or float("inf"), options.end_frozen_after or float("inf"))
            del report
