"""Plan where engines lie: which ranks' GPUs each engine uses. Pure, and independent of the policy's layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mcontroller.errors import ConfigError


class EnginePlacement(NamedTuple):
    """The ranks whose GPUs an engine uses.

    Attributes:
        parts: by node of the engine, its ranks there, the same number on each. The first rank of a part starts the
            engine's processes on that node; the first of all calls the engine.
    """

    parts: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the engine, in the order of its own ranks."""
        return tuple(rank for part in self.parts for rank in part)

    @property
    def starters(self) -> tuple[int, ...]:
        """By node of the engine, the rank that starts its processes there and puts the weights together for them."""
        return tuple(part[0] for part in self.parts)

    @property
    def caller(self) -> int:
        """The rank that calls the engine."""
        return self.parts[0][0]


def place_engines(nodes: Sequence[str], tp: int) -> list[EnginePlacement]:
    """Place as many engines as fit the ranks of a group.

    An engine is on as few nodes as possible, since its ranks communicate in every layer, and has as many ranks on each
    of them. All engines have the same shape. Ranks that are left over generate nothing.

    Args:
        nodes: by rank, the name of its node.
        tp: ranks of an engine.

    Returns:
        The engines in the order of their first ranks.

    Raises:
        ConfigError: no engine fits; ``ranks`` has the number of ranks by node.
    """
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    for spanned in (count for count in range(1, len(by_node) + 1) if tp % count == 0):
        share, engines = tp // spanned, list[EnginePlacement]()
        left = [list(ranks) for ranks in by_node.values()]
        while len(left := [ranks for ranks in left if len(ranks) >= share]) >= spanned:
            engines.append(EnginePlacement(tuple(tuple(ranks[:share]) for ranks in left[:spanned])))
            for ranks in left[:spanned]:
                del ranks[:share]
        if engines:
            return sorted(engines)
    counts = {node: len(ranks) for node, ranks in by_node.items()}
    raise ConfigError(
        f"rollout.vllm.tp is {tp}, and the {len(nodes)} ranks of the group that generates are "
        f"{', '.join(f'{count} on {node}' for node, count in counts.items())}: an engine needs {tp} ranks on a node, "
        "or the same number on each of several nodes. Set rollout.vllm.tp to a number that fits, or start the group "
        "with more GPUs",
        key="rollout.vllm.tp",
        value=tp,
        ranks=counts,
    )


def weight_receivers(engines: Sequence[EnginePlacement]) -> tuple[int, ...]:
    """Return the ranks that put whole weights together for engines, in order."""
    return tuple(sorted(rank for engine in engines for rank in engine.starters))


def describe_engines(engines: Sequence[EnginePlacement], nodes: Sequence[str], most: int = 8) -> list[str]:
    """Return a line for each of the first ``most`` engines, and one for the others."""

    def place(part: tuple[int, ...]) -> str:
        consecutive = part == tuple(range(part[0], part[-1] + 1))
        ranks = f"{part[0]}-{part[-1]}" if consecutive and len(part) > 1 else ", ".join(map(str, part))
        return f"rank{'s' if len(part) > 1 else ''} {ranks} on {nodes[part[0]]}"

    lines = [f"engine {number}: {', '.join(map(place, engine.parts))}" for number, engine in enumerate(engines[:most])]
    return lines + ([f"... and {len(engines) - most} more engines"] if len(engines) > most else [])
