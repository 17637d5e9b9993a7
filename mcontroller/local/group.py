"""LocalWorkerGroup: a group whose ranks are objects of the calling process."""

from __future__ import annotations

from mcontroller.group import WorkerGroup
from mcontroller.local.executor import LocalExecutor
from mcontroller.worker import ClassWithInitArgs, W_co
from parallel_state.layout import ParallelLayout
from parallel_state.topology import Topology


class LocalWorkerGroup(WorkerGroup[W_co]):
    """A group for debuggers: the ranks run one after another in the caller's thread.

    Ranks that communicate cannot run one after another: such workers need a group of one rank, or
    ``mcontroller.testing``, or Ray.

    Args:
        cls_with_init: the worker class, or a ClassWithInitArgs with its init arguments.
        layout: the number of ranks, or a ParallelLayout, which sets the coordinates of the ranks. If the workers
            report their own coordinates, these must fit the layout.
        name_prefix: the role, as error messages name it.
        timeout: accepted for the interface of other groups; calls in the caller's thread have no deadline.

    Raises:
        WorkerError: a worker's constructor raised.
    """

    executor: LocalExecutor

    def __init__(
        self,
        cls_with_init: type[W_co] | ClassWithInitArgs[W_co],
        layout: int | ParallelLayout = 1,
        *,
        name_prefix: str = "local",
        timeout: float | None = None,
    ) -> None:
        init = cls_with_init if isinstance(cls_with_init, ClassWithInitArgs) else ClassWithInitArgs(cls_with_init)
        declared = layout if isinstance(layout, ParallelLayout) else None
        world_size = layout.world_size if isinstance(layout, ParallelLayout) else layout
        executor = LocalExecutor(init, world_size, name_prefix)
        reports = hasattr(init.cls, "get_megatron_rank_info")
        topology = Topology.from_layout(declared, executor.nodes) if declared and not reports else None
        super().__init__(init.cls, executor, name_prefix, timeout=timeout, topology=topology, declared=declared)

    @property
    def workers(self) -> list[W_co]:
        """The worker objects, by rank."""
        return self.executor.workers
