"""``run_ranks``: a function on every rank of a layout, in this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from parallel_state.layout import ParallelLayout
from parallel_state.simulated.simulation import Simulation
from parallel_state.simulated.trace import CommunicationTrace

T = TypeVar("T")


def run_ranks(
    layout: int | ParallelLayout,
    function: Callable[..., T],
    *args: Any,
    seed: int | None = None,
    check_async: bool = True,
    trace: CommunicationTrace | None = None,
    modules: Sequence[str] = (),
) -> list[T]:
    """Run ``function(*args)`` on every simulated rank of a layout, and return the results by rank.

    torch.distributed is initialized on each rank, and with a ``ParallelLayout``, ``megatron.core.parallel_state`` has
    the groups of the layout. Each rank has a copy of the arguments, its own random states, environment variables and
    module globals of Megatron, as a process has. Nothing of it is left afterwards.

    Args:
        layout: the layout; or a number of ranks, without Megatron's groups.
        function: what each rank runs.
        args: its arguments.
        seed: draws which of the ranks that can go on is next; None for round robin. It explores other legal orders: a
            race that depends on the order is a seed that fails every time.
        check_async: whether to report tensors that change between an asynchronous call and its wait.
        trace: records what the ranks communicate, from when they are initialized.
        modules: packages that each rank imports for itself: module globals and classes are its own, as in a process.
            Others are shared, except globals of Megatron and of ``workers`` that a function rebinds. What ranks write
            into modules and classes that they share is reported as a ``SharedStateWarning``.

    Raises:
        Deadlock: no rank can go on; the message begins with the cause and has the position of every rank.
        CollectiveMismatch: ranks made calls that do not fit together.
        SimulationError: another error in how ranks communicate.
        LayoutError: Megatron cannot have this layout.
        ParallelStateError: ``modules`` names a package that does not exist.
        BaseException: what the first rank that failed raised; a note has the positions of the others.
    """
    simulation = Simulation(layout, seed=seed, check_async=check_async, trace=trace, modules=modules)
    world_size = simulation.world_size
    contexts: list[Any] = [None] * world_size

    def initialize(rank: int) -> None:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        if isinstance(layout, ParallelLayout):
            from parallel_state.megatron import MegatronContext  # a number of ranks does not need Megatron

            contexts[rank] = MegatronContext(layout)

    def run(rank: int, args: tuple[Any, ...]) -> T:
        if contexts[rank] is None:
            return function(*args)
        with contexts[rank].activate():
            return function(*args)

    try:
        simulation.run({rank: partial(initialize, rank) for rank in range(world_size)})
        if trace is not None:
            trace.clear()
        copies = [copy.deepcopy(args) for _ in range(world_size)]
        results = simulation.run({rank: partial(run, rank, copies[rank]) for rank in range(world_size)})
        return [results[rank] for rank in range(world_size)]
    finally:
        simulation.close()
