"""WorkerGroup: the ranks of one role, driven together as if they were one object.

A call of a registered method is ``GroupMethod.__call__``, from top to bottom: plan, dispatch, execute, collect.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Literal, ParamSpec, Self, TypedDict, TypeVar, Unpack, overload

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.call import PreparedCall, dispatch
from mcontroller.dispatch.explain import Explanation, explain
from mcontroller.dispatch.modes import Dispatch, DispatchSpec, Execute, Plan, plan
from mcontroller.dispatch.registration import Registration, check_timeout, registrations
from mcontroller.errors import DispatchError, MControllerError, TopologyError
from mcontroller.partition import Padding
from mcontroller.trace.recorder import start_timer
from mcontroller.transport import Executor, Future
from mcontroller.worker import W_co
from parallel_state.axes import DENSE_AXES
from parallel_state.infos import DistGlobalInfo, DistRankInfo
from parallel_state.layout import ParallelLayout
from parallel_state.topology import Topology

P = ParamSpec("P")
T = TypeVar("T")
Result_co = TypeVar("Result_co", covariant=True)
Future_co = TypeVar("Future_co", covariant=True)

ANSWERED = frozenset({"get_megatron_rank_info", "get_megatron_global_info"})
"""Methods of workers that a group answers itself, from its topology."""

_UNSET: Any = object()


class CallOptions(TypedDict, total=False):
    """The keywords of ``GroupMethod.options`` next to ``blocking``; see there."""

    timeout: float | None
    padding: Padding | None
    balance: str | None
    group_by: str | None
    within: str | None


@dataclass(frozen=True)
class GroupMethod(Generic[P, Result_co, Future_co]):
    """A registered method of a group: call it, ``explain`` a call, or change the ``options`` of a call.

    The type parameters are the parameters of a call, its result, and the future that it returns with
    ``blocking=False``. See docs/testing.md for how type checkers learn them.

    Attributes:
        group: the group that is called.
        name: the name of the method.
        registration: how the method is registered.
    """

    group: WorkerGroup[Any]
    name: str
    registration: Registration

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result_co:
        """Run the method on the group: plan, dispatch, execute, collect.

        Futures and references of Ray are replaced by their values, as arguments or as entries of a list by rank.

        Returns:
            The collected result. If the method is non-blocking, a DataProto that is still being computed, or the
            future of any other result.

        Raises:
            DispatchError: the arguments do not fit the mode or the method's signature. Nothing has been sent then.
            TopologyError: the mode names an axis that the group's topology does not have.
            GroupError: the call failed: WorkerError, WorkerDied, CallTimeout or GroupBroken.
        """
        group, rule = self.group, self.registration
        timer = start_timer(f"{group.name}.{self.name}")
        call = PreparedCall(group, self.name, self.plan(), changes_rows=rule.changes_rows)
        timer("plan")
        call = dispatch(call, args, kwargs, rule.rows, materialize=rule.materialize_futures)
        timer("split")
        keep = not rule.blocking and call.plan.spec.result == "concat"
        timeout = group.timeout if rule.timeout is None else rule.timeout
        returning = call.plan.collected
        in_flight = group.executor.submit(self.name, call.arguments, returning, timeout=timeout, keep=keep)
        timer.number = in_flight.number
        timer("send")
        if rule.blocking:
            return call.result(in_flight)  # type: ignore[no-any-return]
        future: Any = Future(in_flight, partial(call.result, in_flight))
        return DataProto.later(future, partial(call.kept, in_flight)) if keep else future  # type: ignore[return-value]  # as declared

    def plan(self) -> Plan:
        """Return the plan of a call: which rank gets which shard, and which ranks return.

        Raises:
            DispatchError: the method is not callable through a group.
            TopologyError: the mode names an axis that the group's topology does not have.
        """
        spec = self.registration.dispatch_mode
        if self.registration.execute_mode is Execute.RANK_ZERO and not spec.in_worker_only:
            spec = Dispatch.RANK_ZERO
        topology = self.group.topology_for(spec)
        try:
            return plan(spec, topology)
        except (DispatchError, TopologyError) as error:
            call = {"role": self.group.name, "method": self.name, "mode": spec.name}
            raise type(error)(f"{self.group.name}.{self.name} ({spec}): {error}", **{**error.fields, **call}) from error

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """Return what a call with these arguments would send to and collect from each rank, without running it.

        Raises:
            DispatchError: the arguments do not fit the mode or the method's signature.
            TopologyError: the mode names an axis that the group's topology does not have.
        """
        call = PreparedCall(self.group, self.name, self.plan())
        return explain(dispatch(call, args, kwargs, self.registration.rows, share=False))

    @overload
    def options(self, **options: Unpack[CallOptions]) -> Self: ...
    @overload
    def options(
        self, *, blocking: Literal[False], **options: Unpack[CallOptions]
    ) -> GroupMethod[P, Future_co, Future_co]: ...
    @overload
    def options(
        self: GroupMethod[P, Future[T], Future_co], *, blocking: Literal[True], **options: Unpack[CallOptions]
    ) -> GroupMethod[P, T, Future_co]: ...
    @overload
    def options(self, *, blocking: Literal[True], **options: Unpack[CallOptions]) -> Self: ...
    @overload
    def options(self, *, blocking: bool, **options: Unpack[CallOptions]) -> GroupMethod[P, Any, Future_co]: ...
    def options(
        self,
        *,
        timeout: float | None = _UNSET,
        padding: Padding | None = _UNSET,
        balance: str | None = _UNSET,
        group_by: str | None = _UNSET,
        within: str | None = _UNSET,
        blocking: bool = _UNSET,
    ) -> GroupMethod[P, Any, Any]:
        """Return this method with other settings than those it is registered with.

        Args:
            timeout: seconds after which a call fails with CallTimeout; None uses the group's timeout.
            padding: which rows are added to uneven shards; see ``RowRule``.
            balance: the column whose row sums are balanced over the shards; see ``RowRule``.
            group_by: the column whose equal labels stay in one shard; see ``RowRule``.
            within: the column whose equal labels are balanced by themselves; see ``RowRule``.
            blocking: whether a call waits for its result (True) or returns a future at once (False).

        Raises:
            DispatchError: a value is not of the expected kind.

        Examples:
            >>> future = actor.update_actor.options(blocking=False, timeout=600)(batch)
            >>> critic.update_critic(batch)  # both groups train at the same time
            >>> metrics = future.get().meta_info["metrics"]
        """
        rows = _changed(self.registration.rows, padding=padding, balance=balance, group_by=group_by, within=within)
        registration = _changed(self.registration, timeout=timeout, blocking=blocking, rows=rows)
        return replace(self, registration=registration)


_OTHER_NAMES = {"name_prefix": "name"} | {f"{axis}_size": f'topology.size("{axis}")' for axis in DENSE_AXES}
"""Attributes of verl's groups, and what they are here."""


class WorkerGroup(Generic[W_co]):
    """The ranks of one role, behind an executor; every registered method of the worker class is a method of it.

    The type parameter is the worker class; ``python -m mcontroller stubs`` writes a class that declares its methods.

    Args:
        worker_cls: the class of the worker objects.
        executor: the transport that runs calls on the ranks.
        name: the role, as error messages name it.
        timeout: deadline in seconds of calls that do not set one; None for no deadline.
        topology: the coordinates of the ranks. By default they are collected from the workers when a mode first needs
            axes.
        declared: the layout that the collected topology must agree with.

    Raises:
        DispatchError: a registered method has the name of a member of the group's class, or ``timeout`` is not above 0.

    Examples:
        >>> with RayWorkerGroup(pool, RayClassWithInitArgs(Scorer, weight=0.5), name_prefix="scorer") as scorer:
        ...     scores = scorer.score(batch)  # split, sent, computed on every rank, collected
        ...     print(scorer.score.explain(batch))
    """

    def __init__(
        self,
        worker_cls: type[W_co],
        executor: Executor,
        name: str,
        *,
        timeout: float | None = None,
        topology: Topology | None = None,
        declared: ParallelLayout | None = None,
    ) -> None:
        check_timeout(timeout)
        self.worker_cls = worker_cls
        self.executor = executor
        self.name = name
        self.timeout = timeout
        self.declared = declared
        self._methods = registrations(worker_cls)
        self._flat = Topology.flat(executor.world_size, nodes=executor.nodes)
        self._topology: Topology | None = None
        clashing = sorted(method for method in self._methods if hasattr(type(self), method) and method not in ANSWERED)
        if clashing:
            raise DispatchError(
                f"{worker_cls.__name__}.{clashing[0]} has the name of a member of {type(self).__name__}: "
                "rename the method",
                role=name,
                methods=clashing,
            )
        if topology is not None:
            self._set_topology(topology)

    def __getattr__(self, method: str) -> GroupMethod[..., Any, Any]:
        methods = self.__dict__.get("_methods")  # not set until __init__ has run
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
        if not self._methods:
            return (
                f"group {self.name} has no method {method!r}, and no registered method at all: the methods of several "
                "roles are those of the groups that spawn([...]) returns"
            )
        if method in _OTHER_NAMES:
            return f"group {self.name} has no attribute {method!r}; it is group.{_OTHER_NAMES[method]}"
        close = difflib.get_close_matches(method, self._methods, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(sorted(self._methods))}"
        return f"group {self.name} has no method {method!r}; {hint}"

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.executor.world_size

    @property
    def topology(self) -> Topology:
        """The coordinates of every rank, collected from the workers at first use and validated.

        Workers without ``get_megatron_rank_info`` have no axis but "rank".

        Raises:
            TopologyError: the coordinates that the workers report do not form a full grid.
        """
        return self._topology or self.collect_topology()

    def topology_for(self, spec: DispatchSpec) -> Topology:
        """Return the topology that a mode is planned on; collect it only if the mode names axes.

        Raises:
            TopologyError: the mode names axes, but the workers report no coordinates.
        """
        topology = self._topology or (self.collect_topology() if spec.needs_topology else self._flat)
        if spec.needs_topology and topology == self._flat:
            raise TopologyError(
                f"group {self.name}: mode {spec} splits or collects by axes, but {self.worker_cls.__name__} reports no "
                "coordinates: define get_megatron_rank_info and get_megatron_global_info, as MegatronWorker does, or "
                "create the group with topology=...",
                role=self.name,
                mode=spec.name,
            )
        return topology

    def collect_topology(self) -> Topology:
        """Collect the coordinates of every rank from the workers, validate and keep them.

        Raises:
            TopologyError: the coordinates do not form a full grid, or contradict the declared layout.
        """
        if not hasattr(self.worker_cls, "get_megatron_rank_info"):
            return self._set_topology(self._flat)
        queries = [self.execute_all_async(f"get_megatron_{kind}_info") for kind in ("rank", "global")]
        rank_infos, global_infos = (query.get() for query in queries)
        try:
            topology = Topology.from_infos(rank_infos, global_infos, self.executor.nodes, self.declared)
        except TopologyError as error:
            raise TopologyError(f"group {self.name}: {error}", **error.fields, role=self.name) from None
        return self._set_topology(topology)

    def _set_topology(self, topology: Topology) -> Topology:
        self._topology = topology
        self.executor.set_coordinates([topology.coordinates(rank) for rank in range(topology.world_size)])
        return topology

    @property
    def broken(self) -> MControllerError | None:
        """The failure that broke the group: every call raises GroupBroken until ``restart``. None if it is usable."""
        return self.executor.broken

    @property
    def node_ids(self) -> Sequence[str]:
        """Ray's id of the node of every rank, by rank; empty if the ranks are in this process."""
        return ()

    @property
    def lost_nodes(self) -> Set[str]:
        """Ray's ids of the nodes that the group has lost, also those whose loss Ray has not noticed yet."""
        return frozenset()

    def fail_stuck_calls(self, seconds: float) -> None:
        """Report calls that run for so many seconds from now on, and fail those whose ranks wait for each other.

        Ranks in this process are not watched.
        """

    def restart(self, timeout: float | None = 600.0) -> None:
        """Start the ranks again, with workers constructed from the same arguments, in slots of the same pool.

        The group is the same object with the same options, and so are the groups of its other roles. What the workers
        had is lost: build and load their models again. Futures and batches that were not read before raise
        GroupBroken. A group that works is ended first, as by a failure.

        Args:
            timeout: deadline of the start in seconds; None for no deadline.

        Raises:
            ResourceError: the pool has no free slot, or another driver has started the group.
            TopologyError: the ranks report other coordinates than before.
            GroupError: the start failed; the group stays broken.
        """
        before = self._topology
        self.executor.restart(timeout)
        self._flat = Topology.flat(self.world_size, nodes=self.executor.nodes)
        if before is None or not hasattr(self.worker_cls, "get_megatron_rank_info"):
            return
        coordinates = [before.coordinates(rank) for rank in range(self.world_size)]
        after = [self.collect_topology().coordinates(rank) for rank in range(self.world_size)]
        for rank, (expected, now) in enumerate(zip(coordinates, after, strict=True)):
            if expected != now:
                raise TopologyError(
                    f"group {self.name} was restarted, and rank {rank} reports {now}; before it was {expected}",
                    role=self.name,
                    rank=rank,
                )

    @overload
    def get_megatron_rank_info(self, rank: int) -> DistRankInfo: ...
    @overload
    def get_megatron_rank_info(self, rank: None = None) -> list[DistRankInfo]: ...
    def get_megatron_rank_info(self, rank: int | None = None) -> DistRankInfo | list[DistRankInfo]:
        """Return the coordinates of a rank, or of every rank by rank, from the collected topology.

        Raises:
            TopologyError: the workers report no coordinates, or there is no such rank.
        """
        topology = self._megatron_topology()
        if rank is None:
            return [topology.rank_info(number) for number in range(self.world_size)]
        return topology.rank_info(rank)

    def get_megatron_global_info(self) -> DistGlobalInfo:
        """Return the size of each axis, from the collected topology.

        Raises:
            TopologyError: the workers report no coordinates.
        """
        return self._megatron_topology().global_info()

    def _megatron_topology(self) -> Topology:
        if not all(axis in self.topology.sizes for axis in DENSE_AXES):
            raise TopologyError(
                f"group {self.name} has no axis {', '.join(DENSE_AXES)}: its workers report no coordinates",
                role=self.name,
            )
        return self.topology

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> Future[list[Any]]:
        """Call a method, registered or not, on every rank, and return the future of the list of values by rank.

        If every argument is a list of ``world_size`` entries, each rank gets its own entries; otherwise every rank gets
        the arguments as they are.

        Raises:
            DispatchError: the worker class has no such method.
        """
        values = [*args, *kwargs.values()]
        entries = values and all(isinstance(value, list) and len(value) == self.world_size for value in values)
        return self._execute(Dispatch.ALL_TO_ALL if entries else Dispatch.ONE_TO_ALL, method_name, args, kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``execute_all_async``, wait, and return the values by rank."""
        return self.execute_all_async(method_name, *args, **kwargs).get()

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method, registered or not, on rank 0 with the arguments as they are; return the future of its value.

        Raises:
            DispatchError: the worker class has no such method.
        """
        return self._execute(Dispatch.RANK_ZERO, method_name, args, kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``execute_rank_zero_async``, wait, and return the value."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).get()

    execute_all = execute_all_async
    execute_rank_zero = execute_rank_zero_async

    def _execute(self, spec: DispatchSpec, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        if not (callable(getattr(self.worker_cls, method, None)) or method in self._methods):
            raise DispatchError(f"{self.worker_cls.__name__} has no method {method!r}", role=self.name, method=method)
        registration = Registration(spec, Execute.ALL, blocking=False)
        called: GroupMethod[..., Future[Any], Future[Any]] = GroupMethod(self, method, registration)
        return called(*args, **kwargs)

    def shutdown(self, timeout: float | None = 600.0) -> None:
        """End the ranks, after ``before_shutdown`` of their workers; a second call does nothing.

        Args:
            timeout: deadline of ``before_shutdown`` in seconds, after which the processes are ended and CallTimeout is
                raised; None for no deadline. Ranks in the calling process have none. A process that is stopped, as by
                SIGSTOP, has 5 s.
        """
        self.executor.shutdown(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}: {self.world_size} x {self.worker_cls.__name__})"


def _changed(value: T, **changes: Any) -> T:
    passed = {name: change for name, change in changes.items() if change is not _UNSET}
    return replace(value, **passed) if passed else value  # type: ignore[type-var]  # T is a dataclass
