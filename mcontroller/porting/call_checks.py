"""What is different in registered methods and in the calls of a driver: modes, futures, errors, pools and groups."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from mcontroller.porting.rules import PortCheck, PortContext, PortFinding, attribute_of, dotted, finding, keyword_of

__all__ = ["CALL_CHECKS", "is_unawaited"]

GROUP_ARGUMENTS = {
    "ray_wait_register_center_timeout": "start_timeout=seconds",
    "device_name": "RayResourcePool(..., use_gpu=True or False)",
    "worker_handles": "from_detached(name_prefix)",
    "default_megatron_kwargs": "the arguments of the worker class, in RayClassWithInitArgs",
    "profile_steps": "RayClassWithInitArgs(...).update_options({'runtime_env': {'nsight': ...}})",
    "worker_nsight_options": "RayClassWithInitArgs(...).update_options({'runtime_env': {'nsight': ...}})",
}
WORKER_ERRORS = frozenset(
    {"AssertionError", "NotImplementedError", "RuntimeError", "ValueError", "KeyError", "TypeError"}
)


def is_unawaited(call: ast.AST) -> bool:
    """Return whether a call of a group returns before its result has arrived."""
    name = attribute_of(call)
    return name.startswith(("execute_all", "execute_rank_zero")) and not name.endswith("_sync")


def check_modes(node: ast.AST, context: PortContext) -> Iterator[PortFinding]:
    """Find modes whose results have another order or number here."""
    name = dotted(node) if isinstance(node, ast.Attribute) else ""
    if name.endswith(("Dispatch.MEGATRON_PP_AS_DP", "Dispatch.MEGATRON_PP_AS_DP_PROTO")):
        yield finding(node, "stages-as-shards", f"{name}, whose results are in the order of the rows that were sent")
    elif name.endswith("Dispatch.MEGATRON_PP_ONLY"):
        yield finding(
            node, "one-per-stage", f"{name}, or Dispatch.over(collect={{'tp': 0, 'dp': 0}}) for every cp rank"
        )


def check_registration(node: ast.AST, context: PortContext) -> Iterator[PortFinding]:
    """Find registered methods that get other arguments here."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        if call is None or attribute_of(call) != "register":
            continue
        mode = keyword_of(call, "dispatch_mode") or (call.args[0] if call.args else None)
        execute = keyword_of(call, "execute_mode") or (call.args[1] if len(call.args) > 1 else None)
        named = dotted(mode)
        if named.endswith("DIRECT_ROLLOUT_METHOD"):
            advice = "another mode and a call through the group; the rollout engine calls it on the worker itself"
            yield finding(call, "direct-rollout", advice)
        elif dotted(execute).endswith("RANK_ZERO"):
            if not named.endswith("ALL_TO_ALL") and mode is not None:
                yield finding(call, "rank-zero-arguments", "use the arguments themselves, not their first entries")
        elif (mode is None or named.endswith("ALL_TO_ALL")) and len(node.args.args) > 1:
            replacement = "@register(dispatch_mode=Dispatch.ONE_TO_ALL), unless every call passes lists by rank"
            yield finding(call, "default-mode", replacement)


def check_mode_names(node: ast.AST, context: PortContext) -> Iterator[PortFinding]:
    """Find names of modes that are looked up in upper case elsewhere."""
    if not isinstance(node, ast.Call) or not node.args:
        return
    adds = attribute_of(node) == "register_dispatch_mode" or dotted(node.func).endswith("Dispatch.register")
    name = node.args[0]
    if adds and isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value != name.value.upper():
        yield finding(node, "mode-name", ast.unparse(node).replace(name.value, name.value.upper(), 1))


def check_futures(node: ast.AST, context: PortContext) -> Iterator[PortFinding]:
    """Find results that are waited for with Ray's functions."""
    if not (isinstance(node, ast.Call) and dotted(node.func) in ("ray.get", "ray.wait") and node.args):
        return
    waited = node.args[0]
    if is_unawaited(waited) or dotted(waited) in context.calls:
        method = "get" if dotted(node.func) == "ray.get" else "wait"
        yield finding(node, "futures", f"{ast.unparse(waited)}.{method}()")


def check_registrations_as_dicts(node: ast.AST, context: PortContext) -> Iterator[PortFinding]:
    """Find entries of the attribute that ``register`` sets."""
    if isinstance(node, ast.Subscript) and "MAGIC_ATTR" in ast.unparse(node.value):
        key = str(node.slice.value) if isinstance(node.slice, ast.Constant) else "dispatch_mode"
        yield finding(node, "registration", f"{ast.unparse(node.value)}.{key}")


def check_errors(node: ast.AST, context: PortContext) -> Iterator[PortFinding]:
    """Find handlers of exceptions that calls of a group do not raise."""
    if not isinstance(node, ast.Try):
        return
    calls = any(_is_group_call(inner) for statement in node.body for inner in ast.walk(statement))
    for handler in node.handlers:
        caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        names = {dotted(each).rpartition(".")[2] for each in caught}
        of_ray = names & {"RayTaskError", "RayActorError", "ActorDiedError", "GetTimeoutError"}
        if of_ray or (calls and names & WORKER_ERRORS):
            advice = "except WorkerError, WorkerDied, CallTimeout; then start the group again"
            yield finding(handler, "errors", advice)


def _is_group_call(node: ast.AST) -> bool:
    """Return whether a call looks like one of a group: ``execute_*``, or a method of a name that ends so."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner = dotted(node.func.value).rpartition(".")[2]
    return node.func.attr.startswith("execute_") or owner.endswith(("wg", "group"))


def check_pools_and_groups(node: ast.AST, context: PortContext) -> Iterator[PortFinding]:
    """Find pools with the default number of slots, and arguments that groups do not take."""
    name = attribute_of(node)
    if not isinstance(node, ast.Call):
        return
    if name == "RayResourcePool" and keyword_of(node, "max_colocate_count") is None and len(node.args) < 4:
        yield finding(node, "colocate-count", "RayResourcePool(..., max_colocate_count=<groups that share the pool>)")
    if name.endswith("WorkerGroup"):
        for keyword in node.keywords:
            if keyword.arg in GROUP_ARGUMENTS:
                yield finding(keyword.value, "group-arguments", GROUP_ARGUMENTS[keyword.arg])
        if len(node.args) > 2:
            yield finding(node, "group-arguments", f"{name}(pool, ray_cls_with_init, name_prefix=...)")


CALL_CHECKS: tuple[PortCheck, ...] = (
    check_modes,
    check_registration,
    check_mode_names,
    check_futures,
    check_registrations_as_dicts,
    check_errors,
    check_pools_and_groups,
)
