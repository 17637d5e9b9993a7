"""Draw the grid of ranks of a layout, and what a dispatch mode does on it.

example: mcontroller topology --world-size 16 --tp 2 --pp 2 --gpus-per-node 8 --mode MEGATRON_COMPUTE_PROTO
"""

from __future__ import annotations

import argparse
import sys

from mcontroller.dispatch.modes import Dispatch, plan
from mcontroller.locality import locality_lines, nodes_of
from parallel_state.layout import ParallelLayout
from parallel_state.topology import Topology

AXES = {
    "tp": "tensor parallelism",
    "pp": "pipeline parallelism",
    "cp": "context parallelism",
    "ep": "expert parallelism",
    "etp": "tensor parallelism inside experts; default: the same as tp",
    "vpp": "model chunks of each pipeline stage; default: no interleaving",
}


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of at least 1")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("--world-size", type=int, required=True, help="number of ranks")
    for axis, meaning in AXES.items():
        parser.add_argument(f"--{axis}", type=int, default=None if axis in ("etp", "vpp") else 1, help=meaning)
    parser.add_argument("--order", default="tp-cp-ep-dp-pp", help="order of the axes, fastest first")
    parser.add_argument("--gpus-per-node", type=_count, help="show the nodes, and report axes that cross them")
    parser.add_argument("--mode", help="name of a dispatch mode: show which ranks get which shard, and which return")
    parser.add_argument("--max-rows", type=_count, default=32, help="longest table; default: 32 rows")


def run(arguments: argparse.Namespace) -> int:
    """Print the grid, the axes that cross nodes, and the plan of the mode."""
    sizes = {axis: getattr(arguments, axis) for axis in AXES}
    layout = ParallelLayout(arguments.world_size, order=arguments.order, **sizes)
    per_node = arguments.gpus_per_node
    nodes = None if per_node is None else nodes_of(arguments.world_size, per_node)
    topology = Topology.from_layout(layout, nodes=nodes)
    blocks = [topology.describe(arguments.max_rows)]
    if lines := locality_lines(topology):
        blocks.append("\n".join(lines))
    if arguments.mode is not None:
        blocks.append(plan(Dispatch[arguments.mode], topology).describe(arguments.max_rows))
    sys.stdout.write("\n\n".join(blocks) + "\n")
    return 0
