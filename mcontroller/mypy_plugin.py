"""A mypy plugin that knows the methods of a group: ``plugins = ["mcontroller.mypy_plugin"]``.

A group has the registered methods of its worker class, which Python's typing cannot express. With the plugin,
``group.compute_values`` has the parameters of ``CriticWorker.compute_values``, changed as its dispatch mode changes
them, and the collected result. Methods that do not exist or are not registered are errors, and
``mock_worker_group(Worker, layout, ...)`` takes the arguments of ``Worker.__init__``. docs/typing.md has the details.

How it works: ``register(...)`` returns ``Registering[arguments, result, blocking]``, with the literals of the mode.
When mypy applies it to a method, the plugin stores them in the metadata of the class, which mypy keeps in its cache.
``WorkerGroup[W].__getattr__`` reads them for W.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mypy.checker import TypeChecker
from mypy.errorcodes import ATTR_DEFINED
from mypy.maptype import map_instance_to_supertype
from mypy.nodes import ARG_NAMED, ARG_NAMED_OPT, ARG_OPT, ARG_POS, ARG_STAR, ARG_STAR2, Decorator, TypeInfo, Var
from mypy.plugin import AttributeContext, FunctionContext, FunctionSigContext, MethodContext, MethodSigContext, Plugin
from mypy.types import (
    AnyType,
    CallableType,
    FunctionLike,
    Instance,
    LiteralType,
    Parameters,
    Type,
    TypeOfAny,
    get_proper_type,
)

DISPATCH = "mcontroller.dispatch"
REGISTER = f"{DISPATCH}.registration.register"
REGISTERING = f"{DISPATCH}.registration.Registering"
OVER = f"{DISPATCH}.modes.Dispatch.over"
RAY_GROUP = "mcontroller.ray.worker_group.RayWorkerGroup"
GROUP = "mcontroller.group.WorkerGroup"
GROUP_METHOD = "mcontroller.group.GroupMethod"
MOCK_GROUP = "mcontroller.testing.mocked_groups.mock_worker_group"
MOCK_FIXTURE = "mcontroller.testing.pytest_plugin.MockGroup.__call__"
CLASS_WITH_INIT_ARGS = "mcontroller.worker.ClassWithInitArgs"
SEVERAL_ROLES = "mcontroller.ray.class_with_init.Roles"
FUTURE = "mcontroller.transport.Future"
PROTO = "mcontroller.data.batch.DataProto"
KEY = "mcontroller"
"""The key of this plugin in the metadata of a class."""


@dataclass(frozen=True)
class Rules:
    """How a method is registered, as far as mypy knows; a rule that it does not know is None."""

    arguments: str | None
    result: str | None
    blocking: bool | None


class ControllerPlugin(Plugin):
    """The hooks of this plugin; see the module's docstring."""

    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], Type] | None:
        """Set the type parameters of ``register(...)``."""
        return _register if fullname == REGISTER else None

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        """Record a registered method; set the type parameters of ``Dispatch.over(...)`` and of spawned groups."""
        if fullname.endswith(".spawn"):
            return _spawn  # the class in ``fullname`` is that of the object, which may be any kind of RayWorkerGroup
        return {f"{REGISTERING}.__call__": _record, OVER: _over}.get(fullname)

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        """Resolve ``group.method``."""
        owner, _, name = fullname.rpartition(".")
        return (lambda context: _group_method(context, name)) if owner == GROUP else None

    def get_function_signature_hook(self, fullname: str) -> Callable[[FunctionSigContext], FunctionLike] | None:
        """Add the parameters of a worker's ``__init__`` to the parameters of ``mock_worker_group``."""
        return _mock_signature if fullname == MOCK_GROUP else None

    def get_method_signature_hook(self, fullname: str) -> Callable[[MethodSigContext], FunctionLike] | None:
        """Add the parameters of a worker's ``__init__`` to the parameters of the fixture ``mock_group``."""
        return _mock_signature if fullname == MOCK_FIXTURE else None


def plugin(version: str) -> type[Plugin]:
    """Return the plugin; mypy calls this."""
    return ControllerPlugin


# ---- registration --------------------------------------------------------------------------------------------------


def _register(context: FunctionContext) -> Type:
    result = get_proper_type(context.default_return_type)
    if not isinstance(result, Instance):
        return result
    mode, execute = _argument(context, 0), _argument(context, 1)
    arguments, shown = _parameters(mode, 2) if _is_passed(context, 0) else _literals(context, "entries", "list")
    if _literal(_parameters(execute, 1)[0]) is True:
        arguments, shown = _literals(context, "whole", "value")
    blocking = _argument(context, 2) if _is_passed(context, 2) else _bool(context, True)
    return result.copy_modified(args=[arguments, shown, blocking or AnyType(TypeOfAny.special_form)])


def _over(context: MethodContext) -> Type:
    """Set the rules; by default ``rows`` and ``concat`` with axes, ``whole`` and ``list`` without."""
    spec = get_proper_type(context.default_return_type)
    if not isinstance(spec, Instance):
        return spec
    with_axes = bool(context.args[0])
    default = _literals(context, "rows", "concat") if with_axes else _literals(context, "whole", "list")
    passed = {name: types[0] for name, types in zip(context.callee_arg_names, context.arg_types, strict=True) if types}
    arguments = passed.get("arguments", default[0]) if with_axes else default[0]
    return spec.copy_modified(args=[arguments, passed.get("result", default[1])])


def _record(context: MethodContext) -> Type:
    """Store how a method is registered in the metadata of its class."""
    registering, decorated = get_proper_type(context.type), context.context
    if isinstance(registering, Instance) and isinstance(decorated, Decorator) and decorated.func.info:
        arguments, result, blocking = (_literal(each) for each in registering.args)
        methods = decorated.func.info.metadata.setdefault(KEY, {})
        methods[decorated.func.name] = [arguments, result, blocking]
    return context.default_return_type


def _spawn(context: MethodContext) -> Type:
    """Set the worker class of the groups of single roles to Any: it is known at run time only."""
    spawned, group = get_proper_type(context.default_return_type), get_proper_type(context.type)
    if not isinstance(spawned, Instance) or not isinstance(group, Instance) or not group.type.has_base(RAY_GROUP):
        return spawned
    role = group.copy_modified(args=[AnyType(TypeOfAny.special_form) for _ in group.args])
    return spawned.copy_modified(args=[spawned.args[0], role])


# ---- group.method --------------------------------------------------------------------------------------------------


def _group_method(context: AttributeContext, name: str) -> Type:
    default = context.default_attr_type
    group = get_proper_type(context.type)
    checker = context.api
    if not isinstance(group, Instance) or not isinstance(checker, TypeChecker) or group.type.get(name):
        return default  # a member of the group's class has its declared type
    base = next(info for info in group.type.mro if info.fullname == GROUP)
    worker = get_proper_type(map_instance_to_supertype(group, base).args[0])
    if not isinstance(worker, Instance):
        return default
    if worker.type.fullname == SEVERAL_ROLES:
        return AnyType(TypeOfAny.special_form)  # a role of a fused group, known at run time only
    worker = _owner(worker, name)
    symbol = worker.type.get(name)
    if symbol is None:
        return _no_method(context, checker, worker.type, name)
    method = get_proper_type(checker.expr_checker.analyze_external_member_access(name, worker, context.context))
    rules = _rules(worker.type, name)
    if rules is None:
        undecided = isinstance(method, AnyType) or isinstance(symbol.node, Decorator) or checker.current_node_deferred
        return default if undecided else _not_registered(context, worker.type, name)
    return _typed(checker, method, rules) or default


def _no_method(context: AttributeContext, checker: TypeChecker, worker: TypeInfo, name: str) -> Type:
    if worker.fallback_to_any or checker.current_node_deferred:
        return context.default_attr_type
    owners = (worker, *(component.type for component in _components(worker)))
    names = sorted({method for owner in owners for base in owner.mro for method in base.metadata.get(KEY, {})})
    close = difflib.get_close_matches(name, names, n=1)
    hint = f'; did you mean "{close[0]}"?' if close else f"; it has {', '.join(names)}" if names else ""
    context.api.fail(f'The group of {worker.name} has no method "{name}"{hint}', context.context, code=ATTR_DEFINED)
    return AnyType(TypeOfAny.from_error)


def _components(worker: TypeInfo) -> Iterator[Instance]:
    """The types of the attributes that a worker class declares and whose classes have registered methods."""
    for symbol in (symbol for base in worker.mro for symbol in base.names.values()):
        declared = get_proper_type(symbol.node.type) if isinstance(symbol.node, Var) else None
        if isinstance(declared, Instance) and any(KEY in base.metadata for base in declared.type.mro):
            yield declared


def _owner(worker: Instance, name: str) -> Instance:
    """Return the type that has a method: the worker, or else one of its components."""
    if worker.type.get(name) is not None:
        return worker
    return next((each for each in _components(worker.type) if _rules(each.type, name) is not None), worker)


def _not_registered(context: AttributeContext, worker: TypeInfo, name: str) -> Type:
    context.api.fail(
        f"{worker.name}.{name} cannot be called through a group: decorate it with @register(...), or call it on every "
        "rank with execute_all",
        context.context,
        code=ATTR_DEFINED,
    )
    return AnyType(TypeOfAny.from_error)


def _rules(worker: TypeInfo, name: str) -> Rules | None:
    """Return the rules of a method, its own or the overridden method's; None if it is not registered."""
    for base in worker.mro:
        registered = base.metadata.get(KEY, {}).get(name)
        if registered is not None:
            return Rules(*registered)
    return None


def _typed(checker: TypeChecker, method: Type, rules: Rules) -> Type | None:
    """Return ``GroupMethod[P, result, future]`` of a bound method; None if its signature is generic or unknown."""
    if not isinstance(method, CallableType) or method.variables or rules.arguments is None or rules.result is None:
        return None
    types = [_accepted(checker, each, rules.arguments) for each in method.arg_types]
    names = [
        None if kind in (ARG_STAR, ARG_STAR2) else name
        for name, kind in zip(method.arg_names, method.arg_kinds, strict=True)
    ]
    parameters = Parameters(types, method.arg_kinds, names)
    value = _awaited(method.ret_type)
    result: Type
    if rules.result == "concat":
        result = future = _instance(checker, PROTO)
    else:
        result = _instance(checker, "builtins.list", value) if rules.result == "list" else value
        future = _instance(checker, FUTURE, result)
    returned = {True: result, False: future, None: AnyType(TypeOfAny.special_form)}[rules.blocking]
    return _instance(checker, GROUP_METHOD, parameters, returned, future)


def _accepted(checker: TypeChecker, annotated: Type, rule: str) -> Type:
    """Return the type that a group accepts for an argument of a worker's method with the type ``annotated``."""
    return _instance(checker, "typing.Sequence", annotated) if rule == "entries" else annotated


def _awaited(returned: Type) -> Type:
    """Return the type of the awaited value of an async method, and the type of other values unchanged."""
    proper = get_proper_type(returned)
    if isinstance(proper, Instance) and proper.type.fullname == "typing.Coroutine":
        return proper.args[2]
    return returned


# ---- mock_worker_group ---------------------------------------------------------------------------------------------


def _mock_signature(context: FunctionSigContext | MethodSigContext) -> FunctionLike:
    """Return ``(worker, layout, <parameters of the worker's __init__>, *, name, failures, timeout)``."""
    signature = context.default_signature
    checker = context.api
    if not isinstance(signature, CallableType) or not isinstance(checker, TypeChecker) or not context.args[0]:
        return signature
    worker = get_proper_type(checker.get_expression_type(context.args[0][0]))
    if isinstance(worker, Instance) and worker.type.has_base(CLASS_WITH_INIT_ARGS):
        return _replaced(signature, [])
    if not isinstance(worker, CallableType) or not worker.is_type_obj() or worker.variables:
        return signature
    own = {name for name in signature.arg_names if name is not None}
    taken = zip(worker.arg_types, worker.arg_kinds, worker.arg_names, strict=True)
    return _replaced(signature, [each for each in taken if each[2] not in own or each[1] in (ARG_STAR, ARG_STAR2)])


def _replaced(signature: CallableType, taken: list[tuple[Type, Any, str | None]]) -> CallableType:
    """Return the signature with these parameters in place of ``*args`` and ``**kwargs``."""
    own = list(zip(signature.arg_types, signature.arg_kinds, signature.arg_names, strict=True))
    first = [each for each in own if each[1] == ARG_POS]
    named = [each for each in own if each[1] in (ARG_NAMED, ARG_NAMED_OPT)]
    positional = [each for each in taken if each[1] in (ARG_POS, ARG_OPT, ARG_STAR)]
    keywords = [each for each in taken if each[1] in (ARG_NAMED, ARG_NAMED_OPT)]
    rest = [each for each in taken if each[1] == ARG_STAR2]
    types, kinds, names = zip(*first, *positional, *named, *keywords, *rest, strict=True)
    return signature.copy_modified(arg_types=list(types), arg_kinds=list(kinds), arg_names=list(names))


# ---- types ---------------------------------------------------------------------------------------------------------


def _is_passed(context: FunctionContext, index: int) -> bool:
    return bool(context.arg_types[index])


def _argument(context: FunctionContext, index: int) -> Type | None:
    return context.arg_types[index][0] if _is_passed(context, index) else None


def _parameters(spec: Type | None, count: int) -> list[Type]:
    """Return the type parameters of a mode; Any for other values, such as a dict of functions."""
    proper = get_proper_type(spec) if spec is not None else None
    if (
        isinstance(proper, Instance)
        and proper.type.fullname.startswith(f"{DISPATCH}.modes.")
        and len(proper.args) == count
    ):
        return list(proper.args)
    return [AnyType(TypeOfAny.special_form)] * count


def _literals(context: FunctionContext | MethodContext, *values: str) -> list[Type]:
    text = context.api.named_generic_type("builtins.str", [])
    return [LiteralType(value, text) for value in values]


def _bool(context: FunctionContext, value: bool) -> Type:
    return LiteralType(value, context.api.named_generic_type("builtins.bool", []))


def _literal(annotated: Type) -> Any:
    """Return the value of a literal type; None for other types."""
    proper = get_proper_type(annotated)
    if isinstance(proper, Instance) and proper.last_known_value is not None:
        proper = proper.last_known_value
    return proper.value if isinstance(proper, LiteralType) else None


def _instance(checker: TypeChecker, fullname: str, *args: Type) -> Instance:
    module, _, name = fullname.rpartition(".")
    info = checker.modules[module].names[name].node
    assert isinstance(info, TypeInfo), fullname
    return Instance(info, list(args))
