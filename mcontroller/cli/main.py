"""Dispatch of the command line to a verb."""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib.metadata
import importlib.util
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import mcontroller
from mcontroller.errors import DataError, MControllerError
from mcontroller.output import Output, OutputError
from parallel_state.requirements import naming_extras

PROGRAM = "mcontroller"
DISTRIBUTION = "mcontroller"
VERBS = "mcontroller.verbs"
"""Group of the verbs: name -> module."""
CONFIGS = "mcontroller.configs"
"""Group of the dataclass ``run``: the configuration of a run."""
USAGE_ERROR, INTERRUPTED = 2, 130
"""Exit statuses."""
DEATH_OF_A_WORKER = "^A worker died or was killed while executing a task by an unexpected system error"
"""Lines that Ray prints of a process that died, unless its variable has another pattern: WorkerDied says the same."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit status; without a verb, print the list of verbs.

    Args:
        arguments: the command line without the program's name; by default ``sys.argv[1:]``.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    verbs = entry_points(VERBS)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(list_of(verbs))
        return 0
    name, *rest = words
    if name not in verbs:
        close = difflib.get_close_matches(name, verbs, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"the verbs are {', '.join(verbs)}"
        sys.stderr.write(f"{PROGRAM}: there is no verb {name!r}; {hint}\n")
        return USAGE_ERROR
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", DEATH_OF_A_WORKER)
    output = Output(sys.stdout, required=True)
    try:
        with naming_extras():
            verb: Any = verbs[name].load()
            parser = argparse.ArgumentParser(
                prog=f"{PROGRAM} {name}",
                description=verb.__doc__,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            verb.add_arguments(parser)
            with contextlib.redirect_stdout(output):
                status: int = verb.run(parser.parse_args(rest))
                output.flush()
            return status
    except MControllerError as error:
        if isinstance(error.__cause__, BrokenPipeError) and isinstance(error, OutputError):
            return 0  # the reader has what it needs, such as head
        return _failed(name, error)
    except OSError as error:
        if error.filename is None:
            raise  # not of a file: an error of the program
        text = f"cannot read or write {error.filename}: {error.strerror}: check its path, permissions and disk"
        return _failed(name, DataError(text, path=str(error.filename)))
    except KeyboardInterrupt:
        Output(sys.stderr).write(f"{PROGRAM} {name}: interrupted\n")
        return INTERRUPTED


def _failed(verb: str, error: MControllerError) -> int:
    Output(sys.stderr).write(f"{PROGRAM} {verb}: {type(error).__name__}: {error}\n")
    return 1


def list_of(verbs: Mapping[str, EntryPoint]) -> str:
    """Return the list of verbs with one line each, without importing their modules."""
    width = max(map(len, verbs), default=0)
    lines = [f"  {name:<{width}}  {summary_of(entry.module)}" for name, entry in verbs.items()]
    head = f"usage: {PROGRAM} VERB ...\n\nverbs:"
    return "\n".join([head, *lines, "", f"{PROGRAM} VERB --help prints the arguments of a verb.", ""])


def summary_of(module: str) -> str:
    """Return the first line of a module's docstring, read from its source: only its packages are imported."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        return f"(not available: there is no module {module})"
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_bytes())) or ""
    return docstring.partition("\n")[0]


def entry_points(group: str, checkout: Path | None = None) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, sorted.

    In a checkout, the entry points of this project are read from its ``pyproject.toml``: it may be on PYTHONPATH
    without being installed, and the metadata of an editable install do not change when the file does.

    Args:
        group: the name of the group.
        checkout: the directory that contains the package ``mcontroller``; by default the directory of the imported one.
    """
    root = checkout or Path(mcontroller.__file__).resolve().parent.parent
    project = root / "pyproject.toml"
    installed = list(importlib.metadata.entry_points(group=group))
    if project.is_file() and (declared := _declared(project, group)) is not None:
        installed = [entry for entry in installed if entry.dist is None or entry.dist.name != DISTRIBUTION] + declared
    return {entry.name: entry for entry in sorted(installed, key=lambda entry: entry.name)}


def _declared(project: Path, group: str) -> list[EntryPoint] | None:
    """Return the entry points that ``pyproject.toml`` declares; None if it belongs to another project."""
    declared = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
    if declared.get("name") != DISTRIBUTION:
        return None
    entries = declared.get("entry-points", {}).get(group, {})
    return [EntryPoint(name, value, group) for name, value in entries.items()]
