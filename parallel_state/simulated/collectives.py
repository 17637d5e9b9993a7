"""The computation of each collective on the tensors of all its members, and the rules that their calls must keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from parallel_state.simulated.calls import Call
from parallel_state.simulated.errors import UnsupportedError

_KEY_NAMES = ("dtypes", "shapes", "reductions or roots")
_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "MIN": lambda result, other: result.copy_(torch.minimum(result, other)),
    "MAX": lambda result, other: result.copy_(torch.maximum(result, other)),
    "BAND": torch.Tensor.bitwise_and_,
    "BOR": torch.Tensor.bitwise_or_,
    "BXOR": torch.Tensor.bitwise_xor_,
}


def reduction_name(op: Any) -> str:
    """Return the name of a ``ReduceOp``; raise UnsupportedError for one that gloo does not have either."""
    kind = getattr(op, "op", op)
    for name in _REDUCE:
        if kind == getattr(ReduceOp, name):
            return name
    raise UnsupportedError(f"{kind}; simulated ranks have the reductions {', '.join(_REDUCE)}", ranks=())


def compute(calls: Sequence[Call]) -> None:
    """Compute a collective.

    Args:
        calls: the calls of all members, by rank in the group.
    """
    tensors = [tensor for call in calls for tensor in (*call.inputs, *call.outputs)]
    with torch.inference_mode(any(tensor.is_inference() for tensor in tensors)), torch.no_grad():
        _COMPUTATIONS[calls[0].operation](calls)


def transfer(send: Call, receive: Call) -> None:
    """Copy what one rank sends into the tensor of the rank that receives it."""
    with torch.inference_mode(receive.outputs[0].is_inference()), torch.no_grad():
        _copy(receive.outputs[0], send.inputs[0])


def mismatch(first: Call, other: Call) -> str | None:
    """Return why two calls of one collective do not fit together; None if they do."""
    if first.operation != other.operation:
        return "different operations"
    for name, a, b in zip(_KEY_NAMES, first.key, other.key, strict=False):
        if a != b:
            return f"different {name}"
    return _split_mismatch(first, other) if first.operation.startswith("all_to_all") else None


def _split_mismatch(first: Call, other: Call) -> str | None:
    for source, target in ((first, other), (other, first)):
        sent, expected = source.options["sends"][target.index], target.options["receives"][source.index]
        if sent != expected:
            unit = "rows" if first.operation == "all_to_all_single" else "elements"
            return (
                f"different splits: rank {source.rank} sends {sent} {unit} to rank {target.rank}, which expects "
                f"{expected}"
            )
    return None


def contradiction(call: Call) -> str | None:
    """Return why the tensors of one rank's call do not fit together; None if they do."""
    size, inputs, outputs = len(call.group.ranks), call.inputs, call.outputs
    if call.operation in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        for source, output in zip(inputs, outputs, strict=True):
            small, large = (source, output) if call.operation == "all_gather_into_tensor" else (output, source)
            if large.numel() != size * small.numel():
                return f"{large.numel()} elements are not {size} times {small.numel()}"
            if source.dtype != output.dtype:
                return f"the input is {source.dtype}, and the output {output.dtype}"
    elif call.operation == "all_gather":
        if len(outputs) != size or any(output.numel() != inputs[0].numel() for output in outputs):
            return f"expected {size} outputs of {inputs[0].numel()} elements"
    elif call.operation in ("gather", "scatter") and call.index == call.options["root"]:
        parts, mine = (outputs, inputs[0]) if call.operation == "gather" else (inputs, outputs[0])
        if len(parts) != size or any(part.numel() != mine.numel() for part in parts):
            return f"expected {size} parts of {mine.numel()} elements on the root"
    elif call.operation == "reduce_scatter":
        if len(inputs) != size or inputs[call.index].numel() != outputs[0].numel():
            return f"expected {size} inputs, the one of this rank with {outputs[0].numel()} elements"
    elif call.operation == "all_to_all":
        if not len(inputs) == len(outputs) == size:
            return f"{len(inputs)} inputs and {len(outputs)} outputs for {size} ranks"
    elif call.operation == "all_to_all_single":
        for name, tensor in (("sends", inputs[0]), ("receives", outputs[0])):
            rows = tensor.shape[0] if tensor.dim() else 0
            if len(call.options[name]) != size or sum(call.options[name]) != rows:
                return f"{name} {call.options[name]}, but the tensor has {rows} rows for {size} ranks"
    return None


def _reduced(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce in the order of gloo's ring, and round after every step as it does: the result has the same bits."""
    reduce = torch.Tensor.logical_or_ if tensors[0].dtype == torch.bool and op in ("SUM", "AVG") else _REDUCE[op]
    parts = _in_ring_order(tensors) if len(tensors) > 2 and tensors[0].is_floating_point() else list(tensors)
    result = parts[0].detach().clone()
    for part in parts[1:]:
        reduce(result, part.detach().reshape(result.shape))
    if op == "AVG":
        result.div_(len(tensors))
    return result.reshape(-1)[: tensors[0].numel()].reshape(tensors[0].shape)


def _in_ring_order(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the terms of a sum in the order of gloo's ring, each ``[chunk, elements of a chunk]``.

    Chunk ``i`` starts at rank ``i - 1`` and goes round the ring backwards (gloo/allreduce.cc, ``ring``).
    """
    size, elements = len(tensors), tensors[0].numel()
    chunk = _ring_chunk(size, elements, tensors[0].element_size())
    flat = torch.stack([tensor.detach().reshape(-1) for tensor in tensors])
    chunks = torch.nn.functional.pad(flat, (0, size * chunk - elements)).reshape(size, size, chunk)
    column = torch.arange(size)
    return [chunks[(column - 1 - step) % size, column] for step in range(size)]


def _ring_chunk(size: int, elements: int, element_size: int) -> int:
    """Return the elements of a chunk: gloo cuts a buffer into at least two segments of at most 1 MiB for each rank."""
    nbytes = elements * element_size
    segments = max(math.ceil(nbytes / (1 << 20)), 2 * size)
    per_rank = math.ceil(segments / size)
    return per_rank * math.ceil(math.ceil(nbytes / (per_rank * size)) / element_size)


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.detach().copy_(source.detach().reshape(destination.shape))


def clones(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies without gradients."""
    return [tensor.detach().clone() for tensor in tensors]


def _all_reduce(calls: Sequence[Call]) -> None:
    """Reduce tensors of one type as one buffer, as gloo does."""
    dtypes = {tensor.dtype for tensor in calls[0].inputs}
    for tensors in [[call.inputs for call in calls]] if len(dtypes) == 1 else _by_tensor(calls):
        total = _reduced([_as_one(of_rank) for of_rank in tensors], calls[0].options["op"]).reshape(-1)
        parts = torch.split(total, [tensor.numel() for tensor in tensors[0]])
        for of_rank in tensors:
            for tensor, part in zip(of_rank, parts, strict=True):
                _copy(tensor, part)


def _by_tensor(calls: Sequence[Call]) -> list[list[list[torch.Tensor]]]:
    return [[[call.inputs[index]] for call in calls] for index in range(len(calls[0].inputs))]


def _as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _reduce(calls: Sequence[Call]) -> None:
    total = _reduced([call.inputs[0] for call in calls], calls[0].options["op"])
    _copy(calls[calls[0].options["root"]].inputs[0], total)


def _broadcast(calls: Sequence[Call]) -> None:
    root = calls[calls[0].options["root"]]
    for call in calls:
        if call is not root:
            for destination, source in zip(call.inputs, root.inputs, strict=True):
                _copy(destination, source)


def _all_gather(calls: Sequence[Call]) -> None:
    sources = clones([call.inputs[0] for call in calls])
    for call in calls:
        for output, source in zip(call.outputs, sources, strict=True):
            _copy(output, source)


def _all_gather_object(calls: Sequence[Call]) -> None:
    values = [call.options["value"] for call in calls]
    for call in dict.fromkeys(calls):  # of a dry run, one call for all members that do not run
        call.options["objects"][:] = values


def _all_gather_into_tensor(calls: Sequence[Call]) -> None:
    for index in range(len(calls[0].inputs)):
        whole = torch.cat([call.inputs[index].detach().reshape(-1) for call in calls])
        for call in calls:
            _copy(call.outputs[index], whole)


def _reduce_scatter_tensor(calls: Sequence[Call]) -> None:
    for index in range(len(calls[0].inputs)):
        total = _reduced([call.inputs[index] for call in calls], calls[0].options["op"]).reshape(len(calls), -1)
        for call, part in zip(calls, total, strict=True):
            _copy(call.outputs[index], part)


def _reduce_scatter(calls: Sequence[Call]) -> None:
    op = calls[0].options["op"]
    totals = [_reduced([call.inputs[index] for call in calls], op) for index in range(len(calls))]
    for call, total in zip(calls, totals, strict=True):
        _copy(call.outputs[0], total)


def _gather(calls: Sequence[Call]) -> None:
    parts = clones([call.inputs[0] for call in calls])
    for output, part in zip(calls[calls[0].options["root"]].outputs, parts, strict=True):
        _copy(output, part)


def _scatter(calls: Sequence[Call]) -> None:
    parts = clones(calls[calls[0].options["root"]].inputs)
    for call, part in zip(calls, parts, strict=True):
        _copy(call.outputs[0], part)


def _all_to_all(calls: Sequence[Call]) -> None:
    sent = [clones(call.inputs) for call in calls]
    for call in calls:
        for source, output in enumerate(call.outputs):
            _copy(output, sent[source][call.index])


def _all_to_all_single(calls: Sequence[Call]) -> None:
    sent = [torch.split(call.inputs[0].detach().clone(), call.options["sends"]) for call in calls]
    for call in calls:
        for source, output in enumerate(torch.split(call.outputs[0].detach(), call.options["receives"])):
            _copy(output, sent[source][call.index])


def _nothing(calls: Sequence[Call]) -> None:
    """Only wait for all members."""


_COMPUTATIONS: dict[str, Callable[[Sequence[Call]], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_object": _all_gather_object,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _nothing,
}
