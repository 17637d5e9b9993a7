"""A topology as text for people: replicas by pipeline stage, nodes, or single ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from parallel_state.axes import DENSE_AXES, EXPERT_AXES, RANK_AXIS, product_text
from parallel_state.errors import TopologyError

WIDTH = 100
GAP = "   "


class Described(Protocol):
    """What of a topology is described."""

    @property
    def world_size(self) -> int: ...
    @property
    def sizes(self) -> Mapping[str, int]: ...
    @property
    def columns(self) -> Mapping[str, Sequence[int]]: ...
    @property
    def dense_axes(self) -> tuple[str, ...]: ...
    @property
    def expert_axes(self) -> tuple[str, ...]: ...
    @property
    def vpp(self) -> int | None: ...
    @property
    def nodes(self) -> Sequence[str] | None: ...
    @property
    def names(self) -> Sequence[str] | None: ...


def describe(topology: Described, by: str | None, max_rows: int) -> str:
    """The text of `Topology.describe`."""
    if by not in (None, "stage", "node", "rank"):
        raise TopologyError(f"describe(by={by!r}): expected 'stage', 'node' or 'rank'")
    if by == "node" and topology.nodes is None:
        raise TopologyError("describe(by='node'): the nodes of these ranks are not known; take 'stage' or 'rank'")
    blocks = [_headline(topology)]
    if by in (None, "stage") and "pp" in topology.sizes:
        blocks += _stage_blocks(topology, max_rows)
    if by == "node" or (by is None and topology.nodes is not None):
        blocks.append(_node_block(topology, max_rows))
    if by == "rank":
        blocks.append(_rank_block(topology, max_rows))
    return "\n\n".join(blocks)


def runs_text(values: Sequence[int], limit: int = 3) -> str:
    """Numbers in their order, as few signs as will do: ``0-7``, ``0-1, 8-9``, ``0, 4 .. 28``."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    texts = [f"{first}-{last}" if last > first else f"{first}" for first, last in runs]
    return ", ".join(texts) if len(texts) <= limit else f"{', '.join(texts[: limit - 1])} .. {texts[-1]}"


def _uses_experts(topology: Described) -> bool:
    sizes = topology.sizes
    return bool(topology.expert_axes) and (sizes["ep"] > 1 or sizes["etp"] != sizes["tp"])


def _headline(topology: Described) -> str:
    ranks = f"{topology.world_size:,} rank{'s' if topology.world_size > 1 else ''}"
    if RANK_AXIS in topology.sizes:
        return f"{ranks}, no axes"
    lines = [f"{ranks} = {product_text(topology.dense_axes, topology.sizes)}"]
    if _uses_experts(topology):
        lines.append(f"{'experts'.rjust(len(ranks))} = {product_text(topology.expert_axes, topology.sizes)}")
    if topology.vpp is not None:
        stages = topology.vpp * topology.sizes["pp"]
        lines.append(f"vpp {topology.vpp}: {stages} virtual stages, {topology.vpp} on each pipeline stage")
    return "\n".join(lines)


def _stage_blocks(topology: Described, max_rows: int) -> list[str]:
    own = [axis for axis in topology.dense_axes if axis not in DENSE_AXES and topology.sizes[axis] > 1]
    blocks = [_stage_block(topology, rows=(*own, "dp"), cell=("cp", "tp"), max_rows=max_rows)]
    if _uses_experts(topology):
        experts = _stage_block(topology, rows=(*own, "edp"), cell=("ep", "etp"), max_rows=max_rows)
        blocks.append(f"experts\n{experts}")
    return blocks


def _stage_block(topology: Described, rows: Sequence[str], cell: Sequence[str], max_rows: int) -> str:
    """Replicas down, pipeline stages across; in each cell the ranks in the order of the `cell` axes, last fastest."""
    columns, sizes = topology.columns, topology.sizes
    keys = zip(*(columns[axis] for axis in (*rows, "pp", *cell)), strict=True)
    ranks_at: dict[tuple[int, ...], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for key, rank in sorted((key, rank) for rank, key in enumerate(keys)):
        ranks_at[key[: len(rows)]][key[len(rows)]].append(rank)
    head = ["", *(f"stage {stage}" for stage in range(sizes["pp"]))]
    body = []
    for replica, stages in ranks_at.items():
        label = ", ".join(f"{axis} {index}" for axis, index in zip(rows, replica, strict=True))
        body.append([label, *(runs_text(ranks) for ranks in stages.values())])
    inside = [f"{axis} {runs_text(range(sizes[axis]))}" for axis in reversed(cell) if sizes[axis] > 1]
    legend = f"\n(ranks in a cell: {', then '.join(inside)})" if inside else ""
    return _table(head, body, max_rows) + legend


def _node_block(topology: Described, max_rows: int) -> str:
    """One row per node, in the order of their first ranks: its ranks, and its indices on each axis in use."""
    nodes = topology.nodes or ()
    ranks_on: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        ranks_on[node].append(rank)
    axes = _axes_in_use(topology)
    body = []
    for node, ranks in ranks_on.items():
        indices = (sorted({topology.columns[axis][rank] for rank in ranks}) for axis in axes)
        body.append([node, runs_text(ranks), *map(runs_text, indices)])
    text = _table(["node", "ranks", *axes], body, max_rows)
    return f"{text}\n({_node_crossings(topology, nodes, axes)})" if axes and len(ranks_on) > 1 else text


def _node_crossings(topology: Described, nodes: Sequence[str], axes: Sequence[str]) -> str:
    """Which axes have their groups inside one node each, and which reach from node to node."""
    crossing = {axis for axis in axes if _crosses_nodes(topology, nodes, axis)}
    inside = [axis for axis in axes if axis not in crossing]
    across = [axis for axis in axes if axis in crossing]
    parts = [f"inside a node: {', '.join(inside)}"] if inside else []
    return "; ".join([*parts, *([f"from node to node: {', '.join(across)}"] if across else [])])


def _crosses_nodes(topology: Described, nodes: Sequence[str], axis: str) -> bool:
    grid = topology.dense_axes if axis in topology.dense_axes else topology.expert_axes
    others = [topology.columns[other] for other in grid if other != axis]
    groups = zip(*others, strict=True) if others else [()] * topology.world_size
    node_of: dict[tuple[int, ...], str] = {}
    return any(node_of.setdefault(group, node) != node for group, node in zip(groups, nodes, strict=True))


def _rank_block(topology: Described, max_rows: int) -> str:
    axes = _axes_in_use(topology)
    known = {"node": topology.nodes, "name": topology.names}
    texts = {title: values for title, values in known.items() if values is not None}
    body = []
    for rank in range(topology.world_size):
        indices = (str(topology.columns[axis][rank]) for axis in axes)
        body.append([str(rank), *(values[rank] for values in texts.values()), *indices])
    return _table(["rank", *texts, *axes], body, max_rows)


def _axes_in_use(topology: Described) -> list[str]:
    """The axes of more than one index, dense and, where they differ from them, expert."""
    experts = EXPERT_AXES if _uses_experts(topology) else ()
    axes = (*(axis for axis in topology.dense_axes if axis != RANK_AXIS), *experts)
    return [axis for axis in axes if topology.sizes[axis] > 1]


def _table(head: Sequence[str], body: Sequence[Sequence[str]], max_rows: int) -> str:
    """Left-aligned columns; rows past `max_rows` and columns past the width are left out before the last ones."""
    rows = [list(head), *map(list, body)]
    if len(body) > max_rows:
        tail = max(1, max_rows // 4)
        hidden = [f".. {len(body) - max_rows:,} more", *[".."] * (len(head) - 1)]
        rows = [*rows[: 1 + max_rows - tail], hidden, *rows[-tail:]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shown = list(range(len(widths)))
    while sum(widths[i] + len(GAP) for i in shown) > WIDTH - len("..") and len(shown) > 3:
        del shown[-2]
    gap_at = None if len(shown) == len(widths) else shown[-1]
    lines = []
    for row in rows:
        cells = [part for i in shown for part in ([".."] if i == gap_at else []) + [row[i].ljust(widths[i])]]
        lines.append(GAP.join(cells).rstrip())
    return "\n".join(lines)
