"""A topology as text for people: replicas by pipeline stage, and nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from parallel_state.axes import DENSE_AXES, EXPERT_AXES, RANK_AXIS, dense_grid, expert_grid, product_text

Sizes = Mapping[str, int]
Indices = Mapping[str, Sequence[int]]

WIDTH = 100
GAP = "   "


def topology_text(
    sizes: Sizes,
    columns: Indices,
    *,
    vpp: int | None = None,
    nodes: Sequence[str] | None = None,
    max_rows: int = 16,
) -> str:
    """Return the coordinates of all ranks as text: the stages, and the nodes if they are known.

    Args:
        sizes: axis -> size.
        columns: axis -> the index of every rank, by rank.
        vpp: the number of virtual stages on each pipeline stage.
        nodes: the node of every rank, by rank.
        max_rows: the largest number of rows of a table; rows in the middle of a longer one are left out.
    """
    blocks = [_headline(sizes, columns, vpp)]
    if "pp" in sizes:
        extra = [axis for axis in dense_grid(sizes) if axis not in DENSE_AXES and sizes[axis] > 1]
        blocks.append(_stage_block(sizes, columns, (*extra, "dp"), ("cp", "tp"), max_rows))
        if _uses_experts(sizes):
            blocks.append(f"experts\n{_stage_block(sizes, columns, (*extra, 'edp'), ('ep', 'etp'), max_rows)}")
    if nodes is not None:
        blocks.append(_node_block(sizes, columns, nodes, max_rows))
    return "\n\n".join(blocks)


def runs_text(values: Sequence[int]) -> str:
    """Return numbers, in their order, as runs: ``0-7``, ``0-1, 8-9``, or past three runs ``0, 4 .. 28``."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    texts = [f"{first}-{last}" if last > first else f"{first}" for first, last in runs]
    return ", ".join(texts) if len(texts) <= 3 else f"{texts[0]}, {texts[1]} .. {texts[-1]}"


def _uses_experts(sizes: Sizes) -> bool:
    return bool(expert_grid(sizes)) and (sizes["ep"] > 1 or sizes["etp"] != sizes["tp"])


def _headline(sizes: Sizes, columns: Indices, vpp: int | None) -> str:
    world_size = len(next(iter(columns.values())))
    ranks = f"{world_size:,} rank{'s' if world_size > 1 else ''}"
    if RANK_AXIS in sizes:
        return f"{ranks}, no axes"
    lines = [f"{ranks} = {product_text(dense_grid(sizes), sizes)}"]
    if _uses_experts(sizes):
        lines.append(f"{'experts'.rjust(len(ranks))} = {product_text(expert_grid(sizes), sizes)}")
    if vpp is not None:
        lines.append(f"vpp {vpp}: {vpp * sizes['pp']} virtual stages, {vpp} on each pipeline stage")
    return "\n".join(lines)


def _stage_block(sizes: Sizes, columns: Indices, rows: Sequence[str], cell: Sequence[str], max_rows: int) -> str:
    """Return a table with replicas down and pipeline stages across.

    Each cell lists its ranks in the order of the ``cell`` axes, the last axis fastest.
    """
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
    return table_text(head, body, max_rows) + legend


def _node_block(sizes: Sizes, columns: Indices, nodes: Sequence[str], max_rows: int) -> str:
    """Return one row per node, in the order of their first ranks: its ranks, and its indices on each axis in use."""
    ranks_on: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        ranks_on[node].append(rank)
    experts = EXPERT_AXES if _uses_experts(sizes) else ()
    axes = [axis for axis in (*dense_grid(sizes), *experts) if axis != RANK_AXIS and sizes[axis] > 1]
    body = []
    for node, ranks in ranks_on.items():
        indices = (sorted({columns[axis][rank] for rank in ranks}) for axis in axes)
        body.append([node, runs_text(ranks), *map(runs_text, indices)])
    return table_text(["node", "ranks", *axes], body, max_rows)


def table_text(head: Sequence[str], body: Sequence[Sequence[str]], max_rows: int) -> str:
    """Return left-aligned columns.

    Rows past ``max_rows`` and columns past the width are replaced by dots; the last rows and the last column remain.

    Args:
        head: the title of each column.
        body: the cells of each row.
        max_rows: the largest number of rows below the head.
    """
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
