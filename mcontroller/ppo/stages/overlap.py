"""Stages that run at the same time: calls of groups that do not depend on each other."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from mcontroller.data.protocol import DataProto
from mcontroller.errors import GroupBroken, GroupError
from mcontroller.group import GroupMethod, WorkerGroup
from mcontroller.transport import Future

__all__ = ["OverlappingStages", "StageCall"]

logger = logging.getLogger(__name__)

WATCH_S = 0.005
"""[s] How long the caller waits for one of several running stages before it looks at the next one."""

WATCH_LAST_S = 60.0
"""[s] How long the caller waits at a time for the only running stage."""


class RunsStages(Protocol):
    """The part of ``Stages`` that is used here."""

    @property
    def devices(self) -> Competing:
        """The devices that groups share."""

    def prepare(self, name: str, method: GroupMethod[..., Any, Any]) -> None:
        """Hand the memory of shared devices to the group of a method."""

    def ran(self, name: str, started: float, ended: float) -> None:
        """Add the seconds of a stage."""


class Competing(Protocol):
    """The part of ``SharedDevices`` that is used here."""

    def compete(self, left: WorkerGroup[Any], right: WorkerGroup[Any]) -> bool:
        """Return whether calls of two groups must not run at the same time."""


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
        """Wait for the stage and return its result; the tensors of a batch stay on the workers.

        Raises:
            GroupError: the first error of any of the stages that run at the same time.
        """
        self._stages.wait_for(self)
        return self._result.get() if isinstance(self._result, Future) else self._result

    def start(self) -> None:
        """Send the call."""
        assert self._arguments is not None
        self._started = time.perf_counter()
        self._result = self.method.options(blocking=False)(*self._arguments)
        self._arguments = None

    @property
    def is_started(self) -> bool:
        """Whether the call was sent."""
        return self._result is not None

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

    def __init__(self, recorder: RunsStages) -> None:
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

        Raises:
            GroupError: a stage that was started before has failed.
        """
        stage = StageCall(self, name, method, arguments)
        self._waiting.append(stage)
        self._take_ended([each for each in self._running if each.ended(0.0)])
        return stage

    def start_all(self) -> None:
        """Return when every stage has started: the caller can then compute without delaying one."""
        while self._waiting:
            self._advance()

    def wait_for(self, stage: StageCall) -> None:
        """Return when a stage has ended.

        Raises:
            GroupError: the first error of any stage.
        """
        while stage in self._waiting or stage in self._running:
            self._advance()

    def finish(self) -> None:
        """Return when every stage has ended.

        Raises:
            GroupError: the first error of any stage.
        """
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
        pause = WATCH_S if len(self._running) > 1 else WATCH_LAST_S
        while not ended:
            ended = [stage for stage in self._running if stage.ended(pause)]
        self._take_ended(ended)

    def _take_ended(self, ended: list[StageCall]) -> None:
        self._running = [stage for stage in self._running if stage not in ended]
        errors = [error for stage in ended if (error := stage.error()) is not None]
        if errors:
            raise min(errors, key=_failed_at)
        self._start_free()


def _failed_at(error: GroupError) -> float:
    return float(error.fields.get("failed_at", float("inf")))
