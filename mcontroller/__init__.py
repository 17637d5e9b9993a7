"""The controller: plan, dispatch, execute and collect the calls of worker groups. It contains no model code.

Every public name is in this module and is imported on first use, so a program that needs neither torch nor Ray imports
neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from mcontroller.channel.options import ChannelOptions as ChannelOptions
    from mcontroller.config.registry import Registry as Registry
    from mcontroller.data.batch import DataProto as DataProto
    from mcontroller.data.batch import DataProtoConfig as DataProtoConfig
    from mcontroller.data.batch import DataProtoFuture as DataProtoFuture
    from mcontroller.data.batch import DataProtoItem as DataProtoItem
    from mcontroller.data.batch import collate_fn as collate_fn
    from mcontroller.data.batch import pad_dataproto_to_divisor as pad_dataproto_to_divisor
    from mcontroller.data.batch import unpad_dataproto as unpad_dataproto
    from mcontroller.dispatch.explain import Explanation as Explanation
    from mcontroller.dispatch.modes import Dispatch as Dispatch
    from mcontroller.dispatch.modes import DispatchSpec as DispatchSpec
    from mcontroller.dispatch.modes import Execute as Execute
    from mcontroller.dispatch.modes import Plan as Plan
    from mcontroller.dispatch.modes import RowRule as RowRule
    from mcontroller.dispatch.modes import plan as plan
    from mcontroller.dispatch.modes import register_dispatch_mode as register_dispatch_mode
    from mcontroller.dispatch.registration import MAGIC_ATTR as MAGIC_ATTR
    from mcontroller.dispatch.registration import register as register
    from mcontroller.errors import BrokenPackageError as BrokenPackageError
    from mcontroller.errors import CallRejected as CallRejected
    from mcontroller.errors import CallTimeout as CallTimeout
    from mcontroller.errors import ConfigError as ConfigError
    from mcontroller.errors import ConnectionLost as ConnectionLost
    from mcontroller.errors import DataError as DataError
    from mcontroller.errors import DispatchError as DispatchError
    from mcontroller.errors import GroupBroken as GroupBroken
    from mcontroller.errors import GroupError as GroupError
    from mcontroller.errors import LayoutError as LayoutError
    from mcontroller.errors import MControllerError as MControllerError
    from mcontroller.errors import MissingPackageError as MissingPackageError
    from mcontroller.errors import ParallelStateError as ParallelStateError
    from mcontroller.errors import ResourceError as ResourceError
    from mcontroller.errors import TopologyError as TopologyError
    from mcontroller.errors import WorkerDied as WorkerDied
    from mcontroller.errors import WorkerError as WorkerError
    from mcontroller.errors import before_changes as before_changes
    from mcontroller.group import WorkerGroup as WorkerGroup
    from mcontroller.local import LocalWorkerGroup as LocalWorkerGroup
    from mcontroller.ray.class_with_init import RayClassWithInitArgs as RayClassWithInitArgs
    from mcontroller.ray.class_with_init import create_colocated_worker_cls as create_colocated_worker_cls
    from mcontroller.ray.class_with_init import create_colocated_worker_cls_fused as create_colocated_worker_cls_fused
    from mcontroller.ray.process import sibling as sibling
    from mcontroller.ray.resource_pool import RayResourcePool as RayResourcePool
    from mcontroller.ray.resource_pool import ResourcePool as ResourcePool
    from mcontroller.ray.resource_pool import ResourcePoolManager as ResourcePoolManager
    from mcontroller.ray.worker_group import MegatronRayWorkerGroup as MegatronRayWorkerGroup
    from mcontroller.ray.worker_group import RayWorkerGroup as RayWorkerGroup
    from mcontroller.transport import Future as Future
    from mcontroller.worker import ClassWithInitArgs as ClassWithInitArgs
    from mcontroller.worker import Worker as Worker
    from parallel_state.infos import DistGlobalInfo as DistGlobalInfo
    from parallel_state.infos import DistRankInfo as DistRankInfo
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
