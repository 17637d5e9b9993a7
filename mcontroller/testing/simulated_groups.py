"""Simulated worker groups: real Megatron workers that communicate, in one process, without Ray or a GPU.

``simulated_worker_group`` returns a real group, with the real dispatch and collect, whose ranks are threads of the
calling process, one of which runs at a time. Workers initialize torch.distributed and Megatron as on a cluster::

    group = simulated_worker_group(ActorRolloutRefWorker, ParallelLayout(64, tp=4, pp=4), config)
    group.init_model()
    group.update_actor(batch)

A hang is an error that begins with its cause; see ``parallel_state.simulated``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mcontroller.errors import WorkerError
from mcontroller.group import WorkerGroup
from mcontroller.local import LocalExecutor
from mcontroller.testing.mocked_groups import as_topology, init_of
from mcontroller.worker import ClassWithInitArgs, RankEnvironment, W_co
from parallel_state.layout import ParallelLayout
from parallel_state.simulated.errors import SimulationError
from parallel_state.simulated.simulation import Simulation
from parallel_state.simulated.trace import CommunicationTrace

T = TypeVar("T")


class SimulatedExecutor(LocalExecutor):
    """A LocalExecutor whose ranks run a call together, and communicate.

    Args:
        cls_with_init: the worker class with its arguments.
        simulate: returns a new simulation of the ranks.
        role: name of the role in error messages.
    """

    def __init__(self, cls_with_init: ClassWithInitArgs[Any], simulate: Callable[[], Simulation], role: str) -> None:
        self._simulate, self._simulation = simulate, simulate()
        super().__init__(cls_with_init, self._simulation.world_size, role)

    def restart(self, timeout: float | None = None) -> None:
        """Construct the workers on ranks of another simulation; see ``LocalExecutor.restart``."""
        self._simulation.close()
        self._simulation = self._simulate()
        super().restart(timeout)

    def on_ranks(self, method: str, functions: Mapping[int, Callable[[], T]]) -> dict[int, T]:
        """Run a function on each rank, and return the values by rank.

        Raises:
            SimulationError: ranks communicate wrongly.
            WorkerError: what the first rank that failed raised; its traceback has the positions of the others.
        """
        try:
            return self._simulation.run(functions)
        except SimulationError:
            raise
        except Exception as error:
            rank = self._simulation.failed_rank
            if rank is None:  # no rank raised it
                raise
            raise self.error_of(rank, method, error) from error
        except BaseException as error:  # KeyboardInterrupt has ended all ranks
            self.fail(SimulationError(f"{self.role}.{method} ended with {type(error).__name__}", ranks=()))
            raise

    def error_of(self, rank: int, method: str, error: BaseException) -> WorkerError:
        """Return the error of a call from what a rank raised; without groups, say who makes them."""
        if "initialized" in str(error) and not hasattr(self._init.cls, "get_megatron_rank_info"):
            error.args = (
                f"{error}; {self._init.cls.__name__} has no groups of torch.distributed or Megatron but those that it "
                "makes: derive it from workers.MegatronWorker, whose constructor makes them for its layout",
            )
        return super().error_of(rank, method, error)

    def shutdown(self, timeout: float | None = None) -> None:
        """Call ``before_shutdown`` of every worker, unless the group is broken, and drop the workers and groups."""
        super().shutdown(timeout)
        self._simulation.close()


class SimulatedWorkerGroup(WorkerGroup[W_co]):
    """A group of simulated ranks; see ``simulated_worker_group``."""

    executor: SimulatedExecutor

    @property
    def workers(self) -> list[W_co]:
        """The worker objects, by rank. Their methods communicate only in a call of the group."""
        return self.executor.workers


def simulated_worker_group(
    worker: type[W_co] | ClassWithInitArgs[W_co],
    layout: int | ParallelLayout,
    *args: Any,
    name: str = "simulated",
    timeout: float | None = None,
    seed: int | None = None,
    check_async: bool = True,
    trace: CommunicationTrace | None = None,
    modules: Sequence[str] = (),
    **kwargs: Any,
) -> SimulatedWorkerGroup[W_co]:
    """Make a group of ``worker`` objects on simulated ranks, one per rank of ``layout``.

    As on a cluster, a worker has the groups of torch.distributed and Megatron that its constructor makes;
    ``MegatronWorker`` makes those of its layout. Mocked ranks answer Megatron's getters without any.

    Args:
        worker: the worker class, or a ClassWithInitArgs, which allows no other arguments.
        layout: a ParallelLayout, or a number of ranks, which are then data-parallel.
        args: positional arguments of the worker's ``__init__``.
        name: the role, as error messages name it.
        timeout: accepted for the interface of other groups; a simulated call has no deadline.
        seed: draws which of the ranks that can go on is next; see ``parallel_state.simulated.run_ranks``.
        check_async: whether to report tensors that change between an asynchronous call and its wait.
        trace: records what the ranks communicate.
        modules: packages that each rank imports for itself; see ``parallel_state.simulated.run_ranks``.
        kwargs: keyword arguments of the worker's ``__init__``. One with the name of an argument here, as ``name``,
            needs a ClassWithInitArgs.

    Raises:
        DispatchError: there are arguments next to a ClassWithInitArgs.
        WorkerError: a worker's constructor raised.
        SimulationError: the constructors communicate wrongly.
    """
    topology, init = as_topology(layout), init_of(worker, args, kwargs)
    size = topology.world_size

    def simulate() -> Simulation:
        return Simulation(
            topology,
            seed=seed,
            check_async=check_async,
            trace=trace,
            modules=modules,
            variables=lambda rank: RankEnvironment(rank, size, rank, size, master_port=1).variables(),
        )

    reports = hasattr(init.cls, "get_megatron_rank_info")
    declared = layout if isinstance(layout, ParallelLayout) else None
    executor = SimulatedExecutor(init, simulate, name)
    return SimulatedWorkerGroup(
        init.cls, executor, name, timeout=timeout, topology=None if reports else topology, declared=declared
    )
