"""Programs verified at every commit of a checkout of Megatron-LM, to find the one that changed their numbers.

A result is stored with the contents of the files of Megatron that were imported for it. A commit that changes none of
them has the same result, and starts no process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import parallel_state
from parallel_state.simulated.shared_writes import is_users
from parallel_state.verify.program import VerifyError, load_program
from parallel_state.verify.results import Record, Result, hash_of
from parallel_state.verify.verifier import Verifier

_TOOLKIT = Path(parallel_state.__file__).parents[1]
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    # kernels with the same bits on every machine of an architecture, and not those for its processor
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "TORCHDYNAMO_DISABLE": "1",  # Megatron imports optimizers that are compiled, for which torch imports its compiler
}
_CHILD = "import sys; from parallel_state.verify.commits import write_results; write_results(*sys.argv[1:])"


@dataclass(frozen=True)
class Commit:
    """A commit: its hash, its date, such as ``2026-08-22``, and the first line of its message."""

    sha: str
    date: str
    subject: str


class History:
    """The commits of a range that touch ``megatron/``, after the first of the range, and the results of programs there.

    Use it as a context manager: it has a temporary folder. The checkout stays as it is.

    Args:
        checkout: a git repository of Megatron-LM or of a fork.
        revisions: the range, ``A..B``.
        programs: ``FILE.py:NAME`` or ``MODULE:NAME``.
        cache: the folder in which results are stored.
        record: a small file of results by commit, to keep in git: what it has is not verified again.
        layouts: the layouts; empty for the smallest ones that have every axis of a model.
        steps: training steps in each layout.

    Attributes:
        commits: A, and the commits in their order.
        programs: the programs by a short name.
        runs: the number of processes that were started.

    Raises:
        VerifyError: there is no such checkout or program, git rejects the range, or the record is another file.
    """

    def __init__(
        self,
        checkout: Path,
        revisions: str,
        programs: Sequence[str],
        *,
        cache: Path,
        record: Path | None = None,
        layouts: Sequence[str] = (),
        steps: int = 2,
    ) -> None:
        first, separator, last = revisions.partition("..")
        if not separator or last.startswith("."):
            raise VerifyError(f"expected a range of commits such as v1..main, got {revisions!r}", revisions=revisions)
        if not checkout.is_dir():
            raise VerifyError(f"there is no folder {checkout}", repository=str(checkout))
        self._git_folder = Path(_git(checkout, "rev-parse", "--absolute-git-dir").strip())
        log = _git(checkout, "log", "--first-parent", "--reverse", "--format=%H %cs %s", revisions, "--", "megatron")
        base = _git(checkout, "log", "-1", "--format=%H %cs %s", first)
        self.commits = [Commit(*line.split(" ", 2)) for line in (base + log).splitlines()]
        self.programs = {_short_name(program): _absolute(program) for program in programs}
        if len(self.programs) < len(programs):
            raise VerifyError(f"programs have the same name: {' '.join(map(_short_name, programs))}; rename one")
        self.runs = 0
        self._arguments = [str(steps), " ".join(layouts)]
        versions = [platform.machine(), platform.python_version(), torch.__version__, *self._arguments]
        self._keys = {name: " ".join([program, *versions]) for name, program in self.programs.items()}
        self._store = cache / "results.jsonl"
        self._stored: dict[str, list[Result]] = {key: [] for key in self._keys.values()}
        for line in self._store.read_text().splitlines() if self._store.exists() else ():
            stored = json.loads(line)
            self._stored.get(stored.pop("key"), []).append(Result(**stored))
        contents = {
            name: f"{hash_of(program.rpartition(':')[0])} {' '.join(versions)}"
            for name, program in self.programs.items()
        }
        self._folders = {name: Path(program.rpartition("/")[0] or ".") for name, program in self.programs.items()}
        self._record = Record(record, contents, self._folders)

    def __enter__(self) -> History:
        self._temporary = tempfile.TemporaryDirectory(prefix="verify-")
        self._folder = Path(self._temporary.name).resolve()
        (self._folder / "tree" / "megatron").mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._temporary.cleanup()

    def verified(self, every: int = 1) -> Iterator[tuple[int, dict[str, Result]]]:
        """Yield the indices of verified commits, in their order, with the results by program.

        Args:
            every: verify every so-manieth commit and the last; between two with other results, those that are needed
                to find the commits that changed them. Others are yielded if they need no run.
        """
        yield 0, self.results(0)
        last = len(self.commits) - 1
        for low in range(0, last, every):
            yield from self._verified_between(low, min(low + every, last))

    def _verified_between(self, low: int, high: int) -> Iterator[tuple[int, dict[str, Result]]]:
        """Yield the commits after ``low`` up to ``high``."""
        first, last = self.results(low), self.results(high)
        if high - low > 1 and any(last[name].changes(first[name]) for name in self.programs):
            middle = (low + high) // 2
            yield from self._verified_between(low, middle)
            yield from self._verified_between(middle, high)
            return
        for index in range(low + 1, high):
            if len(self._known(index)) == len(self.programs):
                yield index, self.results(index)
        yield high, last

    def results(self, index: int) -> dict[str, Result]:
        """Return the results at a commit; programs without a stored one are verified in a new process."""
        known = self._known(index)
        if missing := [name for name in self.programs if name not in known]:
            known |= self._run(index, missing)
        self._record.add(self.commits[index].sha, known)
        return {name: known[name] for name in self.programs}

    @functools.cache  # noqa: B019 - a history lives as long as the process
    def _tree(self, index: int) -> dict[str, str]:
        """Return the hashes of Megatron's files at a commit."""
        listed = _git(self._git_folder, "ls-tree", "-r", self.commits[index].sha, "--", "megatron")
        rows = (line.partition("\t") for line in listed.splitlines())
        return {path: about.split()[2] for about, _, path in rows}

    def _known(self, index: int) -> dict[str, Result]:
        tree, known = self._tree(index), self._record.known(self.commits[index].sha)
        for name, key in self._keys.items():
            # the last one is that of a commit nearby
            for result in () if name in known else reversed(self._stored[key]):
                if all(content == (tree.get(path) or hash_of(path)) for path, content in result.files.items()):
                    known[name] = result
                    break
        return known

    def _run(self, index: int, names: Sequence[str]) -> dict[str, Result]:
        """Verify programs in a process that imports the Megatron of a commit, and store the results."""
        tree = self._folder / "tree"
        index_file = {"GIT_INDEX_FILE": str(self._folder / "index"), "GIT_WORK_TREE": str(tree / "megatron")}
        # unchanged files stay as they are, with their bytecode
        _git(self._git_folder, "read-tree", "--reset", "-u", f"{self.commits[index].sha}:megatron", **index_file)
        programs = [self.programs[name] for name in names]
        output = self._folder / "results.json"
        output.unlink(missing_ok=True)
        in_path = [str(tree), str(Path.cwd()), str(_TOOLKIT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {**_VARIABLES, **os.environ, "PYTHONPATH": os.pathsep.join(in_path)}
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, str(output), *self._arguments, *programs],
            cwd=tree,
            env=variables,
            capture_output=True,
            text=True,
        )
        self.runs += 1
        if output.exists():
            written = json.loads(output.read_text())
        else:
            *_, last = done.stderr.splitlines() or [""]
            written = {program: {"failure": f"exit status {done.returncode}: {last}"} for program in programs}
        results = {name: self._result(index, tree, name, written[self.programs[name]]) for name in names}
        self._store.parent.mkdir(parents=True, exist_ok=True)
        with self._store.open("a") as file:
            for name, result in results.items():
                self._stored[self._keys[name]].append(result)
                file.write(json.dumps({"key": self._keys[name], **asdict(result)}) + "\n")
        return results

    def _result(self, index: int, tree: Path, name: str, written: dict[str, Any]) -> Result:
        """Return a result with the hashes of the files that it depends on.

        After a failure, these are all of Megatron, and those beside the program: one may be what cannot be imported.
        """
        listed, imported = self._tree(index), written.pop("imported", [])
        in_tree = [os.path.relpath(path, tree) for path in imported if Path(path).is_relative_to(tree)]
        if not written.get("failure") and not in_tree:
            raise VerifyError(f"a program imports Megatron from elsewhere than {tree}: look for it beside the program")
        beside = {path for path in imported if not Path(path).is_relative_to(tree)}
        files = {path: listed[path] for path in in_tree if path in listed}
        if written.get("failure"):
            files = listed
            beside |= {str(path.absolute()) for path in self._folders[name].glob("*.py")}
        return Result(**written, files={**files, **{path: hash_of(path) for path in beside}})


def write_results(output: str, steps: str, layouts: str, *programs: str) -> None:
    """Verify programs with the Megatron that this process imports, and write the results as JSON, by program.

    Each program runs in a process forked from this one: what another program imports does not count, and what the first
    imports is imported once.
    """
    results: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(Exception):  # whatever Megatron raises at this commit: the forked process reports it
        load_program(programs[0])
    for program in programs:
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as forked:
            try:
                results[program] = forked.submit(_verified, program, int(steps), layouts.split()).result()
            except (BrokenProcessPool, SystemExit) as error:
                results[program] = {"failure": f"{type(error).__name__}: {error}", "seconds": 0.0}
    results[programs[0]]["seconds"] += time.process_time()
    Path(output).write_text(json.dumps(results))


def _verified(program: str, steps: int, layouts: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a Result, with the files that were imported."""
    began = time.process_time()
    result: dict[str, Any] = {"layouts": {}, "bits": {}}
    try:
        verifier = Verifier(load_program(program), steps=steps)
        result["fingerprint"] = verifier.fingerprint
        for layout in layouts or verifier.default_layouts():
            outcome = verifier.verify(layout)
            result["layouts"][layout] = "" if outcome.equal else outcome.first() or "replicas differ"
            result["bits"][layout] = outcome.bits
    except Exception as error:  # whatever Megatron raises at this commit: it is the result
        result["failure"] = f"{type(error).__name__}: {error}".partition("\n")[0]
    result["seconds"] = time.process_time() - began
    source = program.rpartition(":")[0]
    module = sys.modules.get(Path(source).stem if source.endswith(".py") else source)
    folder = Path(getattr(module, "__file__", None) or source).parent
    result["imported"] = [
        str(module.__file__)
        for module in list(sys.modules.values())
        if is_users(module) or Path(getattr(module, "__file__", None) or os.sep).is_relative_to(folder)
    ]
    return result


def _short_name(program: str) -> str:
    source, _, name = program.rpartition(":")
    return Path(source).name.removesuffix(".py").rpartition(".")[2] if name == "program" else name


def _absolute(program: str) -> str:
    source, _, name = program.rpartition(":")
    if source.endswith(".py") and not Path(source).is_file():
        raise VerifyError(f"there is no file {source}", program=program)
    return f"{Path(source).resolve()}:{name}" if source.endswith(".py") else program


def _git(repository: Path, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=repository, env={**os.environ, **variables}, capture_output=True, text=True
    )
    if done.returncode:
        raise VerifyError(
            f"git {arguments[0]} in {repository} fails: {done.stderr.strip()}", repository=str(repository)
        )
    return done.stdout
