"""Files that are replaced as a whole: a reader finds the old content or the new one, after a crash too."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["delete_with_links", "replace_text", "sync_directory"]


def replace_text(path: Path, text: str) -> None:
    """Write a file next to ``path``, flush it to the disk, and rename it to ``path``.

    Raises:
        OSError: it cannot be written; ``path`` has its old content.
    """
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_with_links(directory: Path) -> None:
    """Delete a directory, and first the links next to it that name it; nothing if it does not exist.

    Raises:
        OSError: it cannot be deleted.
    """
    if directory.parent.is_dir():
        for link in directory.parent.iterdir():
            if link.is_symlink() and os.readlink(link) == directory.name:
                link.unlink()
    if directory.exists():
        shutil.rmtree(directory)
