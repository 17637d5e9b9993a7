"""Attributes and methods of workers that ported code uses; see docs/porting.md for what new code uses instead."""

from __future__ import annotations

import os
import socket
from functools import cached_property
from typing import Any

from mcontroller.errors import ConfigError

__all__ = ["PortedWorker"]


class PortedWorker:
    """The names that verl's ``Worker`` has in addition to those of ``Worker``.

    The cached properties may be assigned, as ported code does with some of them.

    Args:
        cuda_visible_devices: the value of CUDA_VISIBLE_DEVICES, which the pool has set; None does not compare it.

    Raises:
        ConfigError: the process sees other devices than ``cuda_visible_devices``.
    """

    fused_worker_attr_name = "fused_worker_dict"

    _environment: Any

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        super().__init__()
        if cuda_visible_devices is not None and cuda_visible_devices != self.get_cuda_visible_devices():
            raise ConfigError(
                f"cuda_visible_devices is {cuda_visible_devices!r}, and the pool has set CUDA_VISIBLE_DEVICES to "
                f"{self.get_cuda_visible_devices()!r}: leave the argument out",
                key="cuda_visible_devices",
                value=cuda_visible_devices,
            )

    @cached_property
    def _rank(self) -> int:
        return int(self._environment.rank)

    @cached_property
    def _world_size(self) -> int:
        return int(self._environment.world_size)

    @cached_property
    def _local_rank(self) -> int:
        return int(self._environment.local_rank)

    @cached_property
    def _local_world_size(self) -> int:
        return int(self._environment.local_world_size)

    @cached_property
    def _master_addr(self) -> str:
        return str(self._environment.master_addr)

    @cached_property
    def _master_port(self) -> str:
        return str(self._environment.master_port)

    @cached_property
    def _cuda_visible_devices(self) -> str:
        return self.get_cuda_visible_devices()

    @cached_property
    def fused_worker_dict(self) -> dict[str, Any]:
        """The worker objects of this process by role; empty if it has one role. See ``mcontroller.sibling``."""
        return {}

    def get_fused_worker_by_name(self, worker_name: str) -> Any:
        """Return the worker object of another role of this process; None if it has none."""
        return self.fused_worker_dict.get(worker_name)

    @classmethod
    def env_keys(cls) -> list[str]:
        """Return the environment variables that describe the rank."""
        rank = ["WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
        return [*rank, "CUDA_VISIBLE_DEVICES"]

    def get_cuda_visible_devices(self) -> str:
        """Return CUDA_VISIBLE_DEVICES of this process, or "not set"."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    def get_availale_master_addr_port(self) -> tuple[str, str]:  # spelled as ported code spells it
        """Return the address of this node and a port that was free a moment ago, for a rendezvous of the worker's."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), str(free.getsockname()[1])
