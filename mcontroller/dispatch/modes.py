"""The table of dispatch modes, and the plan of a mode on a topology.

A mode defines how the arguments are sent (as they are, rows split over axes, or one list entry per shard), which ranks
return, and the form of the result. A plan lists the same by rank. Both are pure: they need no torch, Ray or process. A
plan is computed once for each mode and topology.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from mcontroller.errors import DispatchError
from mcontroller.partition import Padding
from parallel_state.axes import RANK_AXIS
from parallel_state.describe import runs_text, table_text
from parallel_state.topology import Topology

RANK = RANK_AXIS
"""The pseudo-axis with one index per rank, in rank order; every topology has it."""

ArgumentRule = Literal["whole", "rows", "entries"]
ResultRule = Literal["value", "list", "concat"]
Functions = tuple[Callable[..., Any], Callable[..., Any]]


@dataclass(frozen=True)
class DispatchSpec:
    """One row of the table of modes.

    Attributes:
        name: the name in messages.
        arguments: ``whole`` sends every rank the arguments as they are. ``rows`` splits the rows of every DataProto
            and sends everything else to every shard. ``entries`` expects lists with one entry per shard.
        axes: the axes that are split over, first axis slowest; a shard is one combination of indices on them.
        collect: the index on each named axis that a returning rank has; a negative index counts from the end.
        by: the axes whose combinations index the results, first axis slowest; one rank returns for each of them. Of
            several candidates, the rank with the lowest indices on the other axes returns.
        result: ``concat`` (one DataProto in the order of the input), ``list`` (in the order of ``by``) or ``value``.
        leading_function: whether the first positional argument is a function, which goes to every rank.
        rank_zero_only: whether only rank 0 runs.
        tuples: for ``entries``, whether a tuple is dealt out as a list is; otherwise it is rejected, as a value that
            is meant for every rank.
        in_worker_only: whether the method cannot be called through a group at all.
        functions: a user's ``(dispatch_fn, collect_fn)``, which replace all of the above.

    Raises:
        DispatchError: a rule is unknown, an axis is not a string or is named twice, or the parts contradict each other.
    """

    name: str
    arguments: ArgumentRule
    axes: tuple[str, ...] = ()
    collect: tuple[tuple[str, int], ...] = ()
    by: tuple[str, ...] = ()
    result: ResultRule = "list"
    leading_function: bool = False
    rank_zero_only: bool = False
    tuples: bool = True
    in_worker_only: bool = False
    functions: Functions | None = None

    def __post_init__(self) -> None:
        for field, rule, rules in (("arguments", self.arguments, ArgumentRule), ("result", self.result, ResultRule)):
            if rule not in get_args(rules):
                raise DispatchError(
                    f"mode {self.name}: {field} is {rule!r}; expected one of {', '.join(get_args(rules))}",
                    mode=self.name,
                )
        for field, axes in (("axes", self.axes), ("by", self.by), ("collect", tuple(axis for axis, _ in self.collect))):
            if not all(isinstance(axis, str) for axis in axes):
                raise DispatchError(
                    f"mode {self.name}: {field} contains {axes}; expected names of axes, each a separate string",
                    mode=self.name,
                )
            if len({*axes}) < len(axes):
                raise DispatchError(f"mode {self.name}: {field} names an axis twice: {', '.join(axes)}", mode=self.name)
        if self.arguments != "whole" and not self.axes:
            raise DispatchError(f"mode {self.name} splits its arguments but names no axis: name one", mode=self.name)
        if self.result == "concat" and self.by != self.axes:
            raise DispatchError(
                f"mode {self.name} splits over {self.axes} but would concatenate by {self.by}: the two must be equal",
                mode=self.name,
                axes=self.axes,
                by=self.by,
            )

    @property
    def needs_topology(self) -> bool:
        """Whether the plan depends on more than the number of ranks."""
        named = {*self.axes, *self.by, *(axis for axis, _ in self.collect)}
        return not named <= {RANK} and not self.rank_zero_only

    def __str__(self) -> str:
        return self.name


def mode_of_functions(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> DispatchSpec:
    """Return a mode that splits and collects with user-defined functions; see ``register_dispatch_mode``."""
    return DispatchSpec(name, "entries", (RANK,), by=(RANK,), functions=(dispatch_fn, collect_fn))


_BY_RANK = (RANK,)
_DP = ("dp",)
_CP_DP_PP = ("cp", "dp", "pp")
_LAST_STAGE = (("tp", 0), ("cp", 0), ("pp", -1))


class DispatchModes:
    """The type of ``Dispatch``: the dispatch modes, each a ``DispatchSpec``, by name.

    Attributes:
        members: the modes by name, those that ``register`` added too.
    """

    RANK_ZERO = DispatchSpec("RANK_ZERO", "whole", result="value", rank_zero_only=True)
    ONE_TO_ALL = DispatchSpec("ONE_TO_ALL", "whole", by=_BY_RANK)
    ALL_TO_ALL = DispatchSpec("ALL_TO_ALL", "entries", _BY_RANK, by=_BY_RANK, tuples=False)
    MEGATRON_COMPUTE = DispatchSpec("MEGATRON_COMPUTE", "entries", _DP, _LAST_STAGE, _DP)
    MEGATRON_COMPUTE_PROTO = DispatchSpec("MEGATRON_COMPUTE_PROTO", "rows", _DP, _LAST_STAGE, _DP, result="concat")
    MEGATRON_PP_AS_DP = DispatchSpec("MEGATRON_PP_AS_DP", "entries", _CP_DP_PP, (("tp", 0),), _CP_DP_PP)
    MEGATRON_PP_AS_DP_PROTO = DispatchSpec(
        "MEGATRON_PP_AS_DP_PROTO", "rows", _CP_DP_PP, (("tp", 0),), _CP_DP_PP, result="concat"
    )
    MEGATRON_PP_ONLY = DispatchSpec("MEGATRON_PP_ONLY", "whole", collect=(("tp", 0), ("cp", 0), ("dp", 0)), by=("pp",))
    DP_COMPUTE = DispatchSpec("DP_COMPUTE", "entries", _BY_RANK, by=_BY_RANK)
    DP_COMPUTE_PROTO = DispatchSpec("DP_COMPUTE_PROTO", "rows", _BY_RANK, by=_BY_RANK, result="concat")
    DP_COMPUTE_PROTO_WITH_FUNC = DispatchSpec(
        "DP_COMPUTE_PROTO_WITH_FUNC", "rows", _BY_RANK, by=_BY_RANK, result="concat", leading_function=True
    )
    DP_COMPUTE_METRIC = DispatchSpec("DP_COMPUTE_METRIC", "rows", _BY_RANK, by=_BY_RANK)
    DIRECT_ROLLOUT_METHOD = DispatchSpec("DIRECT_ROLLOUT_METHOD", "whole", result="value", in_worker_only=True)

    def __init__(self) -> None:
        self.members = {name: mode for name, mode in vars(type(self)).items() if isinstance(mode, DispatchSpec)}

    def __getitem__(self, name: str) -> DispatchSpec:
        if name not in self.members:
            raise DispatchError(self._no_mode(name), name=name)
        return self.members[name]

    if not TYPE_CHECKING:  # a type checker reports names that the class does not have

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(self._no_mode(name))

    def _no_mode(self, name: object) -> str:
        close = difflib.get_close_matches(str(name).upper(), self.members, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(self.members)}."
        return f"Dispatch has no {name!r}; {hint} Dispatch.register({name!r}, mode) adds one"

    def __iter__(self) -> Iterator[DispatchSpec]:
        return iter(self.members.values())

    def __reduce__(self) -> str:
        return "Dispatch"  # pickled by its name, as a class is

    def register(self, name: str, mode: DispatchSpec) -> DispatchSpec:
        """Add a mode as ``Dispatch.<name>`` and return it.

        Raises:
            DispatchError: the name is taken or is not an identifier.
        """
        if not name.isidentifier() or hasattr(self, name):
            raise DispatchError(
                f"Dispatch cannot use the name {name!r}: it must be a new identifier, not one of "
                f"{', '.join(self.members)}",
                name=name,
            )
        self.members[name] = replace(mode, name=name)
        setattr(self, name, self.members[name])
        return self.members[name]

    def remove(self, name: str) -> None:
        """Remove a mode that was registered.

        Raises:
            DispatchError: there is no mode of this name, or it is built in.
        """
        self[name]
        if name not in vars(self):
            raise DispatchError(f"{name} is built in: only a mode that was registered can be removed", name=name)
        del self.members[name]
        delattr(self, name)

    @staticmethod
    def over(
        *axes: str,
        collect: Mapping[str, int] | None = None,
        result: ResultRule | None = None,
        arguments: Literal["rows", "entries"] = "rows",
        by: str | Collection[str] | None = None,
    ) -> DispatchSpec:
        """Return a mode that splits over ``axes`` and collects from the ranks at ``collect``.

        Args:
            axes: the axes to split over, first axis slowest: Megatron's dense ones (tp, cp, dp, pp), its expert ones
                (etp, ep, edp), or user-defined axes (``ParallelLayout(extra=...)``). Without axes,
                every rank gets the arguments as they are.
            collect: the index on each axis that a returning rank has; a negative index counts from the end.
            result: ``concat`` (default with axes), ``list`` (default without axes) or ``value``.
            arguments: ``rows`` splits the rows of DataProtos, ``entries`` takes lists with one entry per shard.
            by: the axes that the results are listed by; ``axes`` by default, or every rank without axes.

        Raises:
            DispatchError: an index or a rule is unknown. An axis that a topology does not have is reported by the call,
                as TopologyError.

        Examples:
            >>> Dispatch.over("dp", "cp", collect={"tp": 0, "pp": -1})
            >>> Dispatch.over("edp", "ep", collect={"etp": 0, "pp": -1}, result="list")
            >>> Dispatch.over(collect={"tp": 0, "dp": 0}, by="pp")
        """
        name = f"over({', '.join(map(str, axes))})"
        selected = {} if collect is None else collect
        if not isinstance(selected, Mapping) or not all(type(index) is int for index in selected.values()):
            raise DispatchError(
                f"mode {name}: collect is {collect!r}; expected the index on each axis, as {{'tp': 0, 'pp': -1}}",
                mode=name,
                collect=collect,
            )
        listed = (by,) if isinstance(by, str) else tuple(by) if by is not None else axes or (RANK,)
        rule: ArgumentRule = arguments if axes else "whole"
        shown: ResultRule = result or ("concat" if axes else "list")
        return DispatchSpec(name, rule, axes, tuple(selected.items()), listed, shown)


Dispatch = DispatchModes()
"""The dispatch modes: ``Dispatch.MEGATRON_COMPUTE_PROTO``, ``Dispatch["DP_COMPUTE"]``, ``list(Dispatch)``.

``Dispatch.over`` returns a custom mode; ``Dispatch.register(name, mode)`` adds one under a name and returns it. A type
checker does not know an added mode as an attribute: use the value that ``register`` returns.
"""


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> DispatchSpec:
    """Add ``Dispatch.<name>``, a mode that splits and collects with these functions, and return it.

    Args:
        dispatch_mode_name: the name.
        dispatch_fn: ``dispatch_fn(worker_group, *args, **kwargs)`` returns ``(args, kwargs)``, each value a list with
            one entry per rank.
        collect_fn: ``collect_fn(worker_group, outputs)`` returns the caller's result from the list of the outputs of
            all ranks.

    Raises:
        DispatchError: the name is taken or is not an identifier.
    """
    return Dispatch.register(dispatch_mode_name, mode_of_functions(dispatch_mode_name, dispatch_fn, collect_fn))


class Execute(Enum):
    """The execute modes: ``ALL`` runs the dispatch mode as it is.

    ``RANK_ZERO`` sends the arguments as they are to rank 0 alone and returns its value, whatever the dispatch mode.
    """

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


@dataclass(frozen=True)
class RowRule:
    """How the rows of DataProtos are split over the shards; the caller's batch and the result's order never change.

    Attributes:
        padding: ``spread`` repeats a row only for a shard that would otherwise have none, so that every rank takes
            part in collectives. ``repeat`` makes all shards equally long with repeated rows; ``zero_loss`` does the
            same with rows whose ``response_mask`` and ``loss_mask`` are 0. ``none`` adds no row. None is ``repeat``
            for a batch with ``auto_padding``, and otherwise ``spread``.
        balance: a column whose sum over each row is its length (``attention_mask``); every shard gets about the same
            number of tokens.
        group_by: a column of labels (a prompt's id); rows with the same label stay in one shard.
        within: a column of labels (the mini-batch of a row), one or several for each row; rows with the same labels
            are balanced over the shards by themselves.

    Raises:
        DispatchError: ``padding`` is unknown.
    """

    padding: Padding | None = None
    balance: str | None = None
    group_by: str | None = None
    within: str | None = None

    def __post_init__(self) -> None:
        if self.padding is not None and self.padding not in get_args(Padding):
            raise DispatchError(
                f"padding is {self.padding!r}; expected None or one of {', '.join(get_args(Padding))}",
                padding=self.padding,
            )


@dataclass(frozen=True, eq=False)
class Plan:
    """A mode on a topology: which shard each running rank gets, and which ranks return.

    Attributes:
        spec: the mode.
        topology: the topology that it is planned on.
        ranks: the ranks that run, in rank order.
        shards: for each of ``ranks``, the index of the shard that it gets (0 if nothing is split).
        shard_count: the number of shards.
        collected: the ranks that return, one per result, in the order of the results.
    """

    spec: DispatchSpec
    topology: Topology
    ranks: tuple[int, ...]
    shards: tuple[int, ...]
    shard_count: int
    collected: tuple[int, ...]

    def readers(self) -> list[list[int]]:
        """Return the ranks that get each shard, by shard."""
        readers: list[list[int]] = [[] for _ in range(self.shard_count)]
        for rank, shard in zip(self.ranks, self.shards, strict=True):
            readers[shard].append(rank)
        return readers

    def describe(self, max_rows: int = 32) -> str:
        """Return the plan as text: the rule, then for each shard the ranks that read it and those that return.

        Args:
            max_rows: the largest number of shards; those in the middle of a longer table are left out.
        """
        spec, returning = self.spec, set(self.collected)
        split = f"{spec.arguments} split over {' x '.join(spec.axes)}" if spec.axes else "arguments as they are"
        ranks = f"{len(self.ranks)} rank{'s' if len(self.ranks) > 1 else ''}"
        results = f"{len(self.collected)} of them return{'s' if len(self.collected) == 1 else ''} ({spec.result})"
        rows = [
            (str(shard), runs_text(readers), runs_text([rank for rank in readers if rank in returning]) or "none")
            for shard, readers in enumerate(self.readers())
        ]
        return f"{spec}: {split}; {ranks} run, {results}\n{table_text(('shard', 'ranks', 'returning'), rows, max_rows)}"


@lru_cache(maxsize=256)
def plan(spec: DispatchSpec, topology: Topology) -> Plan:
    """Plan a mode on a topology; equal calls return the cached plan.

    Args:
        spec: the mode.
        topology: the coordinates of every rank.

    Raises:
        TopologyError: the topology does not have an axis that the mode names.
        DispatchError: no rank would return a shard's result, or methods of the mode are never called through a group.
    """
    if spec.in_worker_only:
        raise DispatchError(
            f"methods of mode {spec} are called on the worker itself by the rollout engine, never through a group; "
            "register the method with another mode to dispatch it",
            mode=spec.name,
        )
    run = (0,) if spec.rank_zero_only else tuple(range(topology.world_size))
    shard_of = topology.shard_indices(spec.axes)
    shards = tuple(shard_of[rank] for rank in run)
    return Plan(spec, topology, run, shards, len({*shards}), _collected(spec, topology, run))


def _collected(spec: DispatchSpec, topology: Topology, run: tuple[int, ...]) -> tuple[int, ...]:
    """Return one rank for every result, in order: of the running ranks at ``collect``, the one nearest the origin."""
    result_of = topology.shard_indices(spec.by)
    selected = set(topology.select(**dict(spec.collect)))
    candidates: dict[int, list[int]] = {result_of[rank]: [] for rank in run}
    for rank in run:
        if rank in selected:
            candidates[result_of[rank]].append(rank)
    for result, ranks in candidates.items():
        if not ranks:
            of_result = [rank for rank in run if result_of[rank] == result]
            raise DispatchError(
                f"mode {spec} collects from {dict(spec.collect)}, but none of the ranks {runs_text(of_result)} has "
                f"these coordinates: no rank would return result {result}",
                mode=spec.name,
                collect=dict(spec.collect),
                ranks=tuple(of_result),
            )
    coordinates = list(zip(*topology.columns.values(), strict=True))
    return tuple(min(candidates[result], key=coordinates.__getitem__) for result in sorted(candidates))
