"""The two modes through which every operation passes while the fake CUDA device is on.

``DeviceFunctions`` sees Python calls: it takes device arguments away, answers ``tensor.device`` and moves tensors.
``DeviceOperations`` sees the operations that they become, backward passes included: it tags results and rejects mixed
devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_cuda.pinned import is_pinned, pinned
from tests.fake_cuda.streams import in_flight
from tests.fake_cuda.tags import CPU, device_of, gpu, measure, on_device, put, tensors_in, traffic

_COPIES = {"_to_copy", "copy", "_copy_from"}
_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
_LIKE = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"}
_NEW = {"new_empty", "new_zeros", "new_full", "new_ones", "new_empty_strided"}
_UNCHECKED = {"is_pinned", "_pin_memory", "set_", "set_data", "resize_", "is_same_size"}
_WAIT_FOR_SHAPES = {"nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "bincount"}
_LETTERS = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.bfloat16: "BFloat16",
    torch.float16: "Half",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.uint8: "Byte",
    torch.bool: "Bool",
}

_wanted: list[tuple[torch.device | None, bool]] = [(None, False)]
"""The device for what is created now, innermost last; and whether a call named it."""


@contextlib.contextmanager
def _creating_on(device: torch.device | None, *, named: bool = False) -> Iterator[None]:
    _wanted.append((device, named))
    try:
        yield
    finally:
        _wanted.pop()


class DeviceOperations(TorchDispatchMode):
    """Tags results with their device and raises what CUDA raises for operands on two devices."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = list(tensors_in([args, kwargs]))
        devices = [device_of(operand) for operand in operands]
        if in_flight.copies:
            in_flight.use([operand for operand, device in zip(operands, devices, strict=True) if device is not CPU])
        if func.namespace == "c10d":
            return func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        if name == "copy_":
            if len(devices) > 1 and devices[0] != devices[1]:
                return _copied_into(func, args, kwargs, operands)
            return func(*args, **kwargs)
        if name in _COPIES:
            return _copied(func, args, kwargs, operands[0])
        on_gpu = next((device for device in devices if device is not CPU), CPU)
        if on_gpu is not CPU:
            _count_waiting(name, operands, kwargs)
            if name not in _UNCHECKED:
                _check_one_device(name, operands, devices, on_gpu)
        result = func(*args, **kwargs)
        self._tag(result, operands, on_gpu, is_factory=name in _LIKE | _NEW)
        return result

    @staticmethod
    def _tag(result: Any, operands: Sequence[torch.Tensor], on_gpu: torch.device, *, is_factory: bool) -> None:
        wanted, named = _wanted[-1]
        follows_operands = bool(operands) and not (is_factory and named)
        device = on_gpu if follows_operands else wanted or CPU
        known = {operand.untyped_storage()._cdata for operand in operands if operand.layout == torch.strided}
        for made in tensors_in(result):
            if made.layout == torch.strided:
                storage = made.untyped_storage()
                if storage._cdata in known:
                    measure(storage)  # an output that was resized
                else:
                    put(made, device)


def _copied_into(func: Any, args: Sequence[Any], kwargs: dict[str, Any], operands: Sequence[torch.Tensor]) -> Any:
    target, source = operands
    host = source if on_device(target) else target
    same = host is target or (target.dtype, target.shape) == (source.dtype, source.shape)  # others are copied before
    non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
    asynchronous = non_blocking and same and host.is_contiguous() and is_pinned(host)
    traffic.add_copy(device_of(source), device_of(target), asynchronous)
    if asynchronous:
        in_flight.use([source])
    result = func(*args, **kwargs)
    if asynchronous:
        in_flight.start(target, source)
    return result


def _copied(func: Any, args: Sequence[Any], kwargs: dict[str, Any], source: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the device that is wanted; torch takes page-locked memory for a copy that is not waited for."""
    wanted, named = _wanted[-1]
    origin = device_of(source)
    device = wanted if named and wanted is not None else origin
    non_blocking = kwargs.get("non_blocking", False)
    asynchronous = False
    if device != origin:
        same = kwargs.get("dtype", source.dtype) == source.dtype
        asynchronous = non_blocking and (device is CPU or (same and source.is_contiguous() and is_pinned(source)))
        traffic.add_copy(origin, device, asynchronous)
    if asynchronous:
        in_flight.use([source])
    copy: torch.Tensor = func(*args, **kwargs)
    if copy.untyped_storage()._cdata != source.untyped_storage()._cdata:
        put(copy, device)
    if asynchronous:
        in_flight.start(pinned.allocate(copy) if device is CPU else copy, source)
    return copy


def _count_waiting(name: str, operands: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> None:
    """Count operations whose values, or whose result's shape, the host needs before it can go on."""
    if name == "_local_scalar_dense":
        traffic.add("sync:item")
    elif name in _INDEXING and any(operand.dtype == torch.bool for operand in operands[1:]):
        traffic.add("sync:masked index")
    elif name in _WAIT_FOR_SHAPES or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        traffic.add(f"sync:{name}")


def _check_one_device(
    name: str, operands: Sequence[torch.Tensor], devices: Sequence[torch.device], on_gpu: torch.device
) -> None:
    """Raise CUDA's error for operands on two devices; scalars of the host and index tensors are allowed."""
    pairs = list(zip(operands, devices, strict=True))
    elsewhere = [(operand, device) for operand, device in pairs if device != on_gpu]
    if not elsewhere or name in _LIKE | _NEW:
        return
    wrong = [(operand, device) for operand, device in elsewhere if operand.dim() > 0 or device is not CPU]
    if name in _INDEXING:
        wrong = pairs[:1] if devices[0] is CPU else [pair for pair in wrong if pair[1] is not CPU]
        if "index_put" in name and not wrong and devices[-1] is CPU and operands[-1].dim() > 0:
            wrong = pairs[-1:]
    elif not wrong and devices[0] is CPU and name.endswith("_") and operands[0].dim() == 0:
        wrong = pairs[:1]  # the result of an in-place operation stays on its device
    if wrong:
        device = wrong[0][1]
        shapes = [tuple(operand.shape) for operand, on in wrong if on == device]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {on_gpu} and {device}! "
            f"(aten::{name}; on {device} are arguments of shapes {shapes})"
        )


class DeviceFunctions(TorchFunctionMode):
    """Answers and moves for the fake CUDA device; every other call runs on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") == "__get__":
            return _ATTRIBUTES.get(func.__self__, lambda tensor: func(tensor))(args[0])
        if func in _METHODS:
            return _METHODS[func](*args, **kwargs)
        if func is torch._C._nn._parse_to:  # reads the arguments of Module.to
            return func(*args, **kwargs)
        if func is torch.device:
            return gpu(args[0]) if args and isinstance(args[0], int) else func(*args, **kwargs)
        locked = kwargs.pop("pin_memory", False) if kwargs.get("pin_memory") else False
        device = _as_device(kwargs.get("device"))
        if device is not None and device.type in ("cuda", "cpu"):
            kwargs["device"] = "cpu"
            with _creating_on(device, named=True):
                result = func(*args, **kwargs)
            for made in tensors_in(result):
                put(made, device)
            return pinned.allocate(result) if locked else result
        args = tuple(CPU if isinstance(arg, torch.device) and arg.type == "cuda" else arg for arg in args)
        with _creating_on(_gpu_of([args, kwargs])):
            result = func(*args, **kwargs)
        return pinned.allocate(result) if locked else result


def _gpu_of(value: Any) -> torch.device | None:
    """Return the device of the first tensor on a GPU, if there is one."""
    return next((device for device in map(device_of, tensors_in(value)) if device is not CPU), None)


def _as_device(value: Any) -> torch.device | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return gpu(value)
    device = torch.device(value) if isinstance(value, str) else value
    if not isinstance(device, torch.device):
        return None
    return {"cuda": lambda: gpu(device.index), "cpu": lambda: CPU}.get(device.type, lambda: device)()


def _device_of(tensor: torch.Tensor) -> torch.device:
    real = _REAL_DEVICE.__get__(tensor)
    return device_of(tensor) if real.type == "cpu" else real


_REAL_DEVICE: Any = torch.Tensor.device
_ATTRIBUTES: dict[Any, Callable[[torch.Tensor], Any]] = {
    torch.Tensor.device: _device_of,
    torch.Tensor.is_cuda: on_device,
    torch.Tensor.is_cpu: lambda tensor: not on_device(tensor),
}


def _moved(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
    """The tensor on this device: itself if it is there, otherwise a copy."""
    with _creating_on(device, named=True):
        return torch.Tensor.to(tensor, tensor.dtype, non_blocking, copy=device_of(tensor) != device)


def _cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    return _moved(tensor, gpu() if device is None else _as_device(device) or gpu(), non_blocking)


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.to`` in all of its forms: a device, a dtype, both, or another tensor's; then non_blocking and copy."""
    device, dtype, other = _as_device(kwargs.get("device")), kwargs.get("dtype"), kwargs.get("other")
    for position, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            other = arg
        elif isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, torch.device | str) or (position == 0 and type(arg) is int):
            device = _as_device(arg)
    if other is not None:
        device, dtype = _device_of(other), other.dtype
    if device is not None and device.type == "meta":
        return torch.Tensor.to(tensor, "meta", dtype)
    flags = [arg for arg in args if isinstance(arg, bool)]
    non_blocking = kwargs.get("non_blocking", flags[0] if flags else False)
    copy = kwargs.get("copy", flags[1] if len(flags) > 1 else False)
    target = device or _device_of(tensor)
    with _creating_on(target, named=True):
        options = {"memory_format": kwargs["memory_format"]} if "memory_format" in kwargs else {}
        copy = copy or _device_of(tensor) != target
        return torch.Tensor.to(tensor, dtype or tensor.dtype, non_blocking, copy=copy, **options)


def _type(tensor: torch.Tensor, name: Any = None, **kwargs: Any) -> Any:
    if name is None:
        return f"torch.{'cuda.' if on_device(tensor) else ''}{_LETTERS[tensor.dtype]}Tensor"
    if isinstance(name, str) and name.startswith("torch.cuda."):
        return _moved(torch.Tensor.type(tensor, name.replace("torch.cuda.", "torch.")), gpu())
    return torch.Tensor.type(tensor, name, **kwargs)


def _numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if on_device(tensor):
        raise TypeError(
            f"can't convert {device_of(tensor)} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )
    return torch.Tensor.numpy(tensor, *args, **kwargs)


def _array(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    _numpy(tensor.detach())
    return torch.Tensor.__array__(tensor, *args, **kwargs)


def _tolist(tensor: torch.Tensor) -> Any:
    if on_device(tensor):
        traffic.add("sync:tolist")
    return torch.Tensor.tolist(tensor)


class _RmsNorm(torch.autograd.Function):
    """One kernel, which saves its input; on a CPU, torch composes it of operations that save float32 tensors."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, weight: torch.Tensor | None, settings: tuple[Any, ...]) -> Any:
        context.save_for_backward(tensor, weight)
        context.settings = settings
        with torch._C._DisableTorchDispatch():
            return _rms_norm_of_cpu(tensor, weight, settings)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        inputs = [tensor if tensor is None else tensor.detach().requires_grad_() for tensor in context.saved_tensors]
        with torch._C._DisableTorchDispatch(), torch.enable_grad():
            result = _rms_norm_of_cpu(*inputs, context.settings)
            grads = torch.autograd.grad(result, [tensor for tensor in inputs if tensor is not None], gradients)
        return *(put(gradient, device_of(inputs[0])) for gradient in grads), *[None] * (3 - len(grads))


def _rms_norm(
    tensor: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    in_flight.use([tensor])
    if not on_device(tensor):
        return _rms_norm_of_cpu(tensor, weight, (shape, eps))
    result = _RmsNorm.apply(tensor, weight, (shape, eps))
    return put(result, device_of(tensor))


def _rms_norm_of_cpu(tensor: torch.Tensor, weight: torch.Tensor | None, settings: tuple[Any, ...]) -> torch.Tensor:
    shape, eps = settings
    return torch.rms_norm(tensor, shape, weight, eps)


_METHODS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.rms_norm: _rms_norm,
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.cpu: lambda tensor, *args, **kwargs: _moved(tensor, CPU),
    torch.Tensor.type: _type,
    torch.Tensor.get_device: lambda tensor: device_of(tensor).index if on_device(tensor) else -1,
    torch.Tensor.pin_memory: lambda tensor, *args: pinned.allocate(tensor.clone()),
    torch.Tensor.is_pinned: lambda tensor, *args: is_pinned(tensor),
    torch.Tensor.numpy: _numpy,
    torch.Tensor.__array__: _array,
    torch.Tensor.tolist: _tolist,
}


def patch_backward(functions: DeviceFunctions) -> None:
    """Make the autograd engine create gradients on the device of what is differentiated.

    torch's own functions and Megatron's schedules, which free outputs, call the same engine.
    """
    from torch.autograd import Variable

    Variable._execution_engine = _Engine(Variable._execution_engine, functions)


class _Engine:
    def __init__(self, engine: Any, functions: DeviceFunctions) -> None:
        self._engine, self._functions = engine, functions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        inside = self._functions in _get_current_function_mode_stack()
        with _creating_on(_gpu_of(tensors)), contextlib.nullcontext() if inside else self._functions:
            return self._engine.run_backward(tensors, *args, **kwargs)
