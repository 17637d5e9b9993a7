"""torch.distributed with the checks of NCCL, carried by gloo: devices, contiguity and dtypes."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.fake_cuda.nccl_group import ProcessGroupNCCL
from tests.fake_cuda.tags import gpu, memory, on_device, tensors_in

# Collective -> the names of its tensor arguments. Point-to-point transfers take strided tensors; the rest does not.
_TENSORS = {
    "all_reduce": ("tensor",),
    "broadcast": ("tensor",),
    "reduce": ("tensor",),
    "all_gather": ("tensor_list", "tensor"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "_all_gather_base": ("output_tensor", "input_tensor"),
    "reduce_scatter": ("output", "input_list"),
    "reduce_scatter_tensor": ("output", "input"),
    "_reduce_scatter_base": ("output", "input"),
    "all_to_all": ("output_tensor_list", "input_tensor_list"),
    "all_to_all_single": ("output", "input"),
    "gather": ("tensor", "gather_list"),
    "scatter": ("tensor", "scatter_list"),
    "send": ("tensor",),
    "recv": ("tensor",),
    "isend": ("tensor",),
    "irecv": ("tensor",),
}
_POINT_TO_POINT = {"send", "recv", "isend", "irecv"}
_UNSUPPORTED_DTYPES = {torch.int16, torch.complex64, torch.complex128}


class Communicator:
    """The communicators of one group, with the methods of torch's NCCL backend that free and allocate their buffers.

    There is one of all ranks, and one for each peer of a single send or receive; batches of them use the one of all
    ranks.

    Attributes:
        size: the number of its ranks.
        carrier: the backend that carries its collectives, which has all other attributes.
        used: the peers of the communicators that were used; None stands for all ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.carrier: Any = None
        self.used: set[int | None] = set()
        self.held = 0
        self.suspended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.carrier, name)

    def use(self, peer: int | None) -> None:
        """Allocate the buffers at the first collective; raise if they are suspended."""
        if self.suspended:
            raise RuntimeError("NCCL: the communicator is suspended")
        self.used.add(peer)
        self._hold(self._buffers())

    def suspend(self) -> None:
        """Free the buffers."""
        if self.held:
            self.suspended = True
            self._hold(0)

    def resume(self) -> None:
        """Allocate the buffers of a suspended communicator again."""
        if self.suspended:
            self.suspended = False
            self._hold(self._buffers())

    def _buffers(self) -> int:
        """Return the bytes of its buffers, from the first collective on: as many as the estimate of memory counts."""
        from workers.memory.nccl import communicator_bytes  # Megatron must not be imported before the fake device

        return sum(communicator_bytes(self.size if peer is None else 2) for peer in self.used)

    def _hold(self, size: int) -> None:
        memory[gpu()].hold(size - self.held)
        self.held = size


class _Backends:
    """The backend that each process group poses as, by the group's name."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}
        self._communicators: dict[str, Communicator] = {}

    def communicator(self, group: Any) -> Communicator:
        """Return the communicator of a group that poses as NCCL's."""
        group = group or c10d._get_default_group()
        return self._communicators.setdefault(group.group_name, Communicator(group.size()))

    def note(self, group: Any, backend: str) -> None:
        self._of[group.group_name] = backend

    def of(self, group: Any) -> str:
        return self._of.get((group or c10d._get_default_group()).group_name, "gloo")


_backends = _Backends()
_batches: list[None] = []
"""One entry for each ``batch_isend_irecv`` that is running."""


def install() -> None:
    """Make groups that ask for NCCL pose as such over gloo, and check what they are given."""
    from parallel_state.cpu import gloo

    gloo.patch_collectives()  # what gloo lacks beside NCCL
    _replace("init_process_group", _posing_init(dist.init_process_group))
    _replace("new_group", _posing_new_group(dist.new_group))
    _replace("get_backend", lambda group=None: _backends.of(group))
    _replace("barrier", _barrier(dist.barrier))
    _replace("ProcessGroupNCCL", ProcessGroupNCCL)
    _replace("batch_isend_irecv", _batched(dist.batch_isend_irecv))
    for name, arguments in _TENSORS.items():
        if hasattr(dist, name):
            _replace(name, _checked(name, getattr(dist, name), arguments))
    dist.ProcessGroup._get_backend = _posing_backend(dist.ProcessGroup._get_backend)
    c10d._get_object_coll_device = lambda group=None: "cuda" if _backends.of(group) == "nccl" else "cpu"
    c10d._get_pg_default_device = lambda group=None: torch.device(c10d._get_object_coll_device(group))


def _replace(name: str, value: Any) -> None:
    setattr(dist, name, value)
    setattr(c10d, name, value)


def _posing_init(init: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        init("gloo", *args, **kwargs)
        _backends.note(c10d._get_default_group(), backend or "nccl")

    return init_process_group


def _posing_new_group(new_group: Callable[..., Any]) -> Callable[..., Any]:
    def posing(
        ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, **kwargs: Any
    ) -> Any:
        group = new_group(ranks, timeout=timeout, backend="gloo", **kwargs)
        if isinstance(group, dist.ProcessGroup):
            _backends.note(group, backend or _backends.of(None))
        return group

    return posing


def _posing_backend(get_backend: Callable[..., Any]) -> Callable[..., Any]:
    def posing(group: Any, device: torch.device) -> Any:
        if _backends.of(group) != "nccl":
            return get_backend(group, device)
        communicator = _backends.communicator(group)
        communicator.carrier = get_backend(group, device)
        return communicator

    return posing


def _barrier(barrier: Callable[..., Any]) -> Callable[..., Any]:
    return lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)


def _batched(batch_isend_irecv: Callable[..., Any]) -> Callable[..., Any]:
    def batched(operations: Any) -> Any:
        _batches.append(None)
        try:
            return batch_isend_irecv(operations)
        finally:
            _batches.pop()

    return batched


def _peer(name: str, given: dict[str, Any]) -> int | None:
    """Return the peer of a single send or receive; None for operations of all ranks, and for batches."""
    if name not in _POINT_TO_POINT or _batches:
        return None
    return next(given[key] for key in ("dst", "src", "group_dst", "group_src") if given.get(key) is not None)


def _checked(name: str, collective: Callable[..., Any], arguments: tuple[str, ...]) -> Callable[..., Any]:
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs).arguments
        backend = _backends.of(given.get("group"))
        for argument in arguments:
            for tensor in tensors_in(given.get(argument)):
                _check(name, argument, tensor, backend)
        if backend != "nccl":
            return collective(*args, **kwargs)
        if dist.get_world_size(given.get("group")) > 1:  # a communicator of one rank has next to no buffers
            _backends.communicator(given.get("group")).use(_peer(name, given))
        tensors = [tensor for argument in arguments for tensor in tensors_in(given.get(argument))]
        before = _references(tensors)
        work = collective(*args, **kwargs)
        if work is None:
            _wait_for_release(tensors, before)
        return work

    return checked


def _references(tensors: list[torch.Tensor]) -> list[int]:
    """Return how many references each storage has."""
    return [torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) for tensor in tensors]


def _wait_for_release(tensors: list[torch.Tensor], before: list[int], timeout_s: float = 1.0) -> None:
    """Wait until gloo's thread has released the tensors of a complete collective, or their bytes count for longer."""
    end = time.monotonic() + timeout_s
    while _references(tensors) > before and time.monotonic() < end:
        time.sleep(0)


def _check(name: str, argument: str, tensor: torch.Tensor, backend: str) -> None:
    """Raise what the backend raises for this tensor."""
    if backend != "nccl":
        if on_device(tensor):
            raise RuntimeError(f"{name}: a CUDA tensor of shape {tuple(tensor.shape)} in a group of gloo's")
        return
    if not on_device(tensor):
        raise RuntimeError(
            f"{name}: No backend type associated with device type cpu (NCCL, {argument} of shape {tuple(tensor.shape)})"
        )
    if name not in _POINT_TO_POINT and not tensor.is_contiguous() and argument != "tensor_list":
        raise ValueError(f"{name}: Tensors must be contiguous (NCCL, {argument} with strides {tensor.stride()})")
    if tensor.dtype in _UNSUPPORTED_DTYPES:
        raise TypeError(f"{name}: Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
