"""Which ranks of a layout run, and running them."""

from __future__ import annotations

import ctypes
import gc
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Any, TypeVar
from unittest import mock

import torch.distributed as dist

from parallel_state import cpu
from parallel_state.cpu.device import without_memory
from parallel_state.dry_run.counting import CountingMode
from parallel_state.dry_run.kernels import torch_on_meta
from parallel_state.dry_run.memory import Memory
from parallel_state.dry_run.shapes import Broadcasts, ShapeExchange
from parallel_state.layout import ParallelLayout
from parallel_state.simulated.calls import Call
from parallel_state.simulated.simulation import Simulation
from parallel_state.simulated.trace import CommunicationTrace

T = TypeVar("T")

_M_MMAP_THRESHOLD = -3
"""Its number in glibc's malloc.h."""
_RANKS_TO_RELEASE = 32
"""Ranks that run one by one before free memory is returned: each has a thread, and glibc an arena for it."""


def pipeline_of(layout: ParallelLayout, *, last: bool = False) -> list[int]:
    """Return the ranks of one pipeline: one of each stage, the first on all other axes, or the last."""
    return layout.groups("pp")[-1 if last else 0]


class CallLog(CommunicationTrace):
    """The collectives and transfers of each rank: their number and bytes by axis and operation, and digests.

    Ranks that run one by one are matched by their digests: those of a group's members are equal, and those of what one
    rank sends to another and what that one receives.

    Attributes:
        calls: the number by rank, axis and operation.
        nbytes_of: the bytes by the same.
        pending: the number of asynchronous collectives that were not waited for, by their line.
        broadcasts: what was broadcast, for ranks that run later.

    Args:
        broadcasts: of ranks that ran before.
    """

    def __init__(self, broadcasts: Broadcasts | None = None) -> None:
        super().__init__()
        self.broadcasts: Broadcasts = {} if broadcasts is None else broadcasts
        self.calls: Counter[tuple[int, str, str]] = Counter()
        self.nbytes_of: Counter[tuple[int, str, str]] = Counter()
        self.pending: Counter[str] = Counter()
        self._order: dict[int, bytes] = {}
        self._shapes: dict[int, bytes] = {}
        self._meetings: dict[tuple[Any, tuple[int, ...]], dict[int, bytes]] = {}

    def begin(self, call: Call) -> None:
        """Count a call."""
        key = call.rank, call.group.axis or ("pp" if call.is_transfer else "-"), call.operation
        self.calls[key] += 1
        self.nbytes_of[key] += call.payload
        if call.is_async and not call.is_transfer:
            self.pending[str(call.line)] += 1
        place = call.operation, call.group.axis, call.line.line
        shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in (*call.inputs, *call.outputs)]
        _add_to_digest(self._order, call.rank, place)
        _add_to_digest(self._shapes, call.rank, shapes)
        name, members = _meeting_of(call)
        what: tuple[Any, ...] = (call.key,)
        if not call.is_transfer:
            what = call.operation, call.key, call.options.get("sends")
        _add_to_digest(self._meetings.setdefault((name, members), {}), call.rank, what)

    def wait(self, call: Call) -> None:
        """Note that the program has waited for a call."""
        if call.is_async and not call.is_transfer:
            self.pending[str(call.line)] -= 1

    def digest(self, rank: int, *, shapes: bool = True) -> bytes:
        """Return a digest of the calls of a rank, in their order; with the shapes of their tensors."""
        kinds = (self._order, self._shapes) if shapes else (self._order,)
        return b"".join(digests.get(rank, b"") for digests in kinds)

    def unfinished(self) -> list[str]:
        """Return a warning for each line that makes an asynchronous collective and does not wait for it."""
        lines = [line for line, count in self.pending.items() if count]
        return [f"an asynchronous collective is not waited for: {line}" for line in lines]

    def unmatched(self) -> set[int]:
        """Return the members of groups, and the two sides of transfers, that do not all have the same digest."""
        ranks: set[int] = set()
        for (_, members), digests in self._meetings.items():
            if len(digests) < len(members) or len(set(digests.values())) > 1:
                ranks.update(members)
        return ranks

    def most(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return calls and bytes by axis and operation, of the rank that has the most bytes of them."""
        worst: dict[tuple[str, str], tuple[int, int]] = {}
        for (rank, *kind), nbytes in self.nbytes_of.items():
            axis, operation = kind
            if nbytes >= worst.get((axis, operation), (0, -1))[1]:
                worst[axis, operation] = self.calls[rank, axis, operation], nbytes
        return worst


def _add_to_digest(digests: dict[int, bytes], rank: int, value: Any) -> None:
    """Replace the digest of what a rank did so far by one of that and a value."""
    digests[rank] = hashlib.sha256(digests.get(rank, b"") + repr(value).encode()).digest()


def _meeting_of(call: Call) -> tuple[Any, tuple[int, ...]]:
    """Return what a call is matched by, and the ranks that take part: a group's, or a sender and a receiver."""
    if not call.is_transfer:
        return call.group.name, call.group.ranks
    peer = -1 if call.peer is None else call.peer
    pair = (call.rank, peer) if call.operation == "send" else (peer, call.rank)
    return ("transfer", call.group.name, call.options.get("tag")), pair


def peers_of(layout: ParallelLayout, ranks: Collection[int]) -> list[int]:
    """Return some ranks, and those that differ from one of them on a single axis."""
    groups = (group for axis in (*layout.dense_axes, *layout.expert_axes) for group in layout.groups(axis))
    return sorted({rank for group in groups if not set(group).isdisjoint(ranks) for rank in group})


def run_without_data(
    layout: ParallelLayout,
    running: Sequence[int],
    function: Callable[[CountingMode], T],
    log: CallLog,
    *,
    together: bool = True,
    ended: Callable[[int], object] = lambda count: None,
) -> dict[int, T]:
    """Run ``function(mode)`` on some ranks of a layout, whose device has no memory, and return the results by rank.

    Members of groups that do not run are assumed to call what the running ones call.

    Args:
        layout: the layout.
        running: the ranks that run.
        function: what each of them runs; the mode counts its storages and FLOPs.
        log: records the calls.
        together: whether their calls are matched. Otherwise one rank runs after the other, which takes less time and
            the memory of one, and all others are assumed to call what it calls.
        ended: called with the number of ranks that have ended, after each that runs alone.

    Raises:
        SimulationError: ranks communicate wrongly.
        BaseException: what the first rank that failed raised.
    """
    cpu.install()
    from megatron.core import parallel_state as mpu  # after cpu.install

    def run(rank: int) -> T:
        dist.init_process_group("gloo", rank=rank, world_size=layout.world_size)
        with CountingMode(Memory()) as mode:
            return function(mode)

    simulation = Simulation(
        layout,
        check_async=False,
        trace=log,
        running=running,
        exchange=partial(ShapeExchange, layout, running if together else (), log.broadcasts),
    )
    create_group, rank_groups = mpu.create_group, mpu.generate_masked_orthogonal_rank_groups

    def create_of_member(ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        return create_group(ranks, *args, **kwargs) if dist.get_rank() in ranks else simulation.skip_group()

    @cache
    def groups_once(*key: tuple[Any, ...]) -> list[list[int]]:
        return rank_groups(*key)  # type: ignore[no-any-return]

    # Every rank of N creates a number of groups in proportion to N, most of which it is no member of.
    creating = mock.patch.multiple(
        mpu,
        create_group=create_of_member,
        generate_masked_orthogonal_rank_groups=lambda size, sizes, mask: [
            list(ranks) for ranks in groups_once(size, tuple(sizes), tuple(mask))
        ],
    )
    # Known values come and go between small objects that stay: in the heaps of the ranks' threads they would leave gaps
    # of 8 GiB in a pipeline of 16 stages whose tensors have 0.5 GiB. Each block from 128 KiB on is mapped by itself.
    _call_glibc("mallopt", _M_MMAP_THRESHOLD, 128 << 10)
    freezes = not _frozen_by_program()  # unfreezing would undo that
    if freezes:
        gc.freeze()  # collections look at the objects of the ranks alone, not at all imported modules: 25% less time
    try:
        gathering = mock.patch.object(dist, "all_gather_object", _gather_objects)
        with without_memory(), torch_on_meta(), creating, gathering:
            results: dict[int, T] = {}
            for ranks in [running] if together else [[rank] for rank in running]:
                results |= simulation.run({rank: partial(run, rank) for rank in ranks})
                if not together:
                    simulation.forget(ranks[0])
                    if len(results) % _RANKS_TO_RELEASE == 0:
                        _release()
                    ended(len(results))
            return results
    finally:
        simulation.close()
        gc.collect()  # models have circles of references, and the next ranks need the memory
        if freezes:
            gc.unfreeze()
        _release()


_frozen = False


def _frozen_by_program() -> bool:
    """Whether the program has frozen its objects. Python counts them one by one: not again after the first time."""
    global _frozen
    _frozen = _frozen or gc.get_freeze_count() > 0
    return _frozen


def _call_glibc(name: str, *arguments: int) -> None:
    """Call a function about memory, if the C library has it."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)


def _release() -> None:
    """Return free memory to the operating system: glibc keeps the pages of many small objects."""
    _call_glibc("malloc_trim", 0)


def _gather_objects(objects: list[Any], value: Any, group: Any = None) -> None:
    """Gather objects by reference: copies on every rank take time and memory that grow with the square of the ranks."""
    members: Any = dist.group.WORLD if group is None else group
    members.allgather_object(objects, value)
