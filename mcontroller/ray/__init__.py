"""The controller over Ray: pools of slots in a cluster, and groups of worker processes that live in them.

Names are loaded when they are first asked for, so that a worker's process loads what it runs and no more.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "MegatronRayWorkerGroup": "mcontroller.ray.worker_group",
    "RayClassWithInitArgs": "mcontroller.ray.class_with_init",
    "RayResourcePool": "mcontroller.ray.resource_pool",
    "RayWorkerGroup": "mcontroller.ray.worker_group",
    "ResourcePool": "mcontroller.ray.resource_pool",
    "ResourcePoolManager": "mcontroller.ray.manager",
    "Role": "mcontroller.ray.manager",
    "create_colocated_worker_cls": "mcontroller.colocate",
    "create_colocated_worker_cls_fused": "mcontroller.colocate",
    "extract_pg_from_exist": "mcontroller.ray.resource_pool",
    "merge_resource_pool": "mcontroller.ray.resource_pool",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
