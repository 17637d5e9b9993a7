"""Recovery of a run: which failures it goes on after, and their record.

``RunLifecycle.recover`` in ``trainer/lifecycle.py`` restarts the groups and loads the newest state of all roles.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcontroller.errors import (
    CallRejected,
    CallTimeout,
    ConnectionLost,
    GroupBroken,
    GroupError,
    ResourceError,
    WorkerDied,
    WorkerError,
)
from mcontroller.ray.rank_logs import find_logs
from trainer.config import TrainerConfig

_logger = logging.getLogger(__name__)

FAILURES = "failures.jsonl"
"""The file of the failures of a run, beside its checkpoints: a JSON object in each line."""

RESIZED = "PoolsResized"
"""The kind of the event that pools have other sizes from now on, which is no failure of its own."""

OF_ENGINES = ("EngineDied", "EngineHung")
"""Exceptions of workers because of an engine in a process of its own, which has ended or hangs."""

HOUR_S = 3600.0

LOG_LINES = 40
"""Lines of the output of a rank in the record of its failure."""

SAME_FAILURE = 3
"""The run ends when a step has failed so often for the same cause: it would fail again."""


@dataclass(frozen=True)
class Failure:
    """A failure of a run.

    Attributes:
        time: when the controller knew it, in seconds since the epoch.
        step: number of the step that failed.
        kind: the type of the error; of a worker's own exception that of the exception.
        role: the group that failed first.
        message: the first line of the error.
        details: the fields of the error, such as the rank, its coordinates, stacks and the end of its log.
    """

    time: float
    step: int
    kind: str
    role: str
    message: str
    details: dict[str, Any]

    @property
    def cause(self) -> tuple[Any, ...]:
        """What failures with the same cause have in common."""
        return self.kind, self.role, self.details.get("rank"), self.details.get("method")


def root_error(error: BaseException) -> BaseException:
    """Return the failure of a group that an error follows from: a later call's, or a transfer's; else the error."""
    while True:
        cause = error.first_cause if isinstance(error, GroupBroken) else error.__cause__
        if not isinstance(cause, GroupError) or (isinstance(error, GroupError) and not isinstance(error, GroupBroken)):
            return error
        error = cause


class Recovery:
    """Decides after which failures a run goes on, and records all of them.

    A process that died or cannot be reached, an engine too, and a call that was late, may not happen again. A worker's
    own exception most likely does, so it ends the run unless ``trainer.restart_on`` has its type.

    Args:
        config: has the number of restarts, the types, and the directory of the record.
        now: the clock, in seconds.
        logs: directory of the output of the ranks; None if there is none.

    Attributes:
        failures: the failures after which this process went on.
    """

    def __init__(
        self,
        config: TrainerConfig,
        now: Callable[[], float] = time.time,
        logs: str | os.PathLike[str] | None = None,
    ) -> None:
        self._config, self._now, self._logs = config, now, logs
        self.failures: list[Failure] = []

    def admit(self, error: BaseException, step: int) -> Failure | None:
        """Record a failure; return it if the run goes on after it, else None, with the reason as a note of the error.

        Args:
            error: what the step raised.
            step: number of the step.
        """
        cause, failure = root_error(error), self._failure(error, step)
        no_room = self._config.elastic and isinstance(cause, ResourceError)  # any more
        if not isinstance(cause, GroupError) and not no_room:  # of the program or its files: no group has failed
            return None
        reason = self._why_it_ends(cause, failure)
        self._record(failure, reason)
        if reason is not None:
            error.add_note(f"The run was not restarted: {reason}.")
            return None
        self.failures.append(failure)
        return failure

    def resized(self, step: int, text: str, **details: Any) -> Failure:
        """Record the event that pools have other sizes from now on, and return it.

        Args:
            step: number of the next step.
            text: for people.
            details: the sizes before and after.
        """
        event = Failure(self._now(), step, RESIZED, "", text, details)
        self._record(event, None)
        return event

    def is_admitted(self, error: BaseException, step: int) -> bool:
        """Return whether ``admit`` would return a failure; nothing is recorded."""
        return self._why_it_ends(root_error(error), self._failure(error, step)) is None

    def _failure(self, error: BaseException, step: int) -> Failure:
        cause = root_error(error)
        fields = getattr(cause, "fields", {})
        kind = cause.cause.partition(":")[0] if isinstance(cause, WorkerError) else type(cause).__name__
        line = str(cause).partition("\n")[0]
        return Failure(self._now(), step, kind, str(fields.get("role", "")), line, dict(fields))

    def _why_it_ends(self, cause: BaseException, failure: Failure) -> str | None:
        is_workers = isinstance(cause, WorkerError)
        if is_workers and (
            isinstance(cause, CallRejected) or failure.kind not in (*self._config.restart_on, *OF_ENGINES)
        ):
            return f"{failure.kind} is an exception of the worker's own code, and trainer.restart_on does not have it"
        if not is_workers and not isinstance(cause, WorkerDied | ConnectionLost | CallTimeout | ResourceError):
            return f"{failure.kind} is not the failure of a process"
        same = [earlier for earlier in self.failures if earlier.cause == failure.cause]
        if sum(earlier.step == failure.step for earlier in same) >= SAME_FAILURE - 1:
            return f"step {failure.step} has failed {SAME_FAILURE} times with the same cause"
        limit, lately = self._config.max_restarts, [earlier for earlier in same if failure.time - earlier.time < HOUR_S]
        if len(lately) >= limit:
            return f"trainer.max_restarts={limit}, and {len(lately)} restarts in an hour had this cause"
        return None

    def _record(self, failure: Failure, reason: str | None) -> None:
        directory = Path(self._config.default_local_dir)
        content = {**asdict(failure), "restarted": reason is None, "reason": reason}
        try:
            content["logs"] = self._last_lines(failure)
            directory.mkdir(parents=True, exist_ok=True)
            with open(directory / FAILURES, "a", encoding="utf-8") as file:
                file.write(json.dumps(content, default=str) + "\n")
        except OSError as error:  # must not replace the failure
            _logger.warning("cannot record a failure: %s", error)

    def _last_lines(self, failure: Failure) -> dict[str, list[str]]:
        """Return the end of the output of the ranks that failed, as far as their files are on this node."""
        ranks = {failure.details.get("rank"), *failure.details.get("ranks", ())}
        logs = [] if self._logs is None else find_logs(Path(self._logs))
        return {str(log): log.tail(LOG_LINES) for log in logs if log.role == failure.role and log.rank in ranks}
