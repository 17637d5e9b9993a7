"""The checks of each part, in the order in which they run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

import torch

from workers.gpucheck import equality, machine, speed, state
from workers.gpucheck.rows import Report, Row, skipped
from workers.gpucheck.session import Session

__all__ = ["run_parts"]

_CHECKS: dict[str, tuple[Callable[[Session], Iterator[Row]], ...]] = {
    "a": (machine.versions, equality.attention, equality.equality),
    "b": (speed.memory, speed.widths, speed.decoding),
    "c": (state.offload, state.saves),
}


def run_parts(session: Session, parts: Sequence[str], report: Report) -> None:
    """Run the checks of these parts one after another, and add their rows to the report."""
    for part in parts:
        if part == "d":
            _run_on_ray(session, report)
        else:
            _run(session, part, _CHECKS[part], report)


def _run(session: Session, part: str, checks: Sequence[Callable[[Session], Iterator[Row]]], report: Report) -> None:
    for check in checks:
        report.add_all(part, check.__name__, check(session))
        gc.collect()  # modules refer to each other in circles
        torch.cuda.empty_cache()


def _run_on_ray(session: Session, report: Report) -> None:
    """Start Ray on this machine and run part d, unless a package is missing."""
    missing = [name for name in ("ray", "tensordict", "zmq") if find_spec(name) is None]
    if missing:
        report.add_all("d", "Ray", [skipped("Ray", f"{' and '.join(missing)} cannot be imported")])
        return
    import ray

    from workers.gpucheck import groups

    try:
        report.add_all("d", "Ray", groups.local_ray())
        if ray.is_initialized():
            _run(session, "d", (groups.group, groups.colocated, groups.engines, groups.nccl), report)
    finally:
        ray.shutdown()
