"""The mode in which torch's operations on a rank compute shapes, and their storages and FLOPs are counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from parallel_state.dry_run.errors import DryRunError
from parallel_state.dry_run.memory import Memory, Storage
from parallel_state.dry_run.values import HANDLERS, ValuesRead, any_is_known, compute_value

_META = torch.device("meta")
_SYSTEM_MEMORY = Path("/proc/meminfo")
_OPERATIONS_TO_CHECK, _LEAST_LEFT = 1024, 0.05
"""After how many operations of a rank the system's memory is read, and the share that must be left."""
_Traits = tuple[bool, Any, Any, dict[Any, Any] | None]
"""Of an operation: whether it makes new storages, its handler, its count of FLOPs, and its cache, if it has one.

The cache has, by the shapes of the inputs: the shapes of the results, None in place; FLOPs; whether there is one
result. Computing a shape takes torch ten times as long as this look-up.
"""
_traits: dict[Any, _Traits] = {}


class CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages and FLOPs of the operations of one rank, and keeps known values.

    Args:
        memory: of the rank.
        device: the type of the device whose storages are counted; ``"cpu"`` counts those of a real run.

    Attributes:
        memory: as passed.
        transformer_engine: whether layers save what those of Transformer Engine save.
        flops: of all operations.
        read: the unknown values that were read.
    """

    def __init__(self, memory: Memory, device: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory, self.device = memory, device
        self.transformer_engine = False
        self.flops = self._operations = 0
        self.read: ValuesRead = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps every call for its compiler, which is not used

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation, and count it."""
        kwargs = kwargs or {}
        self._operations += 1
        if self._operations % _OPERATIONS_TO_CHECK == 0:
            _check_memory_left()
        traits = _traits.get(func)
        if traits is None:
            traits = _traits[func] = _traits_of(func)
        is_new, handler, flops_of, cache = traits
        if handler is not None and self.device == "meta":  # the values of a real run are computed
            result = handler(self.read, func, args, kwargs)
            if result is not NotImplemented:
                self.count(result)
                return result
        key = cached = None
        if cache is not None and kwargs.get("device") is None:
            try:
                key = _shapes_of(args), *kwargs, _shapes_of(kwargs.values())
                cached = cache.get(key)
            except TypeError:  # a tensor of the host, or an argument without a hash
                key = None
        if cached is not None:
            result = self._from_cache(cached, args, kwargs)
        else:
            result = func(*args, **kwargs)
            flops = 0 if flops_of is None else flops_of(*args, **kwargs, out_val=result)
            self.flops += flops
            if is_new:
                self.count(result)
            if key is not None:
                entry = _entry_of(func, args, kwargs, result, flops)
                if entry is not None:
                    cache[key] = entry  # type: ignore[index]
        if any_is_known(args):
            compute_value(func, args, kwargs, result)
        return result

    def _from_cache(self, cached: Any, args: Any, kwargs: Any) -> Any:
        shapes, flops, is_single = cached
        self.flops += flops
        if shapes is None:
            return kwargs["out"] if "out" in kwargs else args[0]
        made = []
        for shape, stride, dtype in shapes:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
            storage: Any = tensor.untyped_storage()
            storage.counted = Storage(self.memory, storage.nbytes())
            made.append(tensor)
        return made[0] if is_single else tuple(made)

    def count(self, result: Any) -> None:
        """Count the storages of a result that are not counted yet."""
        if isinstance(result, torch.Tensor):
            if result.device.type == self.device:
                storage: Any = result.untyped_storage()
                if not hasattr(storage, "counted"):
                    storage.counted = Storage(self.memory, storage.nbytes())
        elif isinstance(result, (tuple, list)):
            for item in result:
                self.count(item)


def _check_memory_left() -> None:
    """Raise DryRunError if the memory of this machine is nearly used up, before the system ends processes."""
    try:
        lines = _SYSTEM_MEMORY.read_text().splitlines()
    except OSError:  # a system without the file
        return
    sizes = {name: float(size.split()[0]) / 2**20 for name, _, size in (line.partition(":") for line in lines)}
    left, total = sizes["MemAvailable"], sizes["MemTotal"]
    if left < _LEAST_LEFT * total:
        raise DryRunError(
            f"{left:.1f} of the {total:.1f} GiB of memory of this machine are left, too few for all ranks that run "
            "together: leave --all out, or use a larger machine",
            left=left,
            total=total,
        )


def running_mode() -> CountingMode | None:
    """Return the mode of the running rank."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes = (mode for mode in reversed(_get_current_dispatch_mode_stack()) if isinstance(mode, CountingMode))
    return next(modes, None)


def counts_transformer_engine() -> bool:
    """Whether the layers of the running rank save what those of Transformer Engine save."""
    mode = running_mode()
    return mode is not None and mode.transformer_engine


def _traits_of(func: Any) -> _Traits:
    schema = func._schema
    is_new = any(value.alias_info is None for value in schema.returns) and func.namespace != "c10d"
    is_whole = all(value.alias_info is None for value in schema.returns) and not schema.is_mutable
    is_in_place = (
        schema.is_mutable
        and len(schema.returns) == 1
        and schema.returns[0].alias_info is not None
        and schema.returns[0].alias_info.is_write
    )
    has_tensor = any("Tensor" in str(argument.type) for argument in schema.arguments)
    is_cached = func.namespace == "aten" and has_tensor and (is_whole or is_in_place) and len(schema.returns) > 0
    handler = HANDLERS.get(func, HANDLERS.get(func.overloadpacket))
    return is_new, handler, flop_registry.get(func.overloadpacket), {} if is_cached else None


def _shapes_of(arguments: Any) -> Any:
    """Return the key of arguments in a cache.

    Raises:
        TypeError: one of them is a tensor with values.
    """
    shapes: list[Any] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            if not argument.is_meta:
                raise TypeError
            shapes += argument.shape, argument.stride(), argument.dtype
        elif type(argument) in (list, tuple):
            shapes.append(_shapes_of(argument))
        else:
            shapes += type(argument), argument
    return tuple(shapes)


def _entry_of(func: Any, args: Any, kwargs: Any, result: Any, flops: int) -> Any:
    """Return the results of a call as a cache has them; None if they cannot be made from their shapes."""
    is_single = isinstance(result, torch.Tensor)
    if func._schema.is_mutable:
        is_same = is_single and result is (kwargs["out"] if "out" in kwargs else args[0])
        return (None, flops, True) if is_same else None
    results = [result] if is_single else result
    inputs = {tensor.untyped_storage()._cdata for tensor in args if isinstance(tensor, torch.Tensor)}
    if any(one.untyped_storage()._cdata in inputs for one in results if isinstance(one, torch.Tensor)):
        return None  # a view that its schema does not call one, such as of _unsafe_view
    if isinstance(results, (list, tuple)) and all(
        isinstance(one, torch.Tensor) and one.is_meta and one.storage_offset() == 0 for one in results
    ):
        return [(one.shape, one.stride(), one.dtype) for one in results], flops, is_single
    return None
