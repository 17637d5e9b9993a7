"""The outcome of a program at a commit, and a small file of them to keep in git: another machine goes on from there."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from parallel_state.verify.program import VerifyError

_SHA = 10
_RECORDED = "fingerprint", "layouts", "bits", "failure"


@dataclass(frozen=True)
class Result:
    """The outcome of a program at a commit.

    Attributes:
        fingerprint: a sum over the bits of the training of one process; empty after a failure.
        layouts: the first difference in each layout, empty if it is equal.
        bits: a sum over the bits of the training in each layout.
        seconds: of a CPU.
        failure: the error of a program that cannot be verified at this commit.
        files: hashes of the files that the result depends on, by their paths in the checkout; those of the program by
            their absolute paths.
    """

    fingerprint: str = ""
    layouts: dict[str, str] = field(default_factory=dict)
    bits: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str = ""
    files: dict[str, str] = field(default_factory=dict)

    @property
    def differing(self) -> list[str]:
        """The layouts that do not train the model of one process."""
        return [layout for layout, first in self.layouts.items() if first]

    def changes(self, before: Result) -> list[str]:
        """Return what is not as in an earlier result, worst first."""
        if self.failure or before.failure:
            if bool(self.failure) == bool(before.failure):
                return []
            return [f"fails: {self.failure}" if self.failure else "can be verified again"]
        began = [layout for layout in self.differing if not before.layouts.get(layout)]
        ended = [layout for layout in before.differing if not self.layouts.get(layout)]
        changes = [f"layout {layout} began to differ: {self.layouts[layout]}" for layout in began]
        changes += [f"layout {layout} is equal again" for layout in ended]
        if self.fingerprint != before.fingerprint:
            return [*changes, "numbers of one process changed"]
        other = [layout for layout in self.bits if before.bits.get(layout) not in (None, self.bits[layout])]
        rounding = [layout for layout in other if layout not in (*began, *ended)]
        return [*changes, f"other rounding in {' '.join(rounding)}"] if rounding else changes

    def is_regression(self, before: Result) -> bool:
        """Whether a layout began to differ, or the program to fail."""
        return bool(self.failure and not before.failure) or any(
            before.layouts.get(layout) == "" for layout in self.differing
        )


class Record:
    """A JSON file of results by program; the commits with one result are one entry.

    Args:
        file: the file; it is made with the first result. None: nothing is read or written.
        keys: the version of a program and of what runs it, by its short name. Entries with another key stay in the
            file, and are not read; so do those of other contents of the modules beside the program.
        folders: the folder of each program.
    """

    def __init__(self, file: Path | None, keys: Mapping[str, str], folders: Mapping[str, Path]) -> None:
        self._file, self._keys, self._folders = file, keys, folders
        self._programs = _read(file) if file and file.exists() else {}

    def known(self, sha: str) -> dict[str, Result]:
        """Return the results at a commit, by program."""
        entries = {
            name: entry for name in self._keys for entry in self._entries(name) if sha[:_SHA] in entry["commits"]
        }
        return {name: Result(**entry["result"]) for name, entry in entries.items()}

    def add(self, sha: str, results: Mapping[str, Result]) -> None:
        """Write the results at a commit, without what the cache needs to know that another commit runs the same."""
        known = self.known(sha)
        new = {name: result for name, result in results.items() if name not in known}
        if self._file is None or not new:
            return
        for name, result in new.items():
            fields = {key: value for key, value in asdict(result).items() if key in _RECORDED}
            beside = {
                os.path.relpath(path, self._folders[name]): content
                for path, content in result.files.items()
                if os.path.isabs(path)
            }
            same = (entry for entry in self._entries(name) if (entry["result"], entry["beside"]) == (fields, beside))
            entry = next(same, None)
            if entry is None:
                entry = {"key": self._keys[name], "beside": beside, "result": fields, "commits": []}
                self._programs.setdefault(name, []).append(entry)
            entry["commits"].append(sha[:_SHA])
        self._file.write_text(json.dumps(self._programs, indent=0) + "\n")

    def _entries(self, name: str) -> list[dict[str, Any]]:
        return [
            entry
            for entry in self._programs.get(name, [])
            if entry["key"] == self._keys[name]
            and all(hash_of(self._folders[name] / path) == content for path, content in entry["beside"].items())
        ]


@functools.cache
def hash_of(path: str | Path) -> str:
    """Return a hash of a file of a program; empty if there is none."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if Path(path).is_file() else ""


def _read(file: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        programs: dict[str, list[dict[str, Any]]] = json.loads(file.read_text())
        entries = [entry for of_program in programs.values() for entry in of_program]
        wrong = next((entry for entry in entries if not entry.keys() >= {"key", "beside", "result", "commits"}), None)
    except (ValueError, AttributeError, TypeError) as error:
        raise VerifyError(f"{file} is no record of results by commit: {error}", file=str(file)) from error
    if wrong is not None:
        raise VerifyError(f"{file} is no record of results by commit: an entry is {wrong}", file=str(file))
    return programs
