"""A simulation: the ranks of a layout, their state, their groups and their calls."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from parallel_state.errors import LayoutError
from parallel_state.hangs.lines import calling_line, raising_line
from parallel_state.hangs.report import Position, cause_of, describe_ranks, stories
from parallel_state.layout import ParallelLayout
from parallel_state.rank_state import StateSwitch
from parallel_state.requirements import has_megatron
from parallel_state.simulated.calls import Call, KeyWait
from parallel_state.simulated.checkpoint_writer import in_process_writers
from parallel_state.simulated.errors import (
    Deadlock,
    KeyNotSet,
    NonMemberError,
    RankStopped,
    SimulationError,
    UnfinishedCalls,
    UnsupportedError,
)
from parallel_state.simulated.exchange import Exchange
from parallel_state.simulated.groups import GroupRegistry
from parallel_state.simulated.own_modules import OwnModules
from parallel_state.simulated.process_group import SimulatedGroup, SimulatedStore
from parallel_state.simulated.process_state import ProcessState
from parallel_state.simulated.scheduler import RankThread, Scheduler
from parallel_state.simulated.shared_writes import shared_values, warn_of_writes
from parallel_state.simulated.trace import CommunicationTrace
from parallel_state.topology import Topology

_NOT_IN_COLLECTIVES = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
_REPEATED_WAITS = 5  # of a rank for keys of the store, until that is a deadlock
_Deadlock = TypeVar("_Deadlock", bound=Deadlock)
_RENDEZVOUS: Any = importlib.import_module("torch.distributed.rendezvous")


class Simulation:
    """The ranks of a layout in this process. They keep their state from one ``run`` to the next.

    Args:
        layout: a layout or a topology, whose coordinates messages and traces show; or a number of ranks.
        seed: draws which of the ranks that can go on is next; None for round robin.
        check_async: whether to report tensors that change between an asynchronous call and its wait, which copies
            them.
        trace: records every call.
        modules: packages that each rank imports for itself, so that module globals and classes are its own.
        variables: environment variables by rank; None for those of torchrun.
        running: the ranks that will run; None for all. ``exchange`` completes the calls of their groups.
        exchange: what matches calls: ``Exchange``, or a function with its arguments.

    Attributes:
        world_size: the number of ranks.
        failed_rank: the rank that raised an error of its own; None if none has.

    Raises:
        LayoutError: there are no ranks.
    """

    def __init__(
        self,
        layout: int | ParallelLayout | Topology,
        *,
        seed: int | None = None,
        check_async: bool = True,
        trace: CommunicationTrace | None = None,
        modules: Sequence[str] = (),
        variables: Callable[[int], Mapping[str, str]] | None = None,
        running: Sequence[int] | None = None,
        exchange: Callable[[Callable[[int], str], bool], Exchange] = Exchange,
    ) -> None:
        self.world_size = layout if isinstance(layout, int) else layout.world_size
        if self.world_size < 1:
            raise LayoutError(f"a simulation has at least one rank, not {self.world_size}", world_size=self.world_size)
        self.failed_rank: int | None = None
        self._values: dict[str, bytes] = {}  # of the store
        self._stores: list[SimulatedStore] = []
        topology = Topology.from_layout(layout) if isinstance(layout, ParallelLayout) else layout
        self._groups = GroupRegistry(self.world_size, topology if isinstance(topology, Topology) else None)
        self._running = range(self.world_size) if running is None else running
        self._exchange = exchange(self.describe, check_async)
        self._trace = trace
        self._key_waits: dict[int, KeyWait] = {}
        self._ended_waits: Counter[int] = Counter()  # by rank, since another rank could go on
        self._handled: dict[int, str] = {}  # by ranks that made their last call while they handled an exception
        self._profiled: int | None = None  # the rank whose profiler runs
        self._with_own_modules: set[int] = set()
        self._thread_state = dict.fromkeys(range(self.world_size), (torch.get_default_device(), True))
        self._scheduler = Scheduler(self.world_size, seed, self._switch_to, self._on_stall, self._on_error)
        replacements = {rank: _same_on_every_rank() | self._replacements(rank) for rank in self._running}
        self._own_modules = OwnModules(modules)
        names = {owner: tuple(values) for owner, values in replacements[self._running[0]].items()}
        self._process = ProcessState(names, self._own_modules)
        self._switch = StateSwitch(self._process.parts)
        self._states = {
            rank: self._process.new_rank((variables or self._torchrun)(rank), replacement)
            for rank, replacement in replacements.items()
        }

    @property
    def ranks(self) -> list[RankThread]:
        """All ranks."""
        return self._scheduler.ranks

    def run(self, functions: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
        """Run each function on its rank, to the end of all; return the results by rank.

        Raises:
            SimulationError: ranks communicate wrongly; or this simulation has failed before.
            BaseException: what the first rank that failed raised; a note has the positions of the others.
        """
        if self._scheduler.failure is not None:
            first = str(self._scheduler.failure).partition("\n")[0]
            raise SimulationError(f"these ranks have failed before: {first}; make new ones", ranks=())
        if self._scheduler.current is not None:
            raise UnsupportedError("a rank cannot run simulated ranks", ranks=())
        outside, threads = self._switch.active, torch.get_num_threads()
        self._process.add_imported()
        shared = shared_values(self._own_modules.has) if len(functions) > 1 else {}
        try:
            with self._process.watched_imports():
                self._scheduler.run({rank: self._on_thread(rank, function) for rank, function in functions.items()})
        finally:
            self._switch.to(outside)
            torch.set_num_threads(threads)
            if self._scheduler.failure is not None:
                self.close()
        if self._scheduler.failure is not None:
            self._add_handled(self._scheduler.failure)
            raise self._scheduler.failure
        if len(functions) == len(self._running):
            self._check_all_finished()
        warn_of_writes(shared, len(functions))
        return {rank: self.ranks[rank].result for rank in functions}

    def close(self) -> None:
        """Forget the groups of all ranks."""
        self._groups.close()

    def forget(self, rank: int) -> None:
        """Forget the state and the groups of a rank that has ended: its models are freed, and it does not run again."""
        self._groups.forget(rank)
        del self._states[rank]

    def describe(self, rank: int) -> str:
        """Return a rank with its coordinates, as messages show it."""
        return self._groups.describe(rank)

    def activity(self, rank: int) -> str:
        """Return what a rank does, for a report; see ``Observed``."""
        state = self.ranks[rank]
        if state.error is not None:
            return f"raised {type(state.error).__name__}: {str(state.error).partition(chr(10))[0]}"
        if state.ended:
            return "has ended"
        return "can go on" if state.waits_for is None else f"waits in {state.waits_for}"

    def progress(self, waiting: int, other: int) -> list[str]:
        """Return how far a missing rank has come, for a report; see ``Observed``."""
        call = self.ranks[waiting].waits_for
        if not isinstance(call, Call) or call.is_transfer:
            return []
        if other not in call.group.created_by:
            return [f"and has not created this group (rank {call.group.creator} did at {call.group.line})"]
        last = call.group.last_calls.get(other)
        if last is None:
            return ["and has not called any collective of this group"]
        return [f"its last on this group: {last.operation}, call {last.number}, at {last.line}"]

    def missing(self, call: Call) -> list[int]:
        """Return the ranks that a call waits for."""
        return self._exchange.missing(call)

    def skip_group(self) -> Any:
        """Count a group that the running rank is no member of, and return what ``new_group`` returns."""
        self._groups.skip(self._scheduler.running().rank)
        c10d._world.group_count += 1
        return c10d.GroupMember.NON_GROUP_MEMBER

    def announce(self, call: Call) -> None:
        """Match a call of the running rank with those of others; complete it if it is the last."""
        self._scheduler.check_running()
        handled = sys.exception()
        if handled is not None:  # such as a barrier in a finally block: the cause of what it does not fit to
            first = str(handled).partition("\n")[0]
            self._handled[call.rank] = f"{type(handled).__name__}: {first}\n    at {raising_line(handled)}"
        elif self._handled:
            self._handled.pop(call.rank, None)
        with self._failing():
            self._check_caller(call)
            if self._trace is not None:
                self._trace.begin(call)
            if not call.is_transfer:
                call.group.last_calls[call.rank] = call
            completed = self._exchange.match(call)
        if self._trace is not None:
            for finished in completed:
                self._trace.complete(finished)
        if completed:
            self._ended_waits.clear()
            self._scheduler.wake({finished.rank: finished for finished in completed})

    def wait(self, call: Call) -> None:
        """Let other ranks run until a call is complete."""
        self._scheduler.check_running()
        with self._failing():
            self._check_thread(f"wait of {call.operation}")
        self._scheduler.wait(call)
        if not call.waited:
            call.waited = True
            if self._trace is not None:
                self._trace.wait(call)
            with self._failing():
                self._exchange.check_unchanged(call)
            call.guarded = []

    def poll(self, call: Call) -> bool:
        """Let other ranks run once, and return whether a call is complete."""
        if not call.done:
            self._scheduler.give_way(call)
        return call.done

    def poll_keys(self, keys: Sequence[str]) -> None:
        """Let other ranks run once, which may change keys of the store."""
        if self._is_rank():
            self._scheduler.give_way(KeyWait(keys, calling_line()))

    def wait_for_keys(self, keys: Sequence[str], timeout: datetime.timedelta) -> None:
        """Let other ranks run until keys of the store are set; raise KeyNotSet if no rank will set them."""
        if not all(key in self._values for key in keys):
            with self._failing():
                self._check_thread("wait for keys of the store")
            waiting = KeyWait(keys, calling_line(), timeout.total_seconds())
            rank = self._scheduler.running().rank
            self._key_waits[rank] = waiting
            try:
                self._scheduler.wait(waiting)
            finally:
                del self._key_waits[rank]
            if waiting.error is not None:
                raise waiting.error

    def keys_changed(self) -> None:
        """Let ranks go on whose keys of the store are set."""
        for waiting in self._key_waits.values():
            waiting.done = waiting.error is not None or all(key in self._values for key in waiting.keys)
        done = {rank: waiting for rank, waiting in self._key_waits.items() if waiting.done}
        if done:
            self._ended_waits.clear()
            self._scheduler.wake(done)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """End all ranks at once if the block raises, even if the program catches the error."""
        try:
            yield
        except RankStopped:
            raise
        except BaseException as error:
            self._scheduler.fail(error)
            raise

    def _check_caller(self, call: Call) -> None:
        self._check_thread(call.operation)
        current = self._scheduler.running().rank
        if current != call.rank:
            raise NonMemberError(
                f"{self.describe(current)} calls {call.operation} with a group object of rank {call.rank}: {call.group}"
                f"\n    at {call.line}\n    each rank uses the object that its own new_group returned",
                ranks=(current,),
            )
        for tensor in (*call.inputs, *call.outputs):
            reason = ""
            if tensor.device.type not in self._exchange.devices:
                reason = f"on {tensor.device}; simulated ranks compute on the CPU and have no CUDA streams"
            elif tensor.dtype in _NOT_IN_COLLECTIVES and not call.is_transfer:
                reason = f"of {tensor.dtype}, which neither gloo nor NCCL has: pass it as torch.int32, or as bytes"
            if reason:
                raise UnsupportedError(
                    f"{self.describe(call.rank)}: {call.operation} of a tensor {reason}\n    at {call.line}",
                    ranks=(call.rank,),
                )

    def _is_rank(self) -> bool:
        """Whether this is the thread of the running rank."""
        running = self._scheduler.current
        return running is not None and running.thread is threading.current_thread()

    def _check_thread(self, what: str) -> None:
        running = self._scheduler.running()
        thread = threading.current_thread()
        if thread is not running.thread:
            raise UnsupportedError(
                f"{what} in the thread {thread.name!r}, while {self.describe(running.rank)} runs; simulated ranks "
                f"communicate in their own thread only\n    at {calling_line()}",
                ranks=(running.rank,),
            )

    def _check_all_finished(self) -> None:
        pending = self._exchange.pending()
        if pending:
            call = pending[0]
            missing = self.missing(call)
            more = f"\nand {len(pending) - 1} more calls" if len(pending) > 1 else ""
            names = ", ".join(map(self.describe, missing[:4])) + (", ..." if len(missing) > 4 else "")
            error = UnfinishedCalls(
                f"all ranks have ended, and {names} did not make a call that others made\n\n"
                f"{self._exchange.story(call)}{more}",
                ranks=(*missing, call.rank),
            )
        else:
            unequal = self._groups.unequal_counts(self._running)
            if unequal is None:
                return
            error = UnfinishedCalls(unequal[0], ranks=unequal[1])
        self._scheduler.fail(error)
        self.close()
        raise error

    def _on_stall(self) -> None:
        """End the wait for keys of the store that has the shortest timeout; without one, all ranks: a deadlock.

        A rank that waits again and again, although no rank has done anything, does not count.
        """
        waits = {
            rank: waiting
            for rank, waiting in self._key_waits.items()
            if not waiting.done and self._ended_waits[rank] < _REPEATED_WAITS
        }
        if not waits:
            for state in self.ranks:
                state.waits_for = state.waits_for or state.polls
            self._scheduler.fail(_deadlock(self, Deadlock))
            return
        rank = min(waits, key=lambda waiting: waits[waiting].seconds)
        waits[rank].error, waits[rank].done = _deadlock(self, KeyNotSet), True
        self._ended_waits[rank] += 1
        self._scheduler.wake({rank: waits[rank]})

    def _on_error(self, rank: int, error: BaseException) -> None:
        if not isinstance(error, SimulationError):
            self.failed_rank = rank
            if self.world_size > 1:
                error.add_note(f"raised on {self.describe(rank)}; then:\n{_positions_text(self)}")

    def _add_handled(self, error: BaseException) -> None:
        """Add a note on exceptions that ranks handled when they made the calls that are in error."""
        for rank in error.ranks if isinstance(error, SimulationError) else ():
            if rank in self._handled:
                error.add_note(f"{self.describe(rank)} made its last call while it handled {self._handled[rank]}")

    def _switch_to(self, rank: int) -> None:
        self._switch.to(self._states[rank])

    def _on_thread(self, rank: int, function: Callable[[], Any]) -> Callable[[], Any]:
        """Return ``function`` with the thread-local state of torch that the rank had at the end of its last run."""

        def run() -> Any:
            device, grad = self._thread_state[rank]
            torch.set_num_threads(1)  # of this rank: OpenMP keeps it by thread
            if device.type != "cpu":
                torch.set_default_device(device)
            torch.set_grad_enabled(grad)
            if rank not in self._with_own_modules:
                self._with_own_modules.add(rank)
                self._own_modules.import_all()
            try:
                value = self._own_modules.on_this_rank(function)()
            except SystemExit as error:  # else the caller would exit, and with 0 as if all ranks had ended
                text = f"{self.describe(rank)} called sys.exit({error.code!r})\n    at {raising_line(error)}"
                raise SimulationError(text, ranks=(rank,)) from error
            self._thread_state[rank] = torch.get_default_device(), torch.is_grad_enabled()
            return value

        return run

    def _torchrun(self, rank: int) -> dict[str, str]:
        size = str(self.world_size)
        return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # fmt: skip

    def _replacements(self, rank: int) -> dict[Any, dict[str, Any]]:
        """Return the functions that this rank replaces: object -> name -> function."""
        store = self._new_store()

        def meet(url: str, **_: Any) -> Iterator[Any]:
            given = {"rank": rank, "world_size": self.world_size}
            given.update((name, int(value)) for name, value in parse_qsl(urlsplit(url).query) if name in given)
            if given != {"rank": rank, "world_size": self.world_size}:
                raise SimulationError(
                    f"rendezvous with rank {given['rank']} of {given['world_size']}; this is simulated rank {rank} of "
                    f"{self.world_size}",
                    ranks=(rank,),
                )
            yield store, rank, self.world_size

        def new_group(size: int, index: Any, ranks: Sequence[int], backend: Any, store: Any, name: str, /,
                      backend_options: Any = None, timeout: Any = None, pg_tag: Any = None, device_id: Any = None,
                      group_desc: str | None = None) -> tuple[Any, Any]:  # fmt: skip
            self._scheduler.check_running()
            with self._failing():
                self._check_thread("new_group")
                if size == 0:
                    raise UnsupportedError(
                        f"{self.describe(rank)} calls new_group([]); expected at least one rank, as torch's own groups "
                        f"of processes do, or None for all ranks\n    at {calling_line()}",
                        ranks=(rank,),
                    )
                shared = self._groups.create(rank, tuple(ranks), name, group_desc or "")
                if rank not in shared.ranks:
                    return c10d.GroupMember.NON_GROUP_MEMBER, None
                group = SimulatedGroup(self, shared, rank, self._groups.unique_name(rank))
                self._groups.register(group, str(backend), store)
                return group, store

        def not_in_group(operation: str) -> None:
            error = NonMemberError(
                f"{self.describe(rank)} calls {operation} on a group that it is not a member of: new_group returned "
                f"GroupMember.NON_GROUP_MEMBER to it\n    at {calling_line()}",
                ranks=(rank,),
            )
            self._scheduler.fail(error)
            raise error

        def sleep(seconds: float, pause: Callable[[float], None] = time.sleep) -> None:
            pause(seconds)
            if self._is_rank():  # for a file, say, that another rank will write
                self._scheduler.give_way()

        functions: dict[str, Any] = {
            "_new_process_group_helper": new_group,
            "_warn_not_in_group": not_in_group,
            "_unregister_all_process_groups": functools.partial(self._groups.unregister, rank),
        }
        handlers = dict.fromkeys(_RENDEZVOUS._rendezvous_handlers, meet)
        return {
            c10d: functions,
            dist: {"TCPStore": self._tcp_store, "FileStore": self._file_store},  # real ones block all ranks
            _RENDEZVOUS: {"_rendezvous_handlers": handlers},
            time: {"sleep": sleep},
            **self._rejections(rank),
        }

    def _new_store(self) -> SimulatedStore:
        """Return the store of the ranks, with a timeout of its own."""
        store = SimulatedStore(self, self._values)
        self._stores.append(store)  # torch has a reference to its C++ part alone
        return store

    def _tcp_store(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: datetime.timedelta | None = None,
        **_: Any,
    ) -> dist.Store:
        """Return the part of the store that is in place of one at an address; arguments as of ``dist.TCPStore``."""
        store = self._new_store()
        if timeout is not None:
            store.set_timeout(timeout)
        return dist.PrefixStore(f"tcp://{host_name}:{port}", store)

    def _file_store(self, file_name: str, world_size: int = -1) -> dist.Store:
        """Return the part of the store that is in place of a file; arguments as of ``dist.FileStore``."""
        return dist.PrefixStore(f"file://{os.path.abspath(file_name)}", self._new_store())

    def _rejections(self, rank: int) -> dict[Any, dict[str, Any]]:
        """Return the functions that raise UnsupportedError on this rank."""

        def reject(doing: str, reason: str) -> NoReturn:
            text = f"{self.describe(rank)} {doing}; {reason}\n    at {calling_line()}"
            error = UnsupportedError(text, ranks=(rank,))
            self._scheduler.fail(error)
            raise error

        fork = functools.partial(
            reject,
            "forks this process",
            "simulated ranks are threads of it, and a forked process would have no other rank",
        )
        created: Any = torch.cuda.Stream.__new__

        def new_stream(cls: Any, *args: Any, **options: Any) -> Any:
            if calling_line().through is None:  # Megatron creates streams on a CPU too
                reject(
                    "creates a torch.cuda.Stream",
                    "simulated ranks compute on the CPU, in the order of the program, and have no CUDA streams",
                )
            return created(cls, *args, **options)

        of_profiler = vars(torch.autograd.profiler)
        disable = of_profiler["_disable_profiler"]

        def profile(start: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if self._profiled not in (None, rank):
                reject(
                    f"starts a profiler of torch while that of rank {self._profiled} runs",
                    "simulated ranks are threads of one process, which has one profiler: profile one of them",
                )
            self._profiled = rank
            return start(*args, **options)

        def end_profile() -> Any:
            self._profiled = None
            return disable()

        return {
            os: {"fork": fork, "forkpty": fork},
            torch.cuda.Stream: {"__new__": staticmethod(new_stream)},
            torch.autograd.profiler: {
                "_prepare_profiler": functools.partial(profile, of_profiler["_prepare_profiler"]),
                "_enable_profiler": functools.partial(profile, of_profiler["_enable_profiler"]),
                "_disable_profiler": end_profile,
            },
        }


def _same_on_every_rank() -> dict[Any, dict[str, Any]]:
    if not has_megatron():
        return {}
    importlib.import_module("parallel_state.megatron")  # patches Megatron before its first import
    return in_process_writers()


# ---- the text of a deadlock: its cause, and for every rank where it is and whom it waits for -----------------------


def _deadlock(simulation: Simulation, kind: type[_Deadlock]) -> _Deadlock:
    positions = _positions(simulation)
    cause, ranks = cause_of(simulation, positions) or _without_keys(simulation, positions)
    size = len(simulation.ranks)
    head = f"{cause}\n\nnone of the {len(positions)} ranks that have not ended can go on ({size} ranks in all)"
    return kind(f"{head}\n\n{stories(simulation, positions)}", ranks=ranks)


def _positions_text(simulation: Simulation) -> str:
    """Return where the ranks are that have not ended, for the note of another rank's error."""
    waiting = _positions(simulation)
    ready = [
        rank.rank for rank in simulation.ranks if not rank.ended and rank.error is None and rank.rank not in waiting
    ]
    parts = [f"{describe_ranks(simulation, ready)}: can go on"] if ready else []
    if waiting:
        parts.append(stories(simulation, waiting))
    return "\n".join(parts) or "all other ranks have ended"


def _positions(simulation: Simulation) -> dict[int, Position]:
    positions = {}
    for rank in simulation.ranks:
        waiting = rank.waits_for
        if not rank.ended and waiting is not None:
            missing = simulation.missing(waiting) if isinstance(waiting, Call) else []
            positions[rank.rank] = Position(str(waiting), str(waiting.line), tuple(missing))
    return positions


def _without_keys(simulation: Simulation, positions: dict[int, Position]) -> tuple[str, tuple[int, ...]]:
    waiting = {rank: simulation.ranks[rank].waits_for for rank in positions}
    ranks = tuple(rank for rank, what in waiting.items() if isinstance(what, KeyWait))
    return f"no rank will set the keys of {', '.join(sorted({str(waiting[rank]) for rank in ranks}))}", ranks
