"""Known values of tensors without memory: of small integers, from which shapes follow, and of small constants.

A known value is an attribute of the tensor. An operation whose inputs are all known computes its result's value too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from parallel_state.hangs.lines import calling_line

BRANCH = "decides a branch"
"""What a line does with an unknown value if it reads it as True or False."""
_MOST_INTEGERS, _MOST_FLOATS = 1 << 23, 1 << 10
_CPU = torch.device("cpu")
_aten = torch.ops.aten


class UnknownValue(Exception):
    """A value that nobody knows decides about a shape."""


ValuesRead = Counter[tuple[str, str]]
"""How many values a rank read that nobody knows, by line of the program and by what read them."""


def note_read(read: ValuesRead, what: str) -> None:
    """Count a value that the running line reads."""
    place = calling_line()
    read[place.through or place.line, what] += 1


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the value of a tensor; None if it is not known."""
    if not tensor.is_meta:
        return tensor
    value: torch.Tensor | None = getattr(tensor, "known", None)
    return None if value is None or hasattr(value.untyped_storage(), "forgotten") else value


def set_value(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
    """Set the value of a tensor without memory; or forget it, with those of all tensors that share its memory."""
    if value is not None:
        tensor.known = value  # type: ignore[attr-defined]
    elif hasattr(tensor, "known"):
        tensor.known.untyped_storage().forgotten = True
        del tensor.known


def is_small(tensor: torch.Tensor) -> bool:
    """Whether the value of a tensor of this size and type is kept."""
    return tensor.numel() <= (_MOST_FLOATS if tensor.is_floating_point() else _MOST_INTEGERS)


def with_value(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory that has a known value."""
    result = torch.empty(value.shape, dtype=value.dtype, device="meta")
    set_value(result, value)
    return result


def any_is_known(arguments: Any) -> bool:
    """Whether a tensor without memory among the arguments has a known value."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            if hasattr(argument, "known"):
                return True
        elif isinstance(argument, (list, tuple)) and any(hasattr(item, "known") for item in argument):
            return True
    return False


def compute_value(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Compute the values of an operation's results if those of its inputs are known."""
    tensors = [
        one for one in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(one, torch.Tensor)
    ]
    try:
        if not all(map(is_small, tensors)):
            raise UnknownValue
        values = func(*_known(args), **{name: _known(value) for name, value in kwargs.items()})
    except UnknownValue:
        if func._schema.is_mutable:
            for tensor in tensors:
                set_value(tensor, None)
        return
    listed = values if isinstance(values, (list, tuple)) else [values]
    for tensor, value in zip(tensors, [one for one in listed if isinstance(one, torch.Tensor)], strict=True):
        if tensor.is_meta:
            set_value(tensor, value)


def _known(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        value = value_of(argument)
        if value is None:
            raise UnknownValue
        return value
    if isinstance(argument, (list, tuple)):
        return type(argument)(_known(item) for item in argument)
    return _CPU if isinstance(argument, torch.device) else argument


# ---- operations that move values between host and device, or whose results' shapes follow from values --------------

Handler = Callable[[ValuesRead, Any, Any, Any], Any]


def _to_copy(read: ValuesRead, func: Any, args: Any, kwargs: Any) -> Any:
    source, device = args[0], kwargs.get("device")
    if device is None or device.type == source.device.type:
        return NotImplemented
    if source.is_meta:
        return _to_host(read, source).to(kwargs.get("dtype") or source.dtype, copy=True)
    result = func(*args, **kwargs)
    if is_small(result):
        set_value(result, source.detach().to(result.dtype, copy=True))
    return result


def _to_host(read: ValuesRead, source: torch.Tensor) -> torch.Tensor:
    value = value_of(source)
    if value is None:
        note_read(read, "copied to the host")
        value = torch.full(source.shape, source.dtype != torch.bool, dtype=source.dtype)
    return value


def _copy(read: ValuesRead, func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[:2]
    if target.is_meta:
        if source.is_meta:
            func(*args, **kwargs)  # checks the shapes
        value, old = value_of(source) if is_small(target) else None, value_of(target)
        if value is not None and old is not None:
            old.copy_(value)  # the value of a view is a view
        else:
            set_value(target, None if value is None else value.expand(target.shape).to(target.dtype, copy=True))
        return target
    if source.is_meta:
        target.copy_(_to_host(read, source))
        return target
    return NotImplemented


def _item(read: ValuesRead, func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    if not source.is_meta:
        return NotImplemented
    value = value_of(source)
    if value is not None:
        return value.item()
    note_read(read, "read on the host")
    return False if source.dtype == torch.bool else 1.0 if source.is_floating_point() else 1


def _equal(read: ValuesRead, func: Any, args: Any, kwargs: Any) -> Any:
    if not any(tensor.is_meta for tensor in args[:2]):
        return NotImplemented
    values = [value_of(tensor) for tensor in args[:2]]
    if None not in values:
        return torch.equal(*values)  # type: ignore[arg-type]
    note_read(read, "compared on the host")
    return args[0].shape == args[1].shape


def _mask(mask: torch.Tensor, what: str) -> torch.Tensor:
    value = value_of(mask)
    if value is None:
        raise UnknownValue(f"{what}: the number of results follows from values that a dry run does not have")
    return value


def _masked_select(read: ValuesRead, func: Any, args: Any, kwargs: Any) -> Any:
    source, mask = args
    if not (source.is_meta or mask.is_meta):
        return NotImplemented
    chosen, value = _mask(mask, "masked_select"), value_of(source)
    if value is not None:
        return with_value(torch.masked_select(value, chosen))
    shape = torch.broadcast_shapes(chosen.shape, source.shape)  # type: ignore[no-untyped-call]
    count = int(chosen.expand(shape).sum())
    return torch.empty(count, dtype=source.dtype, device="meta")


def _nonzero(read: ValuesRead, func: Any, args: Any, kwargs: Any) -> Any:
    return with_value(_mask(args[0], "nonzero").nonzero()) if args[0].is_meta else NotImplemented


def _index(read: ValuesRead, func: Any, args: Any, kwargs: Any) -> Any:
    source, indices = args[0], list(args[1])
    masks = [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
    if not masks or not (source.is_meta or any(mask.is_meta for mask in masks)):
        return NotImplemented
    positions: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            positions.append(index)
        else:
            positions += [with_value(one) for one in _mask(index, "indexing with a mask").nonzero(as_tuple=True)]
    return func(source, positions, *args[2:], **kwargs)


def _constant(read: ValuesRead, func: Any, args: Any, kwargs: Any) -> Any:
    device = kwargs.get("device")
    if device is None or device.type != "meta":
        return NotImplemented
    result = func(*args, **kwargs)
    if result.numel() <= _MOST_FLOATS or (func.overloadpacket is _aten.arange and is_small(result)):
        set_value(result, func(*args, **(kwargs | {"device": _CPU})))
    return result


def _constant_like(read: ValuesRead, func: Any, args: Any, kwargs: Any) -> Any:
    result = func(*args, **kwargs)
    if result.is_meta and result.numel() <= _MOST_FLOATS:
        options = kwargs | ({"device": _CPU} if kwargs.get("device") is not None else {})
        set_value(result, func(torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:], **options))
    return result


def _random(read: ValuesRead, func: Any, args: Any, kwargs: Any) -> Any:
    """Leave large tensors of the host as they are: a model whose weights are made there is not read."""
    return NotImplemented if args[0].is_meta or is_small(args[0]) else args[0]


def _fused_optimizer(read: ValuesRead, func: Any, args: Any, kwargs: Any) -> Any:
    return None if args[0] and args[0][0].is_meta else NotImplemented


HANDLERS: dict[Any, Handler] = (
    {
        _aten._to_copy: _to_copy,
        _aten.copy_: _copy,
        _aten._local_scalar_dense: _item,
        _aten.equal: _equal,
        _aten.masked_select: _masked_select,
        _aten.nonzero: _nonzero,
        _aten.index: _index,
        _aten.uniform_: _random,
        _aten.normal_: _random,
        _aten._fused_adam_: _fused_optimizer,
        _aten._fused_adamw_: _fused_optimizer,
    }
    | dict.fromkeys((_aten.arange, _aten.zeros, _aten.ones, _aten.full, _aten.scalar_tensor), _constant)
    | dict.fromkeys((_aten.zeros_like, _aten.ones_like, _aten.full_like), _constant_like)
)
"""Operation -> what computes it instead; it returns NotImplemented for those that torch computes as always."""
