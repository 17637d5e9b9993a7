"""The ranks whose GPUs each engine uses: as many engines as fit the ranks of a data-parallel shard."""

from __future__ import annotations

from collections.abc import Sequence

from mcontroller.errors import ConfigError
from workers.config import ActorConfig


def engines_of_shards(shards: Sequence[int], nodes: Sequence[str], tp: int) -> list[list[tuple[int, ...]]]:
    """Return the engines of every data-parallel shard, each as the ranks whose GPUs it uses.

    An engine is on one node, since its own ranks communicate in every layer. Its first rank starts and calls it.

    Args:
        shards: by rank, its data-parallel shard.
        nodes: by rank, the name of its node.
        tp: ranks of an engine.

    Raises:
        ConfigError: the ranks of a shard have no node with room for an engine.
    """
    engines: list[list[tuple[int, ...]]] = []
    for shard in range(max(shards) + 1):
        of_node: dict[str, list[int]] = {}
        for rank, node in enumerate(nodes):
            if shards[rank] == shard:
                of_node.setdefault(node, []).append(rank)
        engines.append(
            [
                tuple(ranks[first : first + tp])
                for ranks in of_node.values()
                for first in range(0, len(ranks) - tp + 1, tp)
            ]
        )
        if not engines[-1]:
            raise ConfigError(
                f"rollout.vllm.tp is {tp}, but the ranks of data-parallel shard {shard} are "
                f"{', '.join(f'{len(ranks)} on node {node}' for node, ranks in of_node.items())}, and an engine is on "
                "one node: reduce rollout.vllm.tp",
                key="rollout.vllm.tp",
                value=tp,
            )
    return engines


def gpus_used(config: ActorConfig, shards: Sequence[int], nodes: Sequence[str]) -> int:
    """Return how many GPUs the engines use; ``shards`` and ``nodes`` are as in ``engines_of_shards``."""
    engines = engines_of_shards(shards, nodes, config.rollout.vllm.tp)
    return sum(len(ranks) for of_shard in engines for ranks in of_shard)
