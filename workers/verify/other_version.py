"""The training of one process at another commit, or in another environment, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from parallel_state.verify.program import VerifyError


@contextmanager
def saved_by(other: str, command: Sequence[str]) -> Iterator[Path]:
    """Yield the file with the training of another version.

    Args:
        other: a file that ``--save`` wrote, the Python interpreter of an environment, or a commit of the git repository
            of the working directory, which is checked out in a temporary folder.
        command: the arguments of the verb that say what is trained.

    Raises:
        VerifyError: it is none of these, or the training fails there.
    """
    path = Path(other)
    if path.is_file() and not os.access(path, os.X_OK):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        result = Path(folder) / "reference.pt"
        if path.is_file():
            _train(other, str(path.absolute()), command, result, Path.cwd(), [])
        else:
            tree = Path(folder) / "tree"
            root = Path(_git(other, "rev-parse", "--show-toplevel"))
            _git(other, "worktree", "add", "--detach", str(tree), f"{other}^{{commit}}")
            try:
                here = tree / Path.cwd().resolve().relative_to(root.resolve())
                _train(other, sys.executable, command, result, here, [str(tree)])
            finally:
                _git(other, "worktree", "remove", "--force", str(tree))
        yield result


def _train(
    other: str, interpreter: str, command: Sequence[str], result: Path, folder: Path, first_in_path: list[str]
) -> None:
    in_path = [*first_in_path, *filter(None, [os.environ.get("PYTHONPATH")])]
    # dp=1 is one process
    line = [interpreter, "-m", "mcontroller", "verify", "--save", str(result), "--layouts", "dp=1", *command]
    done = subprocess.run(
        line, cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(in_path)}, capture_output=True, text=True
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        raise VerifyError(f"--against {other}: training there failed: {said}; try: {' '.join(line)}")


def _git(other: str, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise VerifyError(
            f"--against {other}: expected a file that --save wrote, a Python interpreter, or a commit; git says "
            f"{done.stderr.strip()!r}"
        )
    return done.stdout.strip()
