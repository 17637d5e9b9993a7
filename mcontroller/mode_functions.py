"""Dispatch modes as pairs of functions, the form of custom modes in many existing programs.

``dispatch_fn(worker_group, *args, **kwargs)`` returns ``(args, kwargs)``, each value a list with one entry per rank.
``collect_fn(worker_group, outputs)`` returns the caller's result from the list of every rank's output. The predefined
modes exist in this form too, for functions that build on them; calls with a predefined mode do not use these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mcontroller.dispatch.call import PreparedCall, dispatch
from mcontroller.dispatch.modes import Dispatch, DispatchSpec, ExecuteMode, Plan, RowRule, mode_of_functions, plan
from mcontroller.errors import DispatchError
from mcontroller.group import WorkerGroup

__all__ = [
    "DISPATCH_MODE_FN_REGISTRY",
    "collect_all_to_all",
    "collect_dp_compute",
    "collect_dp_compute_data_proto",
    "collect_megatron_compute",
    "collect_megatron_compute_data_proto",
    "collect_megatron_pp_as_dp",
    "collect_megatron_pp_as_dp_data_proto",
    "collect_megatron_pp_only",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_dp_compute_data_proto_with_func",
    "dispatch_megatron_compute",
    "dispatch_megatron_compute_data_proto",
    "dispatch_megatron_pp_as_dp",
    "dispatch_megatron_pp_as_dp_data_proto",
    "dispatch_one_to_all",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "register_dispatch_mode",
    "update_dispatch_mode",
]

Function = Callable[..., Any]
Spec = DispatchSpec[Any, Any]
ModeOrName = Spec | str
Group = WorkerGroup[Any]


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: Function, collect_fn: Function) -> Spec:
    """Add ``Dispatch.<name>`` with these functions and return it.

    Raises:
        DispatchError: the name is taken or is not an identifier.
    """
    mode = mode_of_functions(dispatch_mode_name, dispatch_fn, collect_fn)
    spec: Spec = Dispatch.register(dispatch_mode_name, mode)
    return spec


def update_dispatch_mode(dispatch_mode: ModeOrName, dispatch_fn: Function, collect_fn: Function) -> None:
    """Replace the functions of a mode, also for methods that were registered with it before.

    Raises:
        DispatchError: there is no mode of this name.
    """
    name = _spec(dispatch_mode).name
    Dispatch.members[name] = _mode_with(name, dispatch_fn, collect_fn)


def get_predefined_dispatch_fn(dispatch_mode: ModeOrName) -> dict[str, Function]:
    """Return the functions of a mode as ``{"dispatch_fn": ..., "collect_fn": ...}``.

    Those of a predefined mode split without padding, and collect from the returning ranks in shard order.

    Raises:
        DispatchError: there is no mode of this name.
    """
    spec = _spec(dispatch_mode)
    dispatch_fn, collect_fn = spec.functions or (_DispatchOf(spec), _CollectOf(spec))
    return {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


def get_predefined_execute_fn(execute_mode: ExecuteMode[bool]) -> dict[str, str]:
    """Return ``{"execute_fn_name": ...}``: the method of a group that runs this execute mode."""
    return {"execute_fn_name": "execute_rank_zero" if execute_mode.rank_zero_only else "execute_all"}


def collect_all_to_all(worker_group: Group, output: Any) -> Any:
    """Return the outputs as they are, by rank."""
    return output


def _spec(mode: ModeOrName) -> Spec:
    spec: Spec = Dispatch[mode] if isinstance(mode, str) else mode.current()
    return spec


@dataclass(frozen=True)
class _DispatchOf:
    """The ``dispatch_fn`` of a mode of the table."""

    spec: Spec

    def __call__(self, worker_group: Group, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = PreparedCall(worker_group, "dispatch_fn", _plan(self.spec, worker_group))
        call = dispatch(call, args, kwargs, RowRule(padding="none"), share=False)
        by_rank = call.arguments.values()
        lists = tuple([arguments.args[index] for arguments in by_rank] for index in range(len(args)))
        return lists, {name: [arguments.kwargs[name] for arguments in by_rank] for name in kwargs}


@dataclass(frozen=True)
class _CollectOf:
    """The ``collect_fn`` of a mode of the table."""

    spec: Spec

    def __call__(self, worker_group: Group, output: Sequence[Any]) -> Any:
        call = PreparedCall(worker_group, "collect_fn", _plan(self.spec, worker_group))
        return call.collect([output[rank] for rank in call.plan.collected])


def _mode_with(name: str, dispatch_fn: Function, collect_fn: Function) -> Spec:
    """Return the mode ``name`` with these functions; the mode of the table again if the functions are its own."""
    if isinstance(dispatch_fn, _DispatchOf) and collect_fn == _CollectOf(dispatch_fn.spec):
        return replace(dispatch_fn.spec, name=name)
    return mode_of_functions(name, dispatch_fn, collect_fn)


def _plan(spec: Spec, group: Group) -> Plan:
    return plan(spec, group.topology_for(spec))


class _UnknownMode(DispatchError, KeyError):
    """A mode that the registry does not have."""

    __str__ = Exception.__str__  # KeyError's would quote the message


class _Registry(MutableMapping[ModeOrName, Mapping[str, Function]]):
    """A view of ``Dispatch``: the functions of every mode; setting an entry updates or adds the mode.

    The entries of a copy can be set again: a mode of the table then is that row of the table, not a pair of functions.
    """

    def __getitem__(self, mode: ModeOrName) -> dict[str, Function]:
        if mode not in self:
            name = mode if isinstance(mode, str) else mode.name
            raise _UnknownMode(f"there is no dispatch mode {name!r}; the modes are {', '.join(Dispatch.names())}")
        return get_predefined_dispatch_fn(mode)

    def copy(self) -> dict[ModeOrName, Mapping[str, Function]]:
        """Return the functions of every mode in a dict of their own."""
        return dict(self)

    def __setitem__(self, mode: ModeOrName, functions: Mapping[str, Function]) -> None:
        name = mode if isinstance(mode, str) else mode.name
        if set(functions) != {"dispatch_fn", "collect_fn"}:
            raise DispatchError(
                f"mode {name} is set to {sorted(functions)}; expected dispatch_fn and collect_fn", mode=name
            )
        Dispatch.members[name] = _mode_with(name, **functions)

    def __delitem__(self, mode: ModeOrName) -> None:
        Dispatch.remove(mode if isinstance(mode, str) else mode.name)

    def __iter__(self) -> Iterator[Spec]:
        return iter(Dispatch)

    def __len__(self) -> int:
        return len(Dispatch)

    def __contains__(self, mode: object) -> bool:
        return (mode if isinstance(mode, str) else getattr(mode, "name", None)) in Dispatch.members


DISPATCH_MODE_FN_REGISTRY = _Registry()
"""The functions of every mode, by name or mode; setting an entry updates or adds the mode."""


# ---- the functions of the predefined modes by the names that ported modes build on -----------------------------------

dispatch_one_to_all = get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)["dispatch_fn"]
dispatch_all_to_all = get_predefined_dispatch_fn(Dispatch.ALL_TO_ALL)["dispatch_fn"]
dispatch_megatron_compute, collect_megatron_compute = get_predefined_dispatch_fn(Dispatch.MEGATRON_COMPUTE).values()
dispatch_megatron_compute_data_proto, collect_megatron_compute_data_proto = get_predefined_dispatch_fn(
    Dispatch.MEGATRON_COMPUTE_PROTO
).values()
dispatch_megatron_pp_as_dp, collect_megatron_pp_as_dp = get_predefined_dispatch_fn(Dispatch.MEGATRON_PP_AS_DP).values()
dispatch_megatron_pp_as_dp_data_proto, collect_megatron_pp_as_dp_data_proto = get_predefined_dispatch_fn(
    Dispatch.MEGATRON_PP_AS_DP_PROTO
).values()
collect_megatron_pp_only = get_predefined_dispatch_fn(Dispatch.MEGATRON_PP_ONLY)["collect_fn"]
dispatch_dp_compute, collect_dp_compute = get_predefined_dispatch_fn(Dispatch.DP_COMPUTE).values()
dispatch_dp_compute_data_proto, collect_dp_compute_data_proto = get_predefined_dispatch_fn(
    Dispatch.DP_COMPUTE_PROTO
).values()
dispatch_dp_compute_data_proto_with_func = get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)[
    "dispatch_fn"
]
