"""The program of the process that writes the files of a checkpoint while the training goes on.

It runs as a script without any package, so that it starts in milliseconds, shares no memory with the worker that it
would have to copy, and holds none of its locks. The files are complete in the memory that it gets; it writes them at
the lowest priority, computes their checksums and flushes them to the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys

_CHUNK = 1 << 20


def write_files_of_stdin() -> None:
    """Read ``[[descriptor, path], ...]`` as JSON, write the files, and print an error or ``[[size, sha256], ...]``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the keyboard; the worker decides when it ends
    os.nice(19)
    parent = os.getppid()
    try:
        written = [_write(descriptor, path, parent) for descriptor, path in json.load(sys.stdin)]
    except OSError as error:
        json.dump(str(error), sys.stdout)
    else:
        json.dump(written, sys.stdout)


def _write(descriptor: int, path: str, parent: int) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        while chunk := os.pread(descriptor, _CHUNK, size):
            if os.getppid() != parent:
                sys.exit("the worker has ended")
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


if __name__ == "__main__":
    write_files_of_stdin()
