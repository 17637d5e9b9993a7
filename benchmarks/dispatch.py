"""Measure planning and dispatching by number of ranks, without worker processes, and the time of imports.

python benchmarks/dispatch.py
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

LIMITS_MS = {"plan": 50.0, "cached": 5.0, "round trip": 1000.0, "import": 1500.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--repeat", type=int, default=5, help="runs of each measurement (the median is shown; of imports the least)"
    )
    repeat = parser.parse_args().repeat
    print(f"{'what':58s} {'time':>10s} {'limit':>10s}")
    for name, milliseconds, limit in (*planning(repeat), *round_trips(repeat), *imports(repeat)):
        print(f"{name:58s} {milliseconds:7.2f} ms" + (f" {limit:7.0f} ms" if limit else ""))


def planning(repeat: int) -> list[tuple[str, float, float | None]]:
    from mcontroller.dispatch.modes import Dispatch, DispatchSpec, plan
    from parallel_state.layout import ParallelLayout
    from parallel_state.topology import Topology

    topology = Topology.from_layout(ParallelLayout(world_size=16_384, tp=8, pp=16, cp=2, ep=4))
    rows: list[tuple[str, float, float | None]] = []
    number = itertools.count()
    for mode in (Dispatch.MEGATRON_COMPUTE_PROTO, Dispatch.MEGATRON_PP_AS_DP_PROTO, Dispatch.over("edp", "ep")):

        def first(mode: DispatchSpec = mode) -> None:
            plan(replace(mode, name=f"new {next(number)}"), topology)

        rows.append((f"plan {mode}, 16,384 ranks, first time", median_ms(first, repeat), LIMITS_MS["plan"]))
        cached = median_ms(lambda mode=mode: plan(mode, topology), repeat)
        rows.append((f"plan {mode}, 16,384 ranks, cached", cached, LIMITS_MS["cached"]))
    return rows


def round_trips(repeat: int) -> list[tuple[str, float, float | None]]:
    import torch

    from mcontroller import DataProto, Dispatch, Worker, register
    from mcontroller.testing import mock_worker_group
    from parallel_state.layout import ParallelLayout

    class Echo(Worker):
        @register(Dispatch.MEGATRON_COMPUTE_PROTO)
        def echo(self, batch: DataProto) -> DataProto:
            return batch

    rows: list[tuple[str, float, float | None]] = []
    for world_size in (8, 64, 512, 4_096):
        tp, pp = (2, 2) if world_size == 8 else (8, 8)
        group = mock_worker_group(Echo, ParallelLayout(world_size=world_size, tp=tp, pp=pp))
        batch = DataProto.from_dict({"input_ids": torch.arange(1024 * 16).view(1024, 16)}, {"uid": list(range(1024))})
        milliseconds = median_ms(lambda group=group, batch=batch: group.echo(batch), repeat)
        limit = LIMITS_MS["round trip"] if world_size == 4_096 else None
        each = milliseconds * 1000 / world_size
        rows.append((f"mocked round trip, {world_size:5,} ranks ({each:.0f} us per rank)", milliseconds, limit))
    return rows


def imports(repeat: int) -> list[tuple[str, float, float | None]]:
    statements = {
        "nothing": "pass",
        "torch": "import torch",
        "tensordict": "import torch, tensordict",
        "mcontroller": "import torch, mcontroller",
        "batches": "import torch, mcontroller; mcontroller.DataProto; mcontroller.WorkerGroup",
        "planning": "import mcontroller.dispatch.modes",
    }
    best = import_ms(statements, repeat)
    return [
        ("import torch", best["torch"] - best["nothing"], None),
        ("import mcontroller, beyond torch", best["mcontroller"] - best["torch"], LIMITS_MS["import"]),
        ("with DataProto and WorkerGroup, beyond torch", best["batches"] - best["torch"], LIMITS_MS["import"]),
        ("of which tensordict", best["tensordict"] - best["torch"], None),
        ("import mcontroller.dispatch.modes, in all", best["planning"] - best["nothing"], None),
    ]


def import_ms(statements: Mapping[str, str], repeat: int) -> dict[str, float]:
    """Return the least milliseconds of each statement in a fresh interpreter, measured alternately."""
    times: dict[str, list[float]] = {name: [] for name in statements}
    for _ in range(repeat):
        for name, statement in statements.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True)
            times[name].append((time.perf_counter() - start) * 1000)
    return {name: min(taken) for name, taken in times.items()}


def median_ms(function: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


if __name__ == "__main__":
    main()
