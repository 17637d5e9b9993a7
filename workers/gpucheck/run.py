"""Run checks one after another; one that raises is a failed row, and the others still run."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from workers.gpucheck import equality, memory, several, speed  # noqa: F401  # they register their checks
from workers.gpucheck.colocated import check  # noqa: F401  # registers its check
from workers.gpucheck.rows import Table, raised
from workers.gpucheck.session import CHECKS, Session

__all__ = ["run_checks"]

_NEED_REFERENCE = {"scores", "tokens", "updates", "checkpoints", "layouts", "ray"}


def run_checks(session: Session, names: Sequence[str], table: Table) -> None:
    """Run the checks of these names, and add their rows to the table.

    Args:
        session: the device and the reference.
        names: keys of ``CHECKS``.
        table: receives the rows as they are made.
    """
    if _NEED_REFERENCE & set(names):
        _ = session.reference_process  # computes while the device is busy
    for name in names:
        try:
            for row in CHECKS[name](session):
                table.add(row)
        except Exception as error:  # reported as a row: what else is broken matters as much
            table.add(raised(name, error))
        gc.collect()  # modules refer to each other in circles
        torch.cuda.empty_cache()
