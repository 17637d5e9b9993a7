"""The process of an engine, from the worker's side: start it, call it, and report why it failed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from mcontroller.errors import MControllerError
from workers.generate.vllm.interpreter import interpreter_variables

_IN_ENGINE = Path(__file__).parent / "in_engine"
FIND_TOOL_CALLS = _IN_ENGINE / "find_tool_calls.py"
"""A program for ``EngineProcess``: a parser of vLLM for tool calls."""
_OF_WEIGHTS = Path(__file__).parents[2] / "weights" / "in_engine"
_EXIT_S = 10.0
_ANSWER_S = 10.0
_LOG_TAIL_LINES = 30
_LOG_BYTES = 1 << 20
_ERROR_LINE = re.compile(r"(?:\(.*?\) )?(?:ERROR .*?\] )?(\w[\w.]*(?:Error|Exception)(?:: .*)?)")


class EngineError(MControllerError):
    """An engine that raised an exception.

    Attributes:
        method: the call that failed.
        pid: the process of the engine; 0 if there is none.
        log_tail: the last lines that the process wrote, and its traceback if it has answered with an error.
    """

    method: str
    pid: int = 0
    log_tail: str = ""


class EngineDied(EngineError):
    """An engine whose process has ended; ``exit_cause`` is its exit code or signal."""

    exit_cause: str


class EngineHung(EngineError, TimeoutError):
    """An engine that did not report progress in time, and was ended.

    Attributes:
        setting: the limit that it exceeded, ``start_timeout_s`` or ``silence_timeout_s``.
        timeout_s: its value.
    """

    setting: str
    timeout_s: float


class EngineProcess:
    """One engine in a separate process, which ends with this object, and with the thread that started it.

    Args:
        arguments: arguments of ``vllm.AsyncEngineArgs``.
        environment: variables of the process; a value of None removes the variable.
        start_timeout_s: seconds for the engine to start.
        silence_timeout_s: seconds without a sign of progress after which a call fails.
        python: the interpreter to run it with.
        program: the file to run.

    Raises:
        EngineError: the engine does not start; or one of its subclasses.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str | None],
        *,
        start_timeout_s: float,
        silence_timeout_s: float,
        python: str = sys.executable,
        program: Path = _IN_ENGINE / "serve_engine.py",
    ) -> None:
        self._limits = {"start_timeout_s": start_timeout_s, "silence_timeout_s": silence_timeout_s}
        self._method = "start"
        self._connection, theirs = multiprocessing.Pipe()
        self._log, self._reported = tempfile.TemporaryFile(), 0  # noqa: SIM115  # closed with the process
        variables = {**interpreter_variables(python), **environment}
        try:
            self._process = subprocess.Popen(
                [python, str(program), str(theirs.fileno()), str(program.parent), str(_OF_WEIGHTS)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in variables.items() if value is not None},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # the tracker of its shared memory outlives it, and unlinks what it has left
            )
        except OSError as error:
            raise EngineError(f"vLLM's interpreter does not start: {error}", method="start") from error
        theirs.close()
        self._end = weakref.finalize(self, _end, self._process, self._connection, self._log)
        self.send("start", **arguments)
        self.result()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the engine, and return its result. Raise the errors of ``result``."""
        self.send(method, **arguments)
        return self.result()

    def send(self, method: str, **arguments: Any) -> None:
        """Start a call, whose result ``result`` returns.

        Raises:
            EngineDied: the process has ended.
        """
        self._method = method
        try:
            self._connection.send((method, arguments))
        except OSError:
            raise self._died() from None

    def check(self, *, was_silent: bool) -> None:
        """Check that the engine answers. Raise the errors of ``result``.

        Args:
            was_silent: whether requests have waited for it for ``silence_timeout_s`` already: then not as long again.
        """
        self.send("check")
        self.result(_ANSWER_S if was_silent else None)

    def result(self, wait_s: float | None = None) -> Any:
        """Wait for the result of a call that was sent.

        Args:
            wait_s: seconds without a sign of progress after which the call fails; None: the limit of the call.

        Raises:
            EngineDied: the process has ended.
            EngineHung: it did not report progress in time; it is ended.
            EngineError: the method raised an exception.
        """
        setting = "start_timeout_s" if self._method == "start" else "silence_timeout_s"
        while True:
            kind, *values = self._received(setting, wait_s)
            if kind == "result":
                self._reported = self._size()
                return values[0]
            if kind == "error":
                cause, self._reported = _last_error(self._written(self._reported)), self._size()
                text = f"vLLM's engine (pid {self.pid}) failed in {self._method}: {values[0]}"
                if cause.partition(": ")[2] not in text:  # of vLLM's own processes, to which its error only refers
                    text += f"; before, it wrote: {cause}"
                log = f"{self._log_tail()}\n{values[1]}"
                raise EngineError(text, method=self._method, pid=self.pid, log_tail=log)

    def close(self) -> None:
        """End the process."""
        self._end()

    def _received(self, setting: str, wait_s: float | None) -> tuple[Any, ...]:
        """The next message; the death of the process counts only if it has sent none."""
        exited = os.pidfd_open(self.pid)
        try:
            ready = wait([self._connection, exited], self._limits[setting] if wait_s is None else wait_s)
        finally:
            os.close(exited)
        if not ready:
            raise self._hung(setting)
        if self._connection in ready or self._connection.poll():
            with contextlib.suppress(EOFError, OSError):
                message: tuple[Any, ...] = self._connection.recv()
                return message
        raise self._died()

    def _died(self) -> EngineDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)  # its connection is closed before it has ended
        cause, log, new = exit_cause(self._process.poll()), self._log_tail(), self._written(self._reported)
        last = _last_error(new) or (new.splitlines() or ["it wrote nothing"])[-1]
        self.close()
        return EngineDied(
            f"vLLM's engine (pid {self.pid}) ended in {self._method} with {cause}: {last}",
            method=self._method,
            pid=self.pid,
            exit_cause=cause,
            log_tail=log,
        )

    def _hung(self, setting: str) -> EngineHung:
        log, limit = self._log_tail(), self._limits[setting]
        self._process.kill()
        self.close()
        return EngineHung(
            f"vLLM's engine (pid {self.pid}) reported no progress in {self._method} for {limit:g} s, and was ended: "
            f"set rollout.vllm.{setting} if it needs longer",
            method=self._method,
            pid=self.pid,
            setting=setting,
            timeout_s=limit,
            log_tail=log,
        )

    def _log_tail(self) -> str:
        return "\n".join(self._written().splitlines()[-_LOG_TAIL_LINES:])

    def _written(self, start: int = 0) -> str:
        """What the process wrote after a number of bytes; not more than the last ``_LOG_BYTES``."""
        start = max(start, self._size() - _LOG_BYTES)
        return os.pread(self._log.fileno(), _LOG_BYTES, start).decode(errors="replace")  # the process's offset stays

    def _size(self) -> int:
        return os.fstat(self._log.fileno()).st_size


def _last_error(log: str) -> str:
    """Return the last line of a log that a traceback ends with; empty if there is none."""
    errors = [match[1] for line in log.splitlines() if (match := _ERROR_LINE.fullmatch(line))]
    return errors[-1] if errors else ""


def exit_cause(code: int | None) -> str:
    """Return an exit code as text, or the signal that it stands for."""
    if code is None:
        return "an unknown exit code"
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"


def _end(process: subprocess.Popen[bytes], connection: Connection, log: IO[bytes]) -> None:
    connection.close()  # it notices between two calls, and ends
    try:
        process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    log.close()
