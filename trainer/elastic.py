"""The sizes of a run's pools after a node is lost: those of the configuration, or smaller ones that still fit.

A data-parallel replica that has lost a rank is of no use to the others. So declared nodes are left out as a whole,
until the layouts of all roles divide what is left: fewer data-parallel replicas that train on the same global batch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from mcontroller.errors import LayoutError
from mcontroller.ray.reservation import cluster_nodes, fits
from mcontroller.ray.resource_pool import ResourcePoolManager
from trainer.roles import GroupSpec
from workers.config import ParallelConfig

PoolSizes = Mapping[str, Sequence[int]]
"""Processes on each node, by name of the pool."""


class ElasticPools:
    """Chooses the sizes of a run's pools.

    Args:
        pools: the pools, with the sizes of the configuration.
        workers: the groups of the run.

    Attributes:
        declared: the sizes of the configuration.
        nodes: the resources of each node of the cluster, as ``cluster_nodes`` returns them.
    """

    def __init__(self, pools: ResourcePoolManager, workers: Sequence[GroupSpec]) -> None:
        self.declared = {name: list(nodes) for name, nodes in pools.resource_pool_spec.items()}
        self.nodes: Callable[..., Sequence[dict[str, float]]] = cluster_nodes
        self._pools = pools
        self._layouts = [(pools.mapping[spec.role], spec.init.cls.layouts(spec.config)) for spec in workers]

    @property
    def sizes(self) -> PoolSizes:
        """The sizes of the pools now."""
        return self._pools.resource_pool_spec

    @property
    def processes(self) -> int:
        """The number of processes of a group in each pool, together."""
        return sum(map(sum, self.sizes.values()))

    @property
    def is_reduced(self) -> bool:
        """Whether the pools are smaller than those of the configuration."""
        return self.sizes != self.declared

    def after_loss(self, gone: Collection[str]) -> PoolSizes | None:
        """Return the largest sizes that the cluster has room for, if nothing else ran there; None if there are none.

        Args:
            gone: Ray's ids of nodes that are lost, also if Ray has not noticed it yet.
        """
        nodes = self.nodes(gone)
        return self._largest(lambda sizes: fits(self._pools.shapes(sizes), nodes))

    def after_growth(self) -> PoolSizes:
        """Return the largest sizes for which the cluster has free room beside the pools as they are."""
        nodes = self.nodes((), free=True)

        def has_room(sizes: PoolSizes) -> bool:
            more = {name: _difference(sizes[name], self.sizes[name]) for name in sizes}
            more_nodes = {name: nodes for name, nodes in more.items() if nodes is not None}
            return len(more_nodes) == len(more) and fits(self._pools.shapes(more_nodes), nodes)

        return self._largest(has_room) or self.sizes

    def _largest(self, has_room: Callable[[PoolSizes], bool]) -> PoolSizes | None:
        def accepts(pool: str, ranks: int) -> bool:
            return all(divides(layouts, ranks) for name, layouts in self._layouts if name == pool)

        return largest(self.declared, accepts, has_room)


def largest(
    declared: PoolSizes, accepts: Callable[[str, int], bool], has_room: Callable[[PoolSizes], bool]
) -> dict[str, list[int]] | None:
    """Return the largest pools of some of the declared nodes; None if there are none.

    Args:
        declared: processes on each node, by name of the pool.
        accepts: whether the layouts of a pool's roles divide so many ranks.
        has_room: whether there is room for pools of these sizes.
    """
    choices = {
        name: [part for part in _parts(nodes) if part and accepts(name, sum(part))] for name, nodes in declared.items()
    }
    candidates = itertools.product(*choices.values())
    for chosen in sorted(candidates, key=lambda sizes: -sum(map(sum, sizes))):
        sizes = dict(zip(declared, chosen, strict=True))
        if has_room(sizes):
            return sizes
    return None


def _parts(nodes: Sequence[int]) -> Iterator[list[int]]:
    """Yield every different choice of nodes, in the order of ``nodes``."""
    counts = Counter(nodes)
    for numbers in itertools.product(*(range(count, -1, -1) for count in counts.values())):
        left = Counter(dict(zip(counts, numbers, strict=True)))
        chosen = []
        for processes in nodes:
            if left[processes]:
                left[processes] -= 1
                chosen.append(processes)
        yield chosen


def _difference(nodes: Sequence[int], present: Sequence[int]) -> list[int] | None:
    """Return the nodes beside those that are present; None if some of these are missing."""
    more, missing = Counter(nodes), Counter(present)
    return None if missing - more else list((more - missing).elements())


def divides(layouts: Sequence[ParallelConfig], ranks: int) -> bool:
    """Return whether the layouts of a role, such as of training and of generation, divide so many ranks."""
    try:
        for layout in layouts:
            layout.layout(ranks)
    except LayoutError:
        return False
    return True


def pools_text(sizes: PoolSizes) -> str:
    """Return sizes for people: ``pool 4 + 4``."""
    return ", ".join(f"{name} {' + '.join(map(str, nodes))}" for name, nodes in sizes.items())
