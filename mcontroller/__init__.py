"""Who gets what? The controller: plans, dispatches, executes, collects. No model code.

Every public name is here, and is loaded when it is first asked for: what does not need torch or Ray loads neither.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "batch_ops": (
        "fold_batch_dim",
        "pad_dataproto_to_divisor",
        "unfold_batch_dim",
        "union_numpy_dict",
        "union_tensor_dict",
        "unpad_dataproto",
    ),
    "decorator": ("MAGIC_ATTR", "register"),
    "dispatch": ("Dispatch", "DispatchSpec", "Execute", "Plan", "RowRule", "plan"),
    "errors": (
        "CallTimeout",
        "ConfigError",
        "DataError",
        "DispatchError",
        "GroupBroken",
        "GroupError",
        "LayoutError",
        "MControllerError",
        "ParallelStateError",
        "ResourceError",
        "TopologyError",
        "WorkerDied",
        "WorkerError",
    ),
    "explain": ("Explanation",),
    "future": ("DataProtoFuture", "Future"),
    "local": ("LocalWorkerGroup",),
    "mode_functions": (
        "DISPATCH_MODE_FN_REGISTRY",
        "collect_all_to_all",
        "get_predefined_dispatch_fn",
        "get_predefined_execute_fn",
        "register_dispatch_mode",
        "update_dispatch_mode",
    ),
    "protocol": ("DataProto", "DataProtoConfig", "DataProtoItem", "collate_fn"),
    "colocate": ("sibling",),
    "ray": (
        "MegatronRayWorkerGroup",
        "RayClassWithInitArgs",
        "RayResourcePool",
        "RayWorkerGroup",
        "ResourcePool",
        "ResourcePoolManager",
        "Role",
        "create_colocated_worker_cls",
        "create_colocated_worker_cls_fused",
        "extract_pg_from_exist",
        "merge_resource_pool",
    ),
    "worker": ("ClassWithInitArgs", "Worker"),
    "worker_group": ("WorkerGroup",),
}
_HOME = {name: f"mcontroller.{module}" for module, names in _NAMES.items() for name in names}
_HOME |= dict.fromkeys(("DistGlobalInfo", "DistRankInfo"), "parallel_state.infos")
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
