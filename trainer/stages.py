"""The stages of a step: their seconds and memory, which run at the same time, and the devices that groups share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mcontroller.data.batch import DataProto
from mcontroller.errors import GroupBroken, GroupError
from mcontroller.group import GroupMethod, WorkerGroup
from mcontroller.ray.resource_pool import RayResourcePool
from mcontroller.trace.recorder import recorder
from mcontroller.transport import Future
from trainer.metrics import Metrics

WATCH_S = 0.005
"""[s] How long the caller waits for one of several running stages before it looks at the next one."""

WATCH_LAST_S = 60.0
"""[s] How long the caller waits at a time for the only running stage."""

RESOLUTION_S = 1e-6
"""[s] Less than this is no overlap of stages, but rounding."""

logger = logging.getLogger(__name__)


class SharedDevices:
    """Hands the memory of devices from group to group.

    Before a call, every other group on the same devices offloads all its parts, and the called group those that the
    method does not need. The call brings back the parts that it needs: see ``workers.memory.offloader``.

    Args:
        offload: ``auto``: groups that share GPUs; ``always``: every group, on CPUs too; ``never``: none.
        communicators: whether groups that leave free the buffers of NCCL too.
    """

    def __init__(self, offload: str, communicators: bool = False) -> None:
        self.offload = offload
        self.communicators = communicators
        self._groups: dict[str, tuple[WorkerGroup[Any], RayResourcePool]] = {}
        self._pools: dict[str, RayResourcePool] = {}

    def add(self, group: WorkerGroup[Any], pool: RayResourcePool) -> None:
        """Add a group that runs in this pool."""
        self._pools[group.name] = pool
        if self.offload == "always" or (self.offload == "auto" and pool.use_gpu):
            self._groups[group.name] = (group, pool)

    def neighbors(self, group: WorkerGroup[Any]) -> list[WorkerGroup[Any]]:
        """Return the other groups that hand memory to the group, and get memory from it."""
        if group.name not in self._groups:
            return []
        pool = self._pools[group.name]
        others = [pair for name, pair in self._groups.items() if name != group.name]
        return [other for other, other_pool in others if other_pool.shares_bundles(pool)]

    def are_shared(self, group: WorkerGroup[Any]) -> bool:
        """Return whether memory is handed over before calls of the group."""
        return bool(self.neighbors(group)) or (self.offload == "always" and group.name in self._groups)

    def compete(self, left: WorkerGroup[Any], right: WorkerGroup[Any]) -> bool:
        """Return whether calls of two groups must not run at the same time.

        They compete if they are one group, share GPUs, or hand memory to each other. Processes of several slots of a
        CPU pool do not compete.
        """
        if left.name == right.name:
            return True
        if left.name not in self._pools or right.name not in self._pools:
            return False
        if not self._pools[left.name].shares_bundles(self._pools[right.name]):
            return False
        return self._pools[left.name].use_gpu or {left.name, right.name} <= self._groups.keys()

    def make_room(self, method: GroupMethod[..., Any, Any]) -> None:
        """Free the memory that a call of this method does not need, on the devices of its group."""
        if not self.are_shared(method.group):
            return
        options = {"communicators": True} if self.communicators else {}
        leaving = [other.offload.options(blocking=False)(**options) for other in self.neighbors(method.group)]
        leaving.append(method.group.offload.options(blocking=False)(keep_for=method.name))
        for call in leaving:
            call.get()


class StageCall:
    """A stage that was asked for: it waits for the stages that it competes with, then runs.

    Attributes:
        name: of the stage.
        method: the method that it calls.
    """

    def __init__(
        self, stages: OverlappingStages, name: str, method: GroupMethod[..., Any, Any], arguments: tuple[Any, ...]
    ) -> None:
        self.name = name
        self.method = method
        self._stages = stages
        self._arguments: tuple[Any, ...] | None = arguments
        self._result: Future[Any] | DataProto | None = None
        self._started = 0.0

    def get(self) -> Any:
        """Wait for the stage and return its result; the tensors of a batch stay on the workers."""
        self._stages.wait_for(self)
        return self._result.get() if isinstance(self._result, Future) else self._result

    def start(self) -> None:
        """Send the call."""
        assert self._arguments is not None
        self._started = time.perf_counter()
        self._result = self.method.options(blocking=False)(*self._arguments)
        self._arguments = None

    def ended(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the end of the call; return whether it has ended, and record its interval then."""
        assert self._result is not None
        if not self._result.wait(seconds):
            return False
        self._stages.recorder.ran(self.name, self._started, time.perf_counter())
        return True

    def error(self) -> GroupError | None:
        """Return the error of a call that has ended; None if there is none."""
        assert self._result is not None
        try:
            self._result.check()
        except GroupBroken as error:  # of the group that the failure of this call, or an earlier one, has broken
            return error.first_cause if isinstance(error.first_cause, GroupError) else error
        except GroupError as error:
            return error
        return None

    def cancel(self) -> None:
        """Cancel the call, or drop its result if it has begun."""
        if self._result is not None:
            self._result.cancel()


class OverlappingStages:
    """Runs stages at the same time, as far as their groups do not compete; see ``Stages.overlapping``.

    Calls of groups that compete run in the order in which they were asked for. The order in which stages end does not
    change any result: the caller reads the results in its own order.

    Args:
        recorder: records the seconds of the stages, and hands over the memory of shared devices.

    Attributes:
        recorder: as passed.
    """

    def __init__(self, recorder: Stages) -> None:
        self.recorder = recorder
        self._waiting: list[StageCall] = []
        self._running: list[StageCall] = []

    def __call__(self, name: str, method: GroupMethod[..., Any, Any], *arguments: Any) -> StageCall:
        """Start the stage ``name``, which calls a method with these arguments, now or as soon as it can.

        Args:
            name: of the stage.
            method: the method of a group.
            arguments: of the method.

        Returns:
            The stage; ``get`` returns the result of the method.
        """
        stage = StageCall(self, name, method, arguments)
        self._waiting.append(stage)
        self._take_ended([running for running in self._running if running.ended(0.0)])
        return stage

    def start_all(self) -> None:
        """Return when every stage has started: the caller can then compute without delaying one."""
        while self._waiting:
            self._advance()

    def wait_for(self, stage: StageCall) -> None:
        """Return when a stage has ended."""
        while stage in self._waiting or stage in self._running:
            self._advance()

    def finish(self) -> None:
        """Return when every stage has ended."""
        while self._waiting or self._running:
            self._advance()

    def cancel(self) -> None:
        """Cancel every stage that has not ended: waiting ones never start, the results of running ones are dropped."""
        waiting, running = self._waiting, self._running
        self._waiting, self._running = [], []
        for stage in running:
            stage.cancel()
        if waiting or running:
            names = ", ".join(stage.name for stage in (*running, *waiting))
            logger.warning("cancelled the stages %s, because a stage of the same step failed", names)

    def _start_free(self) -> None:
        """Start the stages that compete with none that runs, or waits before them."""
        for stage in tuple(self._waiting):
            before = [*self._running, *self._waiting[: self._waiting.index(stage)]]
            if not any(self.recorder.devices.compete(stage.method.group, other.method.group) for other in before):
                self._waiting.remove(stage)
                self.recorder.prepare(stage.name, stage.method)
                stage.start()
                self._running.append(stage)

    def _advance(self) -> None:
        """Wait until a running stage ends, and start those that waited for it; raise the first error."""
        ended: list[StageCall] = []
        pump = self.recorder.pump
        pause = WATCH_S if len(self._running) > 1 or pump is not None else WATCH_LAST_S
        while not ended:
            ended = [stage for stage in self._running if stage.ended(pause)]
            if pump is not None:
                pump()
        self._take_ended(ended)

    def _take_ended(self, ended: list[StageCall]) -> None:
        self._running = [stage for stage in self._running if stage not in ended]
        errors = [error for stage in ended if (error := stage.error()) is not None]
        if errors:
            raise min(errors, key=_failed_at)
        self._start_free()


def _failed_at(error: GroupError) -> float:
    return float(error.fields.get("failed_at", float("inf")))


class Stages:
    """The stages of a step: ``with stages("generate", actor.generate_sequences): ...``. They do not nest.

    A stage hands the memory of shared devices to the group that it calls, and adds the seconds of its block to its
    name, and the seconds of handing over to the stage ``offload``. Stages that do not depend on each other run at the
    same time in a block of ``overlapping``.

    Args:
        devices: the devices that groups share; by default none is shared.
        patience: ``trainer.patience``: seconds after which calls of a stage are reported, and fail if they are stuck;
            0 for none.
        factor: ``trainer.patience_factor``: times the slowest run of a stage so far, if that is more.

    Attributes:
        totals: seconds by stage, of the whole run.
        devices: as passed.
        pump: called while stages are waited for, and after each, to go on with what runs beside them. None: nothing.
    """

    def __init__(self, devices: SharedDevices | None = None, patience: float = 0.0, factor: float = 0.0) -> None:
        self.devices = devices or SharedDevices("never")
        self._patience, self._factor = patience, factor
        self._slowest: dict[str, float] = {}
        self.totals: dict[str, float] = {}
        self._step: dict[str, float] = {}
        self._intervals: list[tuple[float, float]] = []
        self._called: dict[str, tuple[WorkerGroup[Any], dict[str, str]]] = {}
        self.pump: Callable[[], None] | None = None

    @contextmanager
    def __call__(self, name: str, method: GroupMethod[..., Any, Any] | None = None) -> Iterator[None]:
        """Run the block as the stage ``name``.

        Args:
            name: of the stage.
            method: the method of a group that the block calls, if it calls one.
        """
        if method is not None:
            self.prepare(name, method)
        with self._timed(name):
            yield

    @contextmanager
    def overlapping(self) -> Iterator[OverlappingStages]:
        """Run the stages that the block starts at the same time, as far as their groups do not compete.

        The block ends when all of them have ended. If one fails, or the block raises, the others are cancelled: those
        that have not started never do, the results of the others are dropped, and the first error is raised.
        """
        stages = OverlappingStages(self)
        try:
            yield stages
            stages.finish()
        except BaseException:
            stages.cancel()
            raise

    def prepare(self, name: str, method: GroupMethod[..., Any, Any]) -> None:
        """Hand the memory of shared devices to the group of a method, which the stage ``name`` calls next."""
        group, _ = self._called.get(method.group.name, (None, {}))
        if group is not method.group:  # a group that was started again has the same name
            self._called[method.group.name] = (method.group, {})
        self._called[method.group.name][1][method.name] = name
        if self._patience:
            method.group.fail_stuck_calls(max(self._patience, self._factor * self._slowest.get(name, 0.0)))
        if self.devices.are_shared(method.group):
            with self._timed("offload"):
                self.devices.make_room(method)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.ran(name, started, time.perf_counter())
            if self.pump is not None:
                self.pump()

    def ran(self, name: str, started: float, ended: float) -> None:
        """Add the seconds of a stage that ran from ``started`` to ``ended``, by ``time.perf_counter``."""
        self._add(name, ended - started)
        self._slowest[name] = max(self._slowest.get(name, 0.0), ended - started)
        self._intervals.append((started, ended))
        if (trace := recorder()) is not None:
            trace.add(f"stage {name}", int(started * 1e9), int(ended * 1e9))
            trace.flush_if_due()

    def _add(self, name: str, seconds: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + seconds
        self._step[name] = self._step.get(name, 0.0) + seconds

    def timing(self, started: float, tokens: int, samples: int) -> dict[str, float]:
        """Return the metrics of a step's time: the seconds of every stage (``take_step``) and of the whole, and rates.

        Args:
            started: when the step began, by ``time.perf_counter``.
            tokens: of the batch.
            samples: of the batch.
        """
        seconds = time.perf_counter() - started
        timing = {f"timing_s/{name.replace(' ', '_')}": spent for name, spent in self.take_step(seconds).items()}
        perf = {"perf/tokens_per_s": tokens / seconds, "perf/samples_per_s": samples / seconds}
        return timing | {"timing_s/step": seconds} | perf

    def take_step(self, seconds: float) -> dict[str, float]:
        """Return the seconds by stage since the last call of this method; all values together are ``seconds``.

        The seconds in which no stage ran are the stage ``controller``. Those that count in several stages, because
        these ran at the same time, are subtracted as ``overlapped``, which is negative.

        Args:
            seconds: since the last call.
        """
        covered = _covered(self._intervals)
        overlapped = covered - sum(self._step.values())
        self._add("controller", seconds - covered)
        if overlapped < -RESOLUTION_S:
            self._add("overlapped", overlapped)
        return self.drop_step()

    def drop_step(self) -> dict[str, float]:
        """Return the seconds by stage since the last call of ``take_step``, and start the next step."""
        step, self._step, self._intervals = self._step, {}, []
        return step

    def take_memory(self) -> dict[str, float]:
        """Return the memory of every called group by stage since the last call: ``memory/<group>/<stage>/<value>``.

        The values are those that the workers report, the most over the ranks: see ``MemoryUse``.
        """
        return self.ask_memory(tuple(self._called))()

    def ask_memory(self, groups: Collection[str]) -> Callable[[], dict[str, float]]:
        """Ask groups for what ``take_memory`` returns, after the calls that they run now; return a function that waits.

        Args:
            groups: the names of groups; only those that were called since the last time are asked.
        """
        called = {name: self._called.pop(name) for name in groups if name in self._called}
        reports = {
            name: group.take_memory_use.options(blocking=False)()
            for name, (group, _) in called.items()
            if group.broken is None  # its error is raised by the call that needs its result
        }

        def metrics() -> dict[str, float]:
            memory = Metrics()
            for group, report in reports.items():
                stages = called[group][1]
                for use in report.get():
                    for method in use.keys() & stages.keys():
                        prefix = f"memory/{group}/{stages[method].replace(' ', '_')}"
                        memory.add({f"{prefix}/{value}": size for value, size in use[method].items()})
            return memory.take()

        return metrics


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that are in at least one of the intervals."""
    covered, reached = 0.0, float("-inf")
    for started, ended in sorted(intervals):
        covered += max(0.0, ended - max(started, reached))
        reached = max(reached, ended)
    return covered
