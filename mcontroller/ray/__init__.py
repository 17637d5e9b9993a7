"""The controller over Ray: pools of slots in a cluster, and groups of worker processes that run in them.

Names are imported on first use, so that a worker process imports only the modules that it runs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from parallel_state.lazy import lazy_exports

# It prints a paragraph about token authentication at every start of Ray on this machine.
logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)

if TYPE_CHECKING:
    from mcontroller.ray.class_with_init import RayClassWithInitArgs as RayClassWithInitArgs
    from mcontroller.ray.class_with_init import create_colocated_worker_cls as create_colocated_worker_cls
    from mcontroller.ray.class_with_init import create_colocated_worker_cls_fused as create_colocated_worker_cls_fused
    from mcontroller.ray.resource_pool import RayResourcePool as RayResourcePool
    from mcontroller.ray.resource_pool import ResourcePool as ResourcePool
    from mcontroller.ray.resource_pool import ResourcePoolManager as ResourcePoolManager
    from mcontroller.ray.worker_group import MegatronRayWorkerGroup as MegatronRayWorkerGroup
    from mcontroller.ray.worker_group import RayWorkerGroup as RayWorkerGroup
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
