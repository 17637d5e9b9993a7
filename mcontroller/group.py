"""WorkerGroup: the ranks of one role, driven together as if they were one object.

A call of a registered method is ``GroupMethod.__call__``, from top to bottom: plan, dispatch, execute, collect.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Self

from mcontroller.dispatch.arguments import dispatch
from mcontroller.dispatch.explain import Explanation, explain
from mcontroller.dispatch.future import Future
from mcontroller.dispatch.modes import Dispatch, DispatchSpec, Execute, Plan, plan
from mcontroller.dispatch.prepared_call import PreparedCall
from mcontroller.dispatch.registration import Registration, registrations
from mcontroller.errors import DispatchError, TopologyError
from mcontroller.partition import Padding
from mcontroller.transport import Executor
from parallel_state.layout import ParallelLayout
from parallel_state.topology import Topology

__all__ = ["GroupMethod", "WorkerGroup"]

_UNSET: Any = object()


@dataclass(frozen=True)
class GroupMethod:
    """A method of a group: call it, ask it to ``explain`` a call, or give a call ``options``."""

    group: WorkerGroup
    name: str
    registration: Registration
    ranks: tuple[int, ...] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        group, rule = self.group, self.registration
        call = PreparedCall(group, self.name, self.plan())
        call = dispatch(call, args, kwargs, rule.rows, materialize=rule.materialize_futures)
        measure = call.concatenates and not rule.blocking
        timeout = group.deadline(rule.timeout)
        returning = call.plan.collected
        in_flight = group.executor.submit(self.name, call.arguments, returning, timeout=timeout, measure=measure)
        future = call.future(in_flight)
        return future.get() if rule.blocking else future

    def plan(self) -> Plan:
        """Who gets which shard and who returns, for a call of this method."""
        spec = self.registration.dispatch_mode.current()
        if spec.in_worker_only:
            raise DispatchError(
                f"{self.group.name}.{self.name} is registered as {spec}: the rollout engine calls it on the worker "
                "itself, never through a group; register it with another mode to dispatch it",
                role=self.group.name,
                method=self.name,
                mode=spec.name,
            )
        if self.registration.execute_mode.rank_zero_only:
            spec = Dispatch.RANK_ZERO
        topology = self.group.topology_for(spec)
        try:
            return plan(spec, topology, self.ranks)
        except (DispatchError, TopologyError) as error:
            who = {"role": self.group.name, "method": self.name, "mode": spec.name}
            raise type(error)(f"{self.group.name}.{self.name} ({spec}): {error}", **{**error.fields, **who}) from error

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """What a call with these arguments would send to whom and bring back from whom; the method does not run."""
        call = PreparedCall(self.group, self.name, self.plan())
        return explain(dispatch(call, args, kwargs, self.registration.rows, share=False))

    def options(
        self,
        *,
        timeout: float | None = _UNSET,
        padding: Padding | None = _UNSET,
        balance: str | None = _UNSET,
        group_by: str | None = _UNSET,
        blocking: bool = _UNSET,
        ranks: Collection[int] | None = _UNSET,
    ) -> GroupMethod:
        """This method with other settings than it is registered with; ``ranks`` restricts calls to these ranks."""
        rows = _changed(self.registration.rows, padding=padding, balance=balance, group_by=group_by)
        registration = _changed(self.registration, timeout=timeout, blocking=blocking, rows=rows)
        chosen = self.ranks if ranks is _UNSET else ranks
        if not isinstance(chosen, Collection | None):
            raise DispatchError(f"ranks is {chosen!r}; expected None or a list of ranks", ranks=chosen)
        return replace(self, registration=registration, ranks=None if chosen is None else tuple(chosen))


class WorkerGroup:
    """The ranks of one role, behind an executor; every registered method of the worker class is a method of it.

    ``name`` is the role in every message. ``timeout`` (seconds) is the deadline of calls that set none of their own.
    ``topology`` is collected from the workers when a mode first asks for axes, unless it is given; it must then be that
    of the ``declared`` layout, where there is one.
    Raises DispatchError where a registered method has the name of something that groups have themselves.
    """

    def __init__(
        self,
        worker_cls: type,
        executor: Executor,
        name: str,
        *,
        timeout: float | None = None,
        topology: Topology | None = None,
        declared: ParallelLayout | None = None,
    ) -> None:
        self.worker_cls = worker_cls
        self.executor = executor
        self.name = name
        self.timeout = timeout
        self.declared = declared
        self._methods = registrations(worker_cls)
        self._flat = Topology.flat(executor.world_size, nodes=executor.nodes)
        self._topology: Topology | None = None
        taken = sorted(method for method in self._methods if hasattr(type(self), method))
        if taken:
            raise DispatchError(
                f"{worker_cls.__name__}.{taken[0]} is registered under a name that {type(self).__name__} has for "
                "itself: rename the method",
                role=name,
                methods=taken,
            )
        if topology is not None:
            self._set_topology(topology)

    def __getattr__(self, method: str) -> GroupMethod:
        methods = self.__dict__.get("_methods")  # not there while the group is being made
        if methods is None:
            raise AttributeError(method)
        if method not in methods:
            raise AttributeError(self._no_method(method))
        return GroupMethod(self, method, methods[method])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._methods]

    def _no_method(self, method: str) -> str:
        if hasattr(self.worker_cls, method):
            return (
                f"{self.worker_cls.__name__}.{method} cannot be called through group {self.name}: decorate it with "
                "@register(...), or call it on every rank with execute_all"
            )
        return f"group {self.name} has no method {method!r}; it has {', '.join(sorted(self._methods))}"

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return self.executor.world_size

    @property
    def topology(self) -> Topology:
        """Where every rank stands: asked of the workers once, and validated.

        Workers without ``get_megatron_rank_info`` stand on no axis but "rank". Raises TopologyError where what they
        report is no full grid.
        """
        return self._topology or self._set_topology(self._collect_topology())

    def topology_for(self, spec: DispatchSpec) -> Topology:
        """The topology that a mode is planned on: no worker is asked for axes that the mode does not name.

        Raises TopologyError where the mode names axes, and the workers report none.
        """
        if not spec.needs_topology:
            return self._topology or self._flat
        if self.topology == self._flat:
            raise TopologyError(
                f"group {self.name}: mode {spec} splits or collects by axes, and {self.worker_cls.__name__} reports no "
                "coordinates: give it get_megatron_rank_info and get_megatron_global_info, as MegatronWorker has, or "
                "make the group with topology=...",
                role=self.name,
                mode=spec.name,
            )
        return self.topology

    def _set_topology(self, topology: Topology) -> Topology:
        self._topology = topology
        self.executor.set_coordinates([topology.coordinates(rank) for rank in range(topology.world_size)])
        return topology

    def _collect_topology(self) -> Topology:
        if not hasattr(self.worker_cls, "get_megatron_rank_info"):
            return self._flat
        asked = [self.execute_all_async(f"get_megatron_{what}_info") for what in ("rank", "global")]
        rank_infos, global_infos = (answer.get() for answer in asked)
        nodes, names = self.executor.nodes, [self.name] * self.world_size
        return Topology.from_infos(rank_infos, global_infos, nodes, names, declared=self.declared)

    def deadline(self, timeout: float | None) -> float | None:
        """The deadline of a call in seconds: its own, or the group's."""
        return self.timeout if timeout is None else timeout

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> Future:
        """Calls a method, registered or not, on every rank, and gives the future of the list of values by rank.

        Where every argument is a list or tuple of ``world_size`` entries, each rank gets its own entries; otherwise
        every rank gets the arguments as they are.
        """
        given = [*args, *kwargs.values()]
        entries = given and all(isinstance(value, list | tuple) and len(value) == self.world_size for value in given)
        return self._execute(Dispatch.ALL_TO_ALL if entries else Dispatch.ONE_TO_ALL, method_name, args, kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """As ``execute_all_async``, waited for."""
        return self.execute_all_async(method_name, *args, **kwargs).get()

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Future:
        """Calls a method, registered or not, on rank 0 with the arguments as they are; the future of its value."""
        return self._execute(Dispatch.RANK_ZERO, method_name, args, kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """As ``execute_rank_zero_async``, waited for."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).get()

    execute_all = execute_all_async
    execute_rank_zero = execute_rank_zero_async

    def _execute(self, spec: DispatchSpec, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future:
        if not hasattr(self.worker_cls, method):
            raise DispatchError(f"{self.worker_cls.__name__} has no method {method!r}", role=self.name, method=method)
        return GroupMethod(self, method, Registration(spec, Execute.ALL, blocking=False))(*args, **kwargs)

    def shutdown(self) -> None:
        """Ends the ranks; a second call does nothing."""
        self.executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}: {self.world_size} x {self.worker_cls.__name__})"


def _changed(value: Any, **changes: Any) -> Any:
    given = {name: change for name, change in changes.items() if change is not _UNSET}
    return replace(value, **given) if given else value
