"""Dispatch modes as rows of one table, and the plan that a row and a topology give.

A mode says three things: what becomes of the arguments (as they are, rows split over axes, or one list entry each),
which ranks return, and what the caller gets. A plan says the same by rank. Both are pure: they need neither torch,
nor Ray, nor a process, and a plan is computed once for each mode and topology.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, NoReturn, get_args

from mcontroller.errors import DispatchError
from mcontroller.names import NamedMembers
from mcontroller.partition import Padding
from parallel_state.topology import Topology

__all__ = ["Dispatch", "DispatchSpec", "Execute", "ExecuteMode", "Plan", "RowRule", "plan"]

RANK = "rank"
"""The pseudo-axis on which every rank stands for itself, in rank order; every topology has it."""

ArgumentRule = Literal["whole", "rows", "entries"]
ResultRule = Literal["value", "list", "concat"]
Functions = tuple[Callable[..., Any], Callable[..., Any]]


@dataclass(frozen=True)
class DispatchSpec:
    """One row of the table of modes.

    arguments: ``whole`` (every rank gets them as they are), ``rows`` (the rows of every DataProto are split, all else
        goes to every shard) or ``entries`` (every argument is a list with one entry per shard).
    axes: the axes that are split over, first axis slowest; a shard is one combination of indices on them.
    collect: the index on each named axis that a returning rank has (negative counts from the end).
    by: the axes whose combinations index the results, first axis slowest; one rank returns for each of them. Of
        several candidates the one with the lowest indices on the axes that are not named returns.
    result: ``concat`` (one DataProto in the order of the input), ``list`` (in the order of ``by``) or ``value``.
    leading_function: whether the first positional argument is a function, which goes to every rank.
    rank_zero_only: whether no other rank runs.
    in_worker_only: whether the method cannot be called through a group at all.
    functions: a user's ``(dispatch_fn, collect_fn)``, which replace all of the above.
    """

    name: str
    arguments: ArgumentRule = "whole"
    axes: tuple[str, ...] = ()
    collect: tuple[tuple[str, int], ...] = ()
    by: tuple[str, ...] = ()
    result: ResultRule = "list"
    leading_function: bool = False
    rank_zero_only: bool = False
    in_worker_only: bool = False
    functions: Functions | None = None

    def __post_init__(self) -> None:
        for what, rule, rules in (("arguments", self.arguments, ArgumentRule), ("result", self.result, ResultRule)):
            if rule not in get_args(rules):
                raise DispatchError(
                    f"mode {self.name}: {what} is {rule!r}; expected one of {', '.join(get_args(rules))}",
                    mode=self.name,
                )
        for what, axes in (("axes", self.axes), ("by", self.by), ("collect", tuple(axis for axis, _ in self.collect))):
            if not all(isinstance(axis, str) for axis in axes):
                raise DispatchError(
                    f"mode {self.name}: {what} has {axes}; expected names of axes, each a text by itself",
                    mode=self.name,
                )
        if self.arguments != "whole" and not self.axes:
            raise DispatchError(f"mode {self.name} splits its arguments over no axis: name one", mode=self.name)
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

    def current(self) -> DispatchSpec:
        """What the mode of this name is now: the row itself, unless it has been updated by name."""
        return Dispatch.members.get(self.name, self)

    def __str__(self) -> str:
        return self.name


def mode_of_functions(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> DispatchSpec:
    """The mode whose splitting and collecting are a user's own functions; see ``mcontroller.mode_functions``."""
    return DispatchSpec(name, "entries", (RANK,), by=(RANK,), functions=(dispatch_fn, collect_fn))


def _undefined(name: str, *_: Any, **__: Any) -> NoReturn:
    raise DispatchError(f"mode {name} has a name and no functions: give it two with update_dispatch_mode", mode=name)


def _row(name: str, arguments: ArgumentRule, axes: str, collect: Mapping[str, int], by: str, **more: Any) -> Any:
    return DispatchSpec(name, arguments, tuple(axes.split()), tuple(collect.items()), tuple(by.split()), **more)


_LAST_STAGE = {"tp": 0, "cp": 0, "pp": -1}
_TABLE = (
    _row("RANK_ZERO", "whole", "", {}, "", result="value", rank_zero_only=True),
    _row("ONE_TO_ALL", "whole", "", {}, RANK),
    _row("ALL_TO_ALL", "entries", RANK, {}, RANK),
    _row("MEGATRON_COMPUTE", "entries", "dp", _LAST_STAGE, "dp"),
    _row("MEGATRON_COMPUTE_PROTO", "rows", "dp", _LAST_STAGE, "dp", result="concat"),
    _row("MEGATRON_PP_AS_DP", "entries", "cp dp pp", {"tp": 0}, "cp dp pp"),
    _row("MEGATRON_PP_AS_DP_PROTO", "rows", "cp dp pp", {"tp": 0}, "cp dp pp", result="concat"),
    _row("MEGATRON_PP_ONLY", "whole", "", {"tp": 0, "cp": 0, "dp": 0}, "pp"),
    _row("DP_COMPUTE", "entries", RANK, {}, RANK),
    _row("DP_COMPUTE_PROTO", "rows", RANK, {}, RANK, result="concat"),
    _row("DP_COMPUTE_PROTO_WITH_FUNC", "rows", RANK, {}, RANK, result="concat", leading_function=True),
    _row("DP_COMPUTE_METRIC", "rows", RANK, {}, RANK),
    _row("DIRECT_ROLLOUT_METHOD", "whole", "", {}, "", result="value", in_worker_only=True),
)


class Dispatch(metaclass=NamedMembers):
    """The dispatch modes, each a ``DispatchSpec``: ``Dispatch.MEGATRON_COMPUTE_PROTO``, ``Dispatch["DP_COMPUTE"]``.

    ``Dispatch.over`` makes a mode of one's own; ``Dispatch.register(name, mode)`` gives it a name.
    """

    members: ClassVar[dict[str, DispatchSpec]] = {spec.name: spec for spec in _TABLE}

    @staticmethod
    def new_member(name: str, member: DispatchSpec | None) -> DispatchSpec:
        undefined = partial(_undefined, name)
        return mode_of_functions(name, undefined, undefined) if member is None else replace(member, name=name)

    @staticmethod
    def over(
        *axes: str,
        collect: Mapping[str, int] | None = None,
        result: ResultRule | None = None,
        arguments: Literal["rows", "entries"] = "rows",
        by: str | Collection[str] | None = None,
    ) -> DispatchSpec:
        """A mode that splits over ``axes``, first axis slowest, and collects from the ranks at ``collect``.

        The axes may be Megatron's, expert ones or those of the layout's own naming. Without axes every rank gets the
        arguments as they are, and ``by`` says which axes the results are listed by (every rank where it is None).
        ``result`` is ``concat`` unless given, without axes ``list``.

        >>> Dispatch.over("dp", "cp", collect={"tp": 0, "pp": -1})
        >>> Dispatch.over("edp", "ep", collect={"etp": 0, "pp": -1}, result="list")
        >>> Dispatch.over(collect={"tp": 0, "dp": 0}, by="pp")

        Raises DispatchError for what is no axis, index or rule; an axis that a topology lacks is told by the call.
        """
        name = f"over({', '.join(map(str, axes))})"
        wanted = {} if collect is None else collect
        if not isinstance(wanted, Mapping) or not all(type(index) is int for index in wanted.values()):
            raise DispatchError(
                f"mode {name}: collect is {collect!r}; expected the index on each axis, as {{'tp': 0, 'pp': -1}}",
                mode=name,
                collect=collect,
            )
        listed = (by,) if isinstance(by, str) else tuple(by) if by is not None else axes or (RANK,)
        rule: ArgumentRule = arguments if axes else "whole"
        shown: ResultRule = result or ("concat" if axes else "list")
        return DispatchSpec(name, rule, axes, tuple(wanted.items()), listed, shown)


@dataclass(frozen=True)
class ExecuteMode:
    """Which ranks run: those of the dispatch mode, or rank 0 alone, with the arguments as they are."""

    name: str
    rank_zero_only: bool = False


class Execute(metaclass=NamedMembers):
    """The execute modes by name: ``ALL`` runs the dispatch mode as it is.

    ``RANK_ZERO`` hands the arguments as they are to rank 0 alone and gives its value, whatever the dispatch mode.
    """

    members: ClassVar[dict[str, ExecuteMode]] = {
        "ALL": ExecuteMode("ALL"),
        "RANK_ZERO": ExecuteMode("RANK_ZERO", rank_zero_only=True),
    }

    @staticmethod
    def new_member(name: str, member: ExecuteMode | None) -> ExecuteMode:
        return ExecuteMode(name) if member is None else replace(member, name=name)


@dataclass(frozen=True)
class RowRule:
    """How the rows of DataProtos are split over the shards; the caller's batch and the result's order never change.

    padding: None or ``spread`` repeats a row for a shard that would have none, so that no rank is missing from a
        collective computation, and adds nothing else; ``repeat`` makes all shards equally long with repeated rows;
        ``zero_loss`` does so with rows whose ``response_mask`` and ``loss_mask`` are 0; ``none`` adds no row.
    balance: a column whose sum over each row is its length (``attention_mask``): every shard gets about as many tokens.
    group_by: a non-tensor column of labels (a prompt's id): rows of one label stay in one shard.
    """

    padding: Padding | None = None
    balance: str | None = None
    group_by: str | None = None

    def __post_init__(self) -> None:
        if self.padding is not None and self.padding not in get_args(Padding):
            raise DispatchError(
                f"padding is {self.padding!r}; expected None or one of {', '.join(get_args(Padding))}",
                padding=self.padding,
            )
        for what, column in (("balance", self.balance), ("group_by", self.group_by)):
            if column is not None and not isinstance(column, str):
                raise DispatchError(f"{what} is {column!r}; expected None or the name of a column", column=column)


@dataclass(frozen=True, eq=False)
class Plan:
    """A mode on a topology: which shard each running rank gets, and which ranks return, in the order of the results.

    ``ranks`` run, in rank order; ``shards`` says, for each of them, which of the ``shard_count`` shards it gets (0
    where nothing is split); ``collected`` are the ranks that return, one per result.
    """

    spec: DispatchSpec
    topology: Topology
    ranks: tuple[int, ...]
    shards: tuple[int, ...]
    shard_count: int
    collected: tuple[int, ...]

    def readers(self) -> list[list[int]]:
        """The ranks that get each shard."""
        readers: list[list[int]] = [[] for _ in range(self.shard_count)]
        for rank, shard in zip(self.ranks, self.shards, strict=True):
            readers[shard].append(rank)
        return readers

    def describe(self) -> str:
        """The plan for people: the rule on the first line, then shard by shard who reads and who returns."""
        split = f"split over {' x '.join(self.spec.axes)}" if self.spec.axes else "arguments as they are"
        lines = [f"{self.spec}: {len(self.ranks)} ranks, {split}, {len(self.collected)} return ({self.spec.result})"]
        returning = set(self.collected)
        for shard, ranks in enumerate(self.readers()):
            marked = " ".join(f"{rank}*" if rank in returning else str(rank) for rank in ranks)
            lines.append(f"  shard {shard}: ranks {marked}")
        return "\n".join([*lines, "  * returns its result"])


def plan(spec: DispatchSpec, topology: Topology, ranks: Collection[int] | None = None) -> Plan:
    """The plan of a mode on a topology, from a cache where it was made before.

    ``ranks`` restricts the call to some of the ranks: the shards of the others are left out, and the arguments are
    split over those that remain. Raises TopologyError for an axis that the topology does not have, DispatchError
    where a shard would not be collected from any rank, or where ``ranks`` names ranks that do not exist.
    """
    return _plan(spec, topology, None if ranks is None else tuple(sorted(ranks)))


@lru_cache(maxsize=256)
def _plan(spec: DispatchSpec, topology: Topology, ranks: tuple[int, ...] | None) -> Plan:
    run = (0,) if spec.rank_zero_only else tuple(range(topology.world_size)) if ranks is None else ranks
    _check_ranks(spec, topology, run, ranks)
    of_rank = topology.shard_indices(spec.axes)
    position = {shard: index for index, shard in enumerate(sorted({of_rank[rank] for rank in run}))}
    shards = tuple(position[of_rank[rank]] for rank in run)
    return Plan(spec, topology, run, shards, len(position), _collected(spec, topology, run))


def _collected(spec: DispatchSpec, topology: Topology, run: tuple[int, ...]) -> tuple[int, ...]:
    """For every result, in order: of the running ranks that ``collect`` selects, the one nearest the origin."""
    slot_of = topology.shard_indices(spec.by)
    selected = set(topology.select(**dict(spec.collect)))
    candidates: dict[int, list[int]] = {slot_of[rank]: [] for rank in run}
    for rank in run:
        if rank in selected:
            candidates[slot_of[rank]].append(rank)
    for slot, ranks in candidates.items():
        if not ranks:
            waiting = [rank for rank in run if slot_of[rank] == slot]
            raise DispatchError(
                f"mode {spec} collects from {dict(spec.collect) or 'every rank'}, and none of the running ranks "
                f"{_some(waiting)} stands there: result {slot} would come from nobody",
                mode=spec.name,
                collect=dict(spec.collect),
                ranks=tuple(waiting),
            )
    return tuple(_nearest_origin(topology, [candidates[slot] for slot in sorted(candidates)]))


def _nearest_origin(topology: Topology, choices: list[list[int]]) -> list[int]:
    if all(len(ranks) == 1 for ranks in choices):
        return [ranks[0] for ranks in choices]
    places = list(zip(*topology.columns.values(), strict=True))
    return [min(ranks, key=places.__getitem__) for ranks in choices]


def _check_ranks(spec: DispatchSpec, topology: Topology, run: tuple[int, ...], ranks: tuple[int, ...] | None) -> None:
    if ranks is None:
        return
    world = topology.world_size
    wrong = [rank for rank in ranks if type(rank) is not int or not 0 <= rank < world]
    if wrong or not ranks or len(set(ranks)) != len(ranks) or run != ranks:
        raise DispatchError(
            f"mode {spec} cannot run on ranks {_some(list(ranks))} of {world}: name existing ranks, each once"
            + (", and rank 0 alone for this mode" if spec.rank_zero_only else ""),
            mode=spec.name,
            ranks=ranks,
            world_size=world,
        )


def _some(ranks: list[int]) -> str:
    return str(ranks if len(ranks) <= 8 else [*ranks[:7], "..."]).replace("'", "")
