"""What the ranks of a group do when a deadline has passed: their stacks, and who waits for whom in which collective.

A process answers for itself on another thread. The record of one that cannot, because it is stopped or in native code
that holds the interpreter, is read from outside, on its node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import ray

from mcontroller.channel.controller import ask
from mcontroller.ray.node_processes import NODE_SECONDS, NodeProcess, begin_on_node
from mcontroller.ray.process import ProcessInfo, ProcessPosition
from parallel_state.hangs.record import RankRecord, read_rank_record
from parallel_state.hangs.report import RecordedRanks

_DIED = "has died"

_FROZEN = {"T": "is stopped by a signal", "t": "is stopped by a debugger", "Z": _DIED, "": _DIED}
"""The states of processes that do not run, as ps has them, in the words of reports."""

IN_NATIVE_CODE = "is in native code"
"""What is said of a process that runs and does not answer: the code holds the interpreter, or waits in the kernel."""

QUICK_SECONDS = 0.3
"""Time in which most processes answer; of the others it is first found out whether they are stopped or have ended."""


@dataclass(frozen=True, slots=True)
class Hang:
    """What ranks do.

    Attributes:
        stacks: the Python stack of each late rank, as text.
        cause: who waits for whom; if no rank waits in a collective, where the first late one is; empty if nothing was
            recorded.
        report: an entry for the ranks that wait at the same place; empty if no rank waits in a collective.
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
    outside = {rank: view for rank, view in outside.items() if rank not in positions}
    silent = list(outside)
    states = {rank: view.state for rank, view in outside.items()}
    records = {rank: position.record for rank, position in positions.items()}
    records |= {rank: view.record for rank, view in outside.items()}
    stacks = {
        rank: positions[rank].stack
        if rank in positions
        else f"(no stack from {infos[rank].address.queries}: the process {states[rank] or IN_NATIVE_CODE})"
        for rank in late
    }
    ranks = RecordedRanks(
        {rank: record for rank, record in records.items() if record is not None and record.rank in (-1, rank)},
        coordinates,
        ended=set(called) - set(late) - set(silent),
        activities={rank: _activity(positions.get(rank), states.get(rank, "")) for rank in range(len(infos))},
        stopped={rank for rank, state in states.items() if state},
    )
    cause, report = ranks.report()
    if not cause and records.get(late[0]) is not None:
        cause = f"{ranks.describe(late[0])} {ranks.activity(late[0])}"
    return Hang(stacks, cause, report)


def stopped_ranks(infos: Sequence[ProcessInfo], timeout: float) -> set[int]:
    """Return the ranks that are stopped, and did not go on within ``timeout`` seconds.

    Args:
        infos: where the process of every rank runs.
        timeout: seconds to wait for the answers of the processes.
    """
    answers = ask([info.address for info in infos], "idle", timeout=timeout)
    silent = [rank for rank, answer in enumerate(answers) if answer is None]
    views = _read_from_outside([infos[rank] for rank in silent])
    return {rank for rank, view in zip(silent, views, strict=True) if view.state not in ("", _DIED)}


def _positions(infos: Sequence[ProcessInfo], ranks: Sequence[int], timeout: float) -> dict[int, ProcessPosition]:
    answers = ask([infos[rank].address for rank in ranks], "position", timeout=timeout)
    return {rank: answer[0] for rank, answer in zip(ranks, answers, strict=True) if answer is not None}


def _activity(position: ProcessPosition | None, state: str) -> str:
    if position is None:
        return state or IN_NATIVE_CODE
    return f"is in no collective, at {position.line}" if position.line else "runs no call"


class _Outside(NamedTuple):
    """What the node of a process knows of it: its state if it does not run, and its record."""

    state: str
    record: RankRecord | None


def _read_from_outside(infos: Sequence[ProcessInfo]) -> list[_Outside]:
    this_node = ray.get_runtime_context().get_node_id()
    views: dict[ProcessInfo, _Outside] = {}
    references = {}
    for node in {info.node_id for info in infos}:
        on_node = [info for info in infos if info.node_id == node]
        keys = [(info.process, info.record) for info in on_node]
        if node == this_node:
            views.update(zip(on_node, _read(keys), strict=True))
        else:
            references[begin_on_node(node, _read, keys)] = on_node
    ready, _ = ray.wait(list(references), num_returns=len(references), timeout=NODE_SECONDS) if references else ([], [])
    for reference in ready:
        try:
            views.update(zip(references[reference], ray.get(reference), strict=True))
        except ray.exceptions.RayError:  # the node is gone
            continue
    return [
        views.get(info) or _Outside(f"is on node {info.node}, which does not answer either", None) for info in infos
    ]


def _read(keys: Sequence[tuple[NodeProcess, int | None]]) -> list[_Outside]:
    return [
        _Outside(_FROZEN.get(process.state, ""), None if record is None else read_rank_record(process.pid, record))
        for process, record in keys
    ]
