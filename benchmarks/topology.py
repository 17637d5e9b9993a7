"""Measure the topology: its import, the validation of collected ranks, and queries.

    python benchmarks/topology.py [--ranks 16384] [--rounds 7]

Each time is compared with a baseline time of the same run: an interpreter that imports nothing, reading every field
once in plain Python without checks, one loop over the ranks, or Megatron's rank generator if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from parallel_state.infos import DistGlobalInfo, DistRankInfo
from parallel_state.layout import ParallelLayout
from parallel_state.topology import Topology

# name, milliseconds, (baseline, its milliseconds), limit in milliseconds
Row = tuple[str, float, tuple[str, float] | None, float | None]


def fastest(work: Callable[[], Any], rounds: int) -> float:
    """Return the milliseconds of the fastest of ``rounds`` runs."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def layout_of(ranks: int) -> ParallelLayout:
    """Return a mixture-of-experts layout on ``ranks`` ranks, a multiple of 256."""
    return ParallelLayout(ranks, tp=8, pp=16, cp=2, ep=8, etp=2, vpp=2)


def reports(layout: ParallelLayout) -> tuple[list[DistRankInfo], list[DistGlobalInfo]]:
    """Return what the ranks send: separate objects, as unpickling returns them."""
    infos = []
    for rank in range(layout.world_size):
        indices: dict[str, Any] = {f"{axis}_rank": index for axis, index in layout.coordinates(rank).items()}
        infos.append(DistRankInfo(**indices))
    sizes: dict[str, Any] = {f"{axis}_size": size for axis, size in layout.sizes.items()}
    info = DistGlobalInfo(**sizes, vpp_size=layout.vpp)
    return infos, [pickle.loads(pickle.dumps(info)) for _ in infos]


def collection_rows(layout: ParallelLayout, rounds: int) -> list[Row]:
    rank_infos, global_infos = reports(layout)
    nodes = [f"node{rank // 8}" for rank in range(layout.world_size)]
    read_rank = attrgetter(*(f"{axis}_rank" for axis in layout.sizes))
    read_global = attrgetter(*(f"{axis}_size" for axis in layout.sizes))

    def read_all() -> tuple[list[Any], list[Any]]:
        return [read_rank(info) for info in rank_infos], [read_global(info) for info in global_infos]

    collected = fastest(lambda: Topology.from_infos(rank_infos, global_infos, nodes=nodes, declared=layout), rounds)
    declared = fastest(lambda: Topology.from_layout(layout), rounds)
    return [
        ("validate the collected ranks", collected, ("reading every field", fastest(read_all, rounds)), 200),
        ("topology of the declared layout", declared, None, None),
    ]


def query_rows(layout: ParallelLayout, rounds: int) -> list[Row]:
    topology = Topology.from_layout(layout)
    loop = ("one loop over the ranks", fastest(lambda: [rank + 1 for rank in range(layout.world_size)], rounds))
    queries: list[tuple[str, Callable[[], Any]]] = [
        ('shard_indices(("dp",))', lambda: topology.shard_indices(("dp",))),
        ('shard_indices(("cp", "dp", "pp"))', lambda: topology.shard_indices(("cp", "dp", "pp"))),
        ('shard_indices(("edp", "ep"))', lambda: topology.shard_indices(("edp", "ep"))),
        ("select(tp=0, cp=0, pp=-1)", lambda: topology.select(tp=0, cp=0, pp=-1)),
        ("hash", lambda: hash(topology)),
        ("describe()", topology.describe),
    ]
    return [(name, fastest(work, rounds), loop, None) for name, work in queries]


def group_rows(layout: ParallelLayout, rounds: int) -> list[Row]:
    baseline = None
    if importlib.util.find_spec("megatron.core") is not None:
        from megatron.core.parallel_state import RankGenerator

        sizes = {"tp": layout.tp, "ep": 1, "dp": layout.dp, "pp": layout.pp, "cp": layout.cp}
        generator = RankGenerator(**sizes, order=layout.order)
        baseline = ("Megatron's RankGenerator", fastest(lambda: generator.get_ranks("dp-cp"), rounds))
    return [('groups("dp", "cp")', fastest(lambda: layout.groups("dp", "cp"), rounds), baseline, None)]


def import_rows(rounds: int) -> list[Row]:
    def run(code: str) -> float:
        return fastest(lambda: subprocess.run([sys.executable, "-c", code], check=True), rounds)

    imported = "import sys, parallel_state.topology; sys.exit('torch' in sys.modules)"
    return [("import parallel_state.topology", run(imported), ("an interpreter alone", run("pass")), 100)]


def table(title: str, rows: Sequence[Row]) -> str:
    lines = [title, f"{'':36}{'ms':>9}{'limit ms':>10}{'baseline ms':>14}   baseline"]
    for name, taken, baseline, limit in rows:
        verdict = "" if limit is None else f"{limit:.0f} {'ok' if taken <= limit else 'NO'}"
        baseline_name, baseline_ms = baseline or ("", None)
        lines.append(
            f"{name:36}{taken:9.3f}{verdict:>10}{'' if baseline_ms is None else f'{baseline_ms:.3f}':>14}"
            f"   {baseline_name}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16_384, help="number of ranks (a multiple of 256)")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each measurement; the fastest counts")
    arguments = parser.parse_args()
    layout = layout_of(arguments.ranks)
    rows = [
        *import_rows(arguments.rounds),
        *collection_rows(layout, arguments.rounds),
        *query_rows(layout, arguments.rounds),
        *group_rows(layout, arguments.rounds),
    ]
    print(table(f"{layout.world_size:,} ranks, fastest of {arguments.rounds} runs", rows))
    return any(limit is not None and taken > limit for _, taken, _, limit in rows)


if __name__ == "__main__":
    sys.exit(main())
