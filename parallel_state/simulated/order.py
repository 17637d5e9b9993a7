"""The order in which ranks call the collectives of several groups: NCCL needs one that all ranks agree on.

A GPU may run the kernels of two communicators one after the other, in the order in which its rank called them. So
collectives must complete even if no rank has more than one in progress. gloo has no such limit: ranks that start
asynchronous collectives of two groups in opposite orders pass on gloo, and may hang on NCCL.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from parallel_state.hangs.lines import SourceLine
from parallel_state.simulated.calls import Call, SharedGroup
from parallel_state.simulated.errors import GroupOrderError

_Collective = tuple[SharedGroup, int]


class CollectiveOrder:
    """The collectives that could not complete yet if no rank had more than one in progress.

    Args:
        describe: returns the name of a rank in messages.
    """

    def __init__(self, describe: Callable[[int], str]) -> None:
        self._describe = describe
        self._queues: defaultdict[int, deque[_Collective]] = defaultdict(deque)
        self._lines: dict[_Collective, dict[int, tuple[str, SourceLine]]] = {}
        self._called_by_all: set[_Collective] = set()

    def add(self, call: Call) -> None:
        """Add a rank's call of a collective."""
        collective = call.group, call.number
        self._queues[call.rank].append(collective)
        self._lines.setdefault(collective, {})[call.rank] = call.operation, call.line

    def complete(self, call: Call) -> None:
        """Record that all members have made a call.

        Raises:
            GroupOrderError: ranks called this collective and others in orders that contradict each other.
        """
        self._called_by_all.add((call.group, call.number))
        candidates = [(call.group, call.number)]
        while candidates:
            collective = candidates.pop()
            if collective not in self._called_by_all:
                continue
            if any(self._queues[rank][0] != collective for rank in self._lines[collective]):
                self._check_no_cycle([collective], set())
                continue
            self._called_by_all.remove(collective)
            for rank in self._lines.pop(collective):
                self._queues[rank].popleft()
                if self._queues[rank]:
                    candidates.append(self._queues[rank][0])

    def _check_no_cycle(self, path: list[_Collective], checked: set[_Collective]) -> None:
        """Raise if the last collective of a path waits, over others that all members have called, for one of them."""
        checked.add(path[-1])
        for earlier in dict.fromkeys(self._queues[rank][0] for rank in self._lines[path[-1]]):
            if earlier in path[:-1]:
                raise self._error(path[path.index(earlier) :])
            if earlier in self._called_by_all and earlier not in checked:
                self._check_no_cycle([*path, earlier], checked)

    def _error(self, cycle: Sequence[_Collective]) -> GroupOrderError:
        """Return the error of collectives of which each waits for the next one, and the last for the first."""
        ranks, stories = [], []
        for later, earlier in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            rank = next(rank for rank in self._lines[later] if self._queues[rank][0] == earlier)
            ranks.append(rank)
            calls = [(collective, *self._lines[collective][rank]) for collective in (earlier, later)]
            first, second = (
                f"{name}, call {number} on {group}\n    at {line}" for (group, number), name, line in calls
            )
            stories.append(f"{self._describe(rank)}: {first}\nand then {second}")
        groups = tuple(group.label for group, _ in cycle)
        return GroupOrderError(
            f"ranks {', '.join(map(str, ranks))} call collectives of the groups {', '.join(groups)} in orders that "
            "contradict each other: on NCCL each may wait for ever for the others\n\n"
            + "\n".join(stories)
            + "\n    call them in one order on all ranks that share these groups",
            ranks=tuple(ranks),
            groups=groups,
        )
