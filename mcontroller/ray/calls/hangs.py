"""What the ranks of a group do when a deadline has passed: their stacks, and who waits for whom in which collective.

A process answers for itself on another thread. The record of one that cannot, because it is stopped or in native code
that holds the interpreter, is read from outside, on its node.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import ray

from mcontroller.channel.controller import ask
from mcontroller.errors import CallTimeout
from mcontroller.ray.calls.call import GroupCall
from mcontroller.ray.calls.failures import RankLabel
from mcontroller.ray.node_processes import NODE_SECONDS, SLOW, NodeProcess, begin_on_node, why_silent
from mcontroller.ray.process import ProcessInfo, ProcessPosition
from mcontroller.ray.process_handles import ProcessHandles
from parallel_state.hangs.record import RankRecord, read_rank_record
from parallel_state.hangs.report import RecordedRanks

_logger = logging.getLogger(__name__)

_FROZEN = {"T": "is stopped by a signal", "t": "is stopped by a debugger", "Z": "has died", "": "has died"}
"""The states of processes that do not run, as ps has them, in the words of reports."""


AGAIN_SECONDS = 5.0
"""Time after which ranks that wait are looked at again, to see whether they still wait for the same."""

FAIL_LOOKS = 10
"""A call fails after so many times ``report_after``, if stuck calls fail."""

QUICK_SECONDS = 0.3
"""Time in which most processes answer; of the others it is first found out whether they are stopped or have ended."""


@dataclass(frozen=True, slots=True)
class Hang:
    """What ranks do.

    Attributes:
        stacks: the Python stack of each late rank, as text.
        cause: who waits for whom; empty if no rank waits in a collective, or nothing was recorded.
        report: an entry for the ranks that wait at the same place; empty as ``cause`` is.
    """

    stacks: dict[int, str]
    cause: str
    report: str


def look_at_ranks(
    infos: Sequence[ProcessInfo],
    coordinates: Sequence[Mapping[str, int]],
    called: Sequence[int],
    late: Sequence[int],
    timeout: float,
) -> Hang:
    """Ask the ranks of a group what they do, and find out who waits for whom.

    Args:
        infos: where the process of every rank runs.
        coordinates: index on each axis, by rank; empty if unknown.
        called: the ranks that the call was sent to.
        late: the called ranks that have not answered.
        timeout: seconds to wait for the answers of the processes.
    """
    positions = _positions(infos, range(len(infos)), min(timeout, QUICK_SECONDS))
    silent = [rank for rank in range(len(infos)) if rank not in positions]
    outside = dict(zip(silent, _read_from_outside([infos[rank] for rank in silent]), strict=True))
    positions |= _positions(infos, [rank for rank in silent if not outside[rank].state], timeout)
    outside = {rank: seen for rank, seen in outside.items() if rank not in positions}
    silent = list(outside)
    states = {rank: seen.state for rank, seen in outside.items()}
    records = {rank: position.record for rank, position in positions.items()}
    records |= {rank: seen.record for rank, seen in outside.items()}
    stacks = {
        rank: positions[rank].stack
        if rank in positions
        else f"(no stack from {infos[rank].address.queries}: {outside[rank].reason})"
        for rank in late
    }
    ranks = RecordedRanks(
        {rank: record for rank, record in records.items() if record is not None and record.rank in (-1, rank)},
        coordinates,
        ended=set(called) - set(late) - set(silent),
        activities={rank: _activity(positions.get(rank), states.get(rank, "")) for rank in range(len(infos))},
        stopped={rank for rank, state in states.items() if state},
    )
    return Hang(stacks, *ranks.report())


def late_error(
    role: str,
    method: str,
    called: Sequence[int],
    late: Sequence[int],
    limit: float,
    what: str,
    infos: Sequence[ProcessInfo],
    coordinates: Sequence[Mapping[str, int]],
    seconds: float,
) -> CallTimeout:
    """Return the error of a call that is late, with the stacks of the late ranks and who waits for whom.

    Args:
        role: the role that was called.
        method: name of the method.
        called: the ranks that the call was sent to.
        late: the called ranks that are late.
        limit: the seconds that have passed.
        what: what the call lacks, such as ``had no answer in``.
        infos: where the process of every rank runs.
        coordinates: index on each axis, by rank; empty if unknown.
        seconds: seconds to wait for the answers of the processes.
    """
    hang = look_at_ranks(infos, coordinates, called, late, seconds)
    labels = {rank: RankLabel(role, rank, coordinates[rank] if coordinates else {}, infos[rank]) for rank in late}
    listed = "\n".join(f"{labels[rank]}:\n{hang.stacks[rank]}" for rank in late)
    explained = f" {hang.cause}\n\n{hang.report}\n\n" if hang.cause else "\n"
    return CallTimeout(
        f"{role}.{method} {what} {limit:g} s from {len(late)} of {len(called)} "
        f"ranks, {', '.join(map(str, late))}:{explained}{listed}",
        role=role,
        method=method,
        timeout=limit,
        ranks=tuple(late),
        stacks=hang.stacks,
        cause=hang.cause,
        report=hang.report,
    )


class LateReports:
    """Logs who waits for whom in a call that has had no answer for long: once, and again when it is another wait.

    A wait is logged if two looks see the same: ranks of a call that makes progress wait too, but not for long. If they
    wait for the same much later, and ``options.fail_stuck``, the deadline of the call is now.

    Args:
        handles: the processes. Their options say when to look, and may change.
        timeout: seconds to wait for the answers of the processes.
    """

    def __init__(self, handles: ProcessHandles, timeout: float) -> None:
        self._handles, self._patience = handles, timeout
        self._number = -1

    def look(self, call: GroupCall, coordinates: Sequence[Mapping[str, int]]) -> bool:
        """Look at the oldest call in flight, if it is time to; return whether it is to fail because it is stuck.

        Args:
            call: the call.
            coordinates: as in ``late_error``.
        """
        if call.number != self._number:
            self._number, self._looked, self._looks = call.number, call.started, 0
            self._waits = self._reported = ""
        now, left, every = time.monotonic(), call.remaining(), self._handles.options.report_after
        if every is None or (left is not None and left < 2 * self._patience):  # then the deadline reports it
            return False
        is_new = self._waits not in ("", self._reported)
        if now - self._looked < (AGAIN_SECONDS if is_new else every * 2**self._looks):
            return False
        self._looks += not is_new  # a look takes seconds if a rank holds the interpreter: ever fewer of a long call
        late = sorted(call.pending)
        hang = look_at_ranks(self._handles.infos, coordinates, call.ranks, late, self._patience)
        self._looked = time.monotonic()
        stuck = hang.report != "" and hang.report == self._reported  # since a look at least twice ``every`` ago
        if hang.report and hang.report == self._waits != self._reported:
            self._reported = hang.report
            who = f"{call.role}.{call.method} has no answer from {len(late)} of {len(call.ranks)} ranks"
            _logger.warning("%s after %.0f s: %s\n\n%s", who, now - call.started, hang.cause, hang.report)
        self._waits = hang.report
        return self._handles.options.fail_stuck and (stuck or now - call.started >= FAIL_LOOKS * every)


def frozen_ranks(infos: Sequence[ProcessInfo], ranks: Sequence[int]) -> dict[int, tuple[str, bool]]:
    """Return why ranks do not answer, and whether they cannot go on by themselves; "" if they are only slow.

    Args:
        infos: where the process of every rank runs.
        ranks: those that do not answer.
    """
    found = {}
    for rank, seen in zip(ranks, _read_from_outside([infos[rank] for rank in ranks]), strict=True):
        runs = seen.state == _FROZEN["Z"] or seen.reason.startswith(SLOW)  # the end of a process is found otherwise
        found[rank] = "" if runs else seen.reason, bool(seen.state)
    return found


def _positions(infos: Sequence[ProcessInfo], ranks: Sequence[int], timeout: float) -> dict[int, ProcessPosition]:
    answers = ask([infos[rank].address for rank in ranks], "position", timeout=timeout)
    return {rank: answer[0] for rank, answer in zip(ranks, answers, strict=True) if answer is not None}


def stopped_ranks(infos: Sequence[ProcessInfo], ranks: Sequence[int], timeout: float) -> list[int]:
    """Return the ranks whose process is stopped by a signal or a debugger, and cannot go on by itself.

    Args:
        infos: where the process of every rank runs.
        ranks: those to ask.
        timeout: seconds to wait for the answers of the processes. Those that answer are not stopped.
    """
    answers = ask([infos[rank].address for rank in ranks], "idle", timeout=timeout)
    silent = [rank for rank, answer in zip(ranks, answers, strict=True) if answer is None]
    states = [seen.state for seen in _read_from_outside([infos[rank] for rank in silent])]
    return [rank for rank, state in zip(silent, states, strict=True) if state in (_FROZEN["T"], _FROZEN["t"])]


def _activity(position: ProcessPosition | None, state: str) -> str:
    if position is None:
        return state or "is in native code"
    return f"is in no collective, at {position.line}" if position.line else "runs no call"


class _Outside(NamedTuple):
    """What the node of a process knows of it: its state if it does not run, why it is silent, and its record."""

    state: str
    reason: str
    record: RankRecord | None


def _read_from_outside(infos: Sequence[ProcessInfo]) -> list[_Outside]:
    here = ray.get_runtime_context().get_node_id()
    found: dict[ProcessInfo, _Outside] = {}
    references = {}
    for node in {info.node_id for info in infos}:
        on_node = [info for info in infos if info.node_id == node]
        keys = [(info.process, info.record) for info in on_node]
        if node == here:
            found.update(zip(on_node, _read(keys), strict=True))
        else:
            references[begin_on_node(node, _read, keys)] = on_node
    ready, _ = ray.wait(list(references), num_returns=len(references), timeout=NODE_SECONDS) if references else ([], [])
    for reference in ready:
        try:
            found.update(zip(references[reference], ray.get(reference), strict=True))
        except ray.exceptions.RayError:  # the node is gone
            continue
    return [found.get(info) or _Outside("", f"its node {info.node} does not answer either", None) for info in infos]


def _read(keys: Sequence[tuple[NodeProcess, int | None]]) -> list[_Outside]:
    return [
        _Outside(
            _FROZEN.get(process.state, ""),
            why_silent(process),
            None if record is None else read_rank_record(process.pid, record),
        )
        for process, record in keys
    ]
