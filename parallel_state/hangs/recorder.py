"""Write every collective and transfer of this process into its record.

The methods of ``torch.distributed.ProcessGroup`` are replaced, which all functions of torch.distributed call, whenever
they were imported. Calls that C++ makes by itself are not seen: those of torch's own DistributedDataParallel and of
functional collectives.
"""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from parallel_state.hangs.lines import calling_position, source_line
from parallel_state.hangs.record import (
    DIMS,
    DONE,
    IN_CALL,
    RETURNED,
    RING,
    RING_AT,
    SLOT,
    WAITING,
    RecordedGroup,
    RecordMemory,
)
from parallel_state.hangs.waits import waited

_NOTHING, _REDUCTION, _ROOT = range(3)

# Method -> the operation, the position of the argument with its tensors (None: no tensors), what its options have.
_COLLECTIVES: dict[str, tuple[str, int | None, int]] = {
    "allreduce": ("all_reduce", 0, _REDUCTION),
    "allreduce_coalesced": ("all_reduce", 0, _REDUCTION),
    "reduce": ("reduce", 0, _ROOT),
    "broadcast": ("broadcast", 0, _ROOT),
    "allgather": ("all_gather", 1, _NOTHING),
    "allgather_coalesced": ("all_gather", 1, _NOTHING),
    "all_gather_single": ("all_gather_into_tensor", 1, _NOTHING),
    "_allgather_base": ("all_gather_into_tensor", 1, _NOTHING),
    "all_gather_single_coalesced": ("all_gather_into_tensor", 1, _NOTHING),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor", 1, _NOTHING),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1, _REDUCTION),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 1, _REDUCTION),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor", 1, _REDUCTION),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor", 1, _REDUCTION),
    "reduce_scatter": ("reduce_scatter", 1, _REDUCTION),
    "gather": ("gather", 1, _ROOT),
    "scatter": ("scatter", 0, _ROOT),
    "alltoall": ("all_to_all", 1, _NOTHING),
    "all_to_all_single": ("all_to_all_single", 1, _NOTHING),
    "alltoall_base": ("all_to_all_single", 1, _NOTHING),
    "barrier": ("barrier", None, _NOTHING),
    "monitored_barrier": ("barrier", None, _NOTHING),
}
_TRANSFERS = {"send": "send", "recv": "recv", "recv_anysource": "recv"}


class _Group:
    """What is known of a group of this process; a channel is the index of its count in the numbers of the record."""

    __slots__ = ("collectives", "reference", "routes", "shared")

    def __init__(self, shared: RecordedGroup, collectives: int | None, reference: Any) -> None:
        self.shared, self.collectives, self.reference = shared, collectives, reference
        self.routes: dict[tuple[str, int, int], int | None] = {}


class Recorder:
    """Writes calls into a record; see ``record_calls``.

    Args:
        memory: the memory of the record.
    """

    def __init__(self, memory: RecordMemory) -> None:
        self._memory, self._numbers = memory, memory.numbers
        self._calls = itertools.count()
        self._groups: dict[int, _Group] = {}
        self._waits: dict[int, int] = {}
        self._work_of: list[int | None] = [None] * RING
        self._texts: dict[Any, int] = {}  # by the line, dtype, reduction or root that they describe
        self._nothing = memory.text("")

    def collective(self, operation: str, argument: int | None, kind: int, method: Callable[..., Any]) -> Any:
        """Return a method of a process group that writes a collective into the record, and then calls ``method``."""
        text, begin, returned = self._memory.text(operation), self._begin, self._returned

        @functools.wraps(method)
        def recorded(group: Any, *args: Any, **options: Any) -> Any:
            known = self._groups.get(id(group)) or self._new_group(group)
            detail = self._nothing
            if kind:
                given = args[-1] if args else options.get("opts")
                detail = self._detail(given, kind == _ROOT)
            tensors = args[argument] if argument is not None and argument < len(args) else None
            number = begin(known.collectives, text, detail, tensors)
            work = method(group, *args, **options)
            returned(number, work)
            return work

        return recorded

    def transfer(self, operation: str, method: Callable[..., Any]) -> Any:
        """Return a method of a process group that writes a transfer into the record, and then calls ``method``."""
        text = self._memory.text(operation)
        any_source = method.__name__ == "recv_anysource"

        @functools.wraps(method)
        def recorded(group: Any, tensors: Any, *args: Any, **options: Any) -> Any:
            known = self._groups.get(id(group)) or self._new_group(group)
            peer, tag = (-1, *args, 0)[:2] if any_source else (*args, 0)[:2]
            key = operation, peer, tag
            if key not in known.routes:
                other = -1 if peer == -1 else known.shared.ranks[peer]
                known.routes[key] = self._memory.channel(operation, known.shared, other, tag)
            number = self._begin(known.routes[key], text, self._nothing, tensors)
            work = method(group, tensors, *args, **options)
            self._returned(number, work)
            return work

        return recorded

    def wait(self, method: Callable[..., Any]) -> Any:
        """Return ``Work.wait`` with the state of its call in the record."""
        numbers, waits = self._numbers, self._waits

        @functools.wraps(method)
        def recorded(work: Any, *args: Any, **options: Any) -> Any:
            number = waits.pop(id(work), -1)
            began = time.monotonic_ns()
            at = RING_AT + number % RING * SLOT
            if numbers[at] == number + 1 > 0:
                numbers[at + 6] = WAITING
            try:
                return method(work, *args, **options)
            finally:
                waited.nanoseconds += time.monotonic_ns() - began
                if numbers[at] == number + 1 > 0:
                    numbers[at + 6] = DONE

        return recorded

    def _begin(self, channel: int | None, operation: int, detail: int, tensors: Any) -> int:
        """Write a call into the next slot of the ring and return its number."""
        if channel is None:
            return -1
        numbers, number = self._numbers, next(self._calls)
        index = numbers[channel]
        place = calling_position()
        line = self._texts.get(place)
        if line is None:
            line = self._texts[place] = self._memory.text(str(source_line(*place)))
        slot = number % RING
        at = RING_AT + slot * SLOT
        numbers[at] = 0
        numbers[at + 1] = channel
        numbers[at + 2] = index
        numbers[at + 3] = operation
        numbers[at + 4] = detail
        numbers[at + 5] = line
        numbers[at + 6] = IN_CALL
        self._write_tensors(at + 7, tensors)
        numbers[channel] = index + 1
        numbers[at] = number + 1
        return number

    def _write_tensors(self, at: int, tensors: Any) -> None:
        numbers, count = self._numbers, 1
        while not isinstance(tensors, torch.Tensor):
            if not tensors:
                numbers[at] = 0
                return
            count, tensors = len(tensors), tensors[0]
        dtype, shape = tensors.dtype, tensors.shape
        name = self._texts.get(dtype)
        if name is None:
            name = self._texts[dtype] = self._memory.text(str(dtype).removeprefix("torch."))
        numbers[at] = count
        numbers[at + 1] = name
        numbers[at + 2] = len(shape)
        for size in shape[:DIMS]:
            numbers[at + 3] = size
            at += 1

    def _returned(self, number: int, work: Any) -> None:
        """Note that torch has returned from a call; find the call by its work when that is awaited."""
        if number < 0:
            return
        slot = number % RING
        at = RING_AT + slot * SLOT
        if self._numbers[at] == number + 1:
            self._numbers[at + 6] = DONE if work is None else RETURNED
        earlier = self._work_of[slot]
        if earlier is not None and self._waits.get(earlier, number) % RING == slot:
            self._waits.pop(earlier, None)  # the program never waited for it
        self._work_of[slot] = id(work)
        if work is not None:
            self._waits[id(work)] = number

    def _detail(self, options: Any, has_root: bool) -> int:
        """Return the text of the reduction or the root that the options of a call have."""
        given = (
            getattr(options, "rootRank", None) if has_root else getattr(getattr(options, "reduceOp", None), "op", None)
        )
        text = self._texts.get((has_root, given))
        if text is None:
            shown = f"root={given}" if has_root else f"op={str(given).rpartition('.')[2]}"
            text = self._texts[has_root, given] = self._memory.text("" if given is None else shown)
        return text

    def _new_group(self, group: Any) -> _Group:
        world = distributed_c10d._world
        self._memory.set_rank(dist.get_rank() if dist.is_initialized() else group.rank())
        key, groups = id(group), self._groups
        ranks = tuple(world.pg_group_ranks.get(group, range(group.size())))  # a program may make groups by itself
        backend = str(world.pg_map[group][0]) if group in world.pg_map else ""
        shared = RecordedGroup(group.group_name, group.group_desc, ranks, backend)
        reference = weakref.ref(group, lambda _: groups.pop(key, None))
        known = groups[key] = _Group(shared, self._memory.channel("collective", shared, -1, 0), reference)
        return known


def record_calls(memory: RecordMemory) -> Callable[[], None]:
    """Write every call of this process into a record, from now on.

    Args:
        memory: the memory of the record.

    Returns:
        A function that ends the recording.
    """
    recorder = Recorder(memory)
    patched: list[tuple[type, str, Any]] = []

    def replace(owner: type, name: str, make: Callable[[Any], Any]) -> None:
        if name in vars(owner):  # torch 2.13 has new names for some
            patched.append((owner, name, vars(owner)[name]))
            setattr(owner, name, make(getattr(owner, name)))

    for name, (operation, argument, kind) in _COLLECTIVES.items():
        replace(dist.ProcessGroup, name, functools.partial(recorder.collective, operation, argument, kind))
    for name, operation in _TRANSFERS.items():
        replace(dist.ProcessGroup, name, functools.partial(recorder.transfer, operation))
    replace(dist.Work, "wait", recorder.wait)

    def stop() -> None:
        for owner, name, method in patched:
            setattr(owner, name, method)

    return stop
