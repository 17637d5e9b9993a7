"""Dispatch modes as pairs of functions, the form of custom modes in many existing programs.

``dispatch_fn(worker_group, *args, **kwargs)`` returns ``(args, kwargs)``, each value a list with one entry per rank.
``collect_fn(worker_group, outputs)`` returns the caller's result from the list of every rank's output. The predefined
modes exist in this form too, for functions that build on them; calls with a predefined mode do not use these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from mcontroller.dispatch.arguments import dispatch
from mcontroller.dispatch.modes import Dispatch, DispatchSpec, ExecuteMode, Plan, RowRule, mode_of_functions, plan
from mcontroller.dispatch.prepared_call import PreparedCall
from mcontroller.errors import DispatchError
from mcontroller.group import WorkerGroup

__all__ = [
    "DISPATCH_MODE_FN_REGISTRY",
    "collect_all_to_all",
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
    Dispatch.members[name] = mode_of_functions(name, dispatch_fn, collect_fn)


def get_predefined_dispatch_fn(dispatch_mode: ModeOrName) -> dict[str, Function]:
    """Return the functions of a mode as ``{"dispatch_fn": ..., "collect_fn": ...}``.

    Those of a predefined mode split without padding, and collect from the returning ranks in shard order.

    Raises:
        DispatchError: there is no mode of this name.
    """
    spec = _spec(dispatch_mode)
    dispatch_fn, collect_fn = spec.functions or _functions_of(spec)
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


def _functions_of(spec: Spec) -> tuple[Function, Function]:
    def dispatch_fn(worker_group: Group, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = PreparedCall(worker_group, "dispatch_fn", _plan(spec, worker_group))
        call = dispatch(call, args, kwargs, RowRule(padding="none"), share=False)
        by_rank = call.arguments.values()
        lists = tuple([arguments.args[index] for arguments in by_rank] for index in range(len(args)))
        return lists, {name: [arguments.kwargs[name] for arguments in by_rank] for name in kwargs}

    def collect_fn(worker_group: Group, output: Sequence[Any]) -> Any:
        call = PreparedCall(worker_group, "collect_fn", _plan(spec, worker_group))
        return call.collect([output[rank] for rank in call.plan.collected])

    return dispatch_fn, collect_fn


def _plan(spec: Spec, group: Group) -> Plan:
    return plan(spec, group.topology_for(spec))


class _Registry(MutableMapping[ModeOrName, Mapping[str, Function]]):
    """A view of ``Dispatch``: the functions of every mode; setting an entry updates or adds the mode."""

    def __getitem__(self, mode: ModeOrName) -> dict[str, Function]:
        return get_predefined_dispatch_fn(mode)

    def __setitem__(self, mode: ModeOrName, functions: Mapping[str, Function]) -> None:
        name = mode if isinstance(mode, str) else mode.name
        if set(functions) != {"dispatch_fn", "collect_fn"}:
            raise DispatchError(
                f"mode {name} is set to {sorted(functions)}; expected dispatch_fn and collect_fn", mode=name
            )
        Dispatch.members[name] = mode_of_functions(name, **functions)

    def __delitem__(self, mode: ModeOrName) -> None:
        Dispatch.remove(_spec(mode).name)

    def __iter__(self) -> Iterator[Spec]:
        return iter(Dispatch)

    def __len__(self) -> int:
        return len(Dispatch)

    def __contains__(self, mode: object) -> bool:
        return mode in Dispatch


DISPATCH_MODE_FN_REGISTRY: MutableMapping[ModeOrName, Mapping[str, Function]] = _Registry()
"""The functions of every mode, by name or mode; setting an entry updates or adds the mode."""
