"""Who gets what? The controller: plans, dispatches, executes, collects. No model code.

Every public name is here, and is loaded when it is first asked for: what does not need torch or Ray loads neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what a type checker and an editor read; a test compares it with the names below
    from mcontroller.batch_ops import fold_batch_dim as fold_batch_dim
    from mcontroller.batch_ops import pad_dataproto_to_divisor as pad_dataproto_to_divisor
    from mcontroller.batch_ops import unfold_batch_dim as unfold_batch_dim
    from mcontroller.batch_ops import union_numpy_dict as union_numpy_dict
    from mcontroller.batch_ops import union_tensor_dict as union_tensor_dict
    from mcontroller.batch_ops import unpad_dataproto as unpad_dataproto
    from mcontroller.colocate import sibling as sibling
    from mcontroller.decorator import MAGIC_ATTR as MAGIC_ATTR
    from mcontroller.decorator import register as register
    from mcontroller.dispatch import Dispatch as Dispatch
    from mcontroller.dispatch import DispatchSpec as DispatchSpec
    from mcontroller.dispatch import Execute as Execute
    from mcontroller.dispatch import Plan as Plan
    from mcontroller.dispatch import RowRule as RowRule
    from mcontroller.dispatch import plan as plan
    from mcontroller.errors import CallTimeout as CallTimeout
    from mcontroller.errors import ConfigError as ConfigError
    from mcontroller.errors import DataError as DataError
    from mcontroller.errors import DispatchError as DispatchError
    from mcontroller.errors import GroupBroken as GroupBroken
    from mcontroller.errors import GroupError as GroupError
    from mcontroller.errors import LayoutError as LayoutError
    from mcontroller.errors import MControllerError as MControllerError
    from mcontroller.errors import ParallelStateError as ParallelStateError
    from mcontroller.errors import ResourceError as ResourceError
    from mcontroller.errors import TopologyError as TopologyError
    from mcontroller.errors import WorkerDied as WorkerDied
    from mcontroller.errors import WorkerError as WorkerError
    from mcontroller.explain import Explanation as Explanation
    from mcontroller.future import DataProtoFuture as DataProtoFuture
    from mcontroller.future import Future as Future
    from mcontroller.local import LocalWorkerGroup as LocalWorkerGroup
    from mcontroller.mode_functions import DISPATCH_MODE_FN_REGISTRY as DISPATCH_MODE_FN_REGISTRY
    from mcontroller.mode_functions import collect_all_to_all as collect_all_to_all
    from mcontroller.mode_functions import get_predefined_dispatch_fn as get_predefined_dispatch_fn
    from mcontroller.mode_functions import get_predefined_execute_fn as get_predefined_execute_fn
    from mcontroller.mode_functions import register_dispatch_mode as register_dispatch_mode
    from mcontroller.mode_functions import update_dispatch_mode as update_dispatch_mode
    from mcontroller.protocol import DataProto as DataProto
    from mcontroller.protocol import DataProtoConfig as DataProtoConfig
    from mcontroller.protocol import DataProtoItem as DataProtoItem
    from mcontroller.protocol import collate_fn as collate_fn
    from mcontroller.ray import MegatronRayWorkerGroup as MegatronRayWorkerGroup
    from mcontroller.ray import RayClassWithInitArgs as RayClassWithInitArgs
    from mcontroller.ray import RayResourcePool as RayResourcePool
    from mcontroller.ray import RayWorkerGroup as RayWorkerGroup
    from mcontroller.ray import ResourcePool as ResourcePool
    from mcontroller.ray import ResourcePoolManager as ResourcePoolManager
    from mcontroller.ray import Role as Role
    from mcontroller.ray import create_colocated_worker_cls as create_colocated_worker_cls
    from mcontroller.ray import create_colocated_worker_cls_fused as create_colocated_worker_cls_fused
    from mcontroller.ray import extract_pg_from_exist as extract_pg_from_exist
    from mcontroller.ray import merge_resource_pool as merge_resource_pool
    from mcontroller.worker import ClassWithInitArgs as ClassWithInitArgs
    from mcontroller.worker import Worker as Worker
    from mcontroller.worker_group import WorkerGroup as WorkerGroup
    from parallel_state.infos import DistGlobalInfo as DistGlobalInfo
    from parallel_state.infos import DistRankInfo as DistRankInfo

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
