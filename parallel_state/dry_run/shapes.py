"""The matching of collectives and transfers without data, among the ranks that run.

A rank that does not run is assumed to call what a running member of its group calls, with tensors of the same shapes;
where objects are gathered, a member of its stage. What it broadcasts is what a rank in its place has broadcast before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from parallel_state.dry_run.memory import Storage, storage_of
from parallel_state.dry_run.values import is_small, set_value, value_of
from parallel_state.layout import ParallelLayout
from parallel_state.simulated.calls import Call
from parallel_state.simulated.collectives import compute, transfer
from parallel_state.simulated.exchange import Exchange

_IDEMPOTENT = ("MIN", "MAX", "BAND", "BOR")

Broadcasts = dict[tuple[Any, ...], torch.Tensor]
"""Known values by the stage, the axis and root of the group, and the number of the broadcast."""


class ShapeExchange(Exchange):
    """Matches the calls of running ranks by order, shape, dtype and group.

    Args:
        layout: the layout of the ranks.
        running: the ranks that run together; the calls of others are complete at once.
        broadcasts: values of ranks that have run; those of running ranks are added.
        exchange: the arguments of ``Exchange``.
    """

    devices = ("cpu", "meta")

    def __init__(
        self, layout: ParallelLayout, running: Collection[int], broadcasts: Broadcasts, *exchange: Any
    ) -> None:
        super().__init__(*exchange)
        self._broadcasts, self._numbers = broadcasts, Counter[tuple[int, str]]()
        self._running = frozenset(running)
        self._stages = {rank: stage for ranks in layout.groups("pp") for stage, rank in enumerate(ranks)}

    def members(self, call: Call) -> list[int]:
        """Return the members that run, by their ranks in the group."""
        if call.rank not in self._running:
            return [call.index]
        return [index for index, rank in enumerate(call.group.ranks) if rank in self._running]

    def runs(self, rank: int) -> bool:
        """Whether a rank runs."""
        return rank in self._running

    def compute(self, calls: Sequence[Call]) -> None:
        """Compute known values of a collective's results, and count the storages as those of communication."""
        for call in calls:
            for tensor in call.outputs:
                storage = storage_of(tensor)
                if storage is not None and storage.kind == "activations":
                    storage.change_kind("communication")
        tensors = [tensor for call in calls for tensor in (*call.inputs, *call.outputs)]
        if calls[0].operation == "broadcast":
            calls = self._with_root(calls)
        root = calls[0].options.get("root")
        sources = [call for call in calls if call.index == root] if calls[0].operation == "broadcast" else calls
        inputs = [tensor for call in sources for tensor in call.inputs]
        if calls[0].operation == "all_gather_object":
            compute(self._objects_of_all(calls))
        elif not any(tensor.is_meta for tensor in tensors):
            _compute_with_absent(calls)
        elif inputs and all(is_small(tensor) and value_of(tensor) is not None for tensor in inputs):
            self._compute_values(calls)
        else:
            for tensor in (tensor for call in calls for tensor in (call.outputs or call.inputs)):
                if tensor.is_meta:
                    set_value(tensor, None)

    def transfer(self, send: Call, receive: Call) -> None:
        """Give the receiver the value that is sent, if it is known."""
        source, target = send.inputs[0], receive.outputs[0]
        if not (source.is_meta or target.is_meta):
            transfer(send, receive)
            return
        storage: Storage | None = storage_of(target)
        if storage is not None and storage.kind == "activations":
            storage.change_kind("communication")
        value = value_of(source)
        if target.is_meta:
            set_value(target, value.clone().reshape(target.shape) if value is not None and is_small(target) else None)

    def _with_root(self, calls: Sequence[Call]) -> Sequence[Call]:
        """Return the calls of a broadcast, with one of a root that does not run if one in its place has run."""
        call, root = calls[0], calls[0].options["root"]
        member = call.rank, call.group.name
        self._numbers[member] += 1
        place = self._stages[call.rank], call.group.description, call.group.axis, root, self._numbers[member]
        if sent := [one.inputs[0] for one in calls if one.index == root]:
            value = value_of(sent[0]) if is_small(sent[0]) else None
            if value is not None:
                self._broadcasts[place] = value.clone()
            return calls
        value = self._broadcasts.get(place)
        if value is None or value.shape != call.inputs[0].shape:
            return calls
        return [*calls, replace(call, index=root, rank=call.group.ranks[root], inputs=[value.clone()])]

    def _objects_of_all(self, calls: Sequence[Call]) -> list[Call]:
        """Return a call of each member of the group; one that does not run gives what its stage gives."""
        group, stages = calls[0].group, {self._stages[call.rank]: call for call in reversed(calls)}
        present = {call.index: call for call in calls}
        return [
            present.get(index) or stages.get(self._stages[rank], calls[0]) for index, rank in enumerate(group.ranks)
        ]

    def _compute_values(self, calls: Sequence[Call]) -> None:
        values: dict[int, torch.Tensor] = {}

        def value(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in values:
                known = value_of(tensor)
                values[id(tensor)] = torch.zeros(tensor.shape, dtype=tensor.dtype) if known is None else known.clone()
            return values[id(tensor)]

        of_values = [
            replace(call, inputs=list(map(value, call.inputs)), outputs=list(map(value, call.outputs)))
            for call in calls
        ]
        _compute_with_absent(of_values)
        for tensor in (tensor for call in calls for tensor in (call.outputs or call.inputs)):
            if tensor.is_meta:
                set_value(tensor, values[id(tensor)])
            else:
                tensor.copy_(values[id(tensor)])


def _compute_with_absent(calls: Sequence[Call]) -> None:
    """Compute a collective on the host; members that do not run do what the first of the others does."""
    with _disable_current_modes():
        compute(_with_absent(calls))


def _with_absent(calls: Sequence[Call]) -> Sequence[Call]:
    first, present = calls[0], {call.index: call for call in calls}
    absent = [index for index in range(len(first.group.ranks)) if index not in present]
    if absent and first.operation == "all_reduce":  # of thousands of ranks, without a call for each
        if first.options["op"] in _IDEMPOTENT:
            return calls
        if first.options["op"] == "SUM":
            others = _stand_in(first, absent[0])
            return [*calls, replace(others, inputs=[tensor.mul_(len(absent)) for tensor in others.inputs])]
    return [present.get(index) or _stand_in(first, index) for index in range(len(first.group.ranks))]


def _stand_in(call: Call, index: int) -> Call:
    outputs = [torch.empty_like(tensor) for tensor in call.outputs]
    inputs = [tensor.clone() for tensor in call.inputs]
    return replace(call, index=index, rank=call.group.ranks[index], inputs=inputs, outputs=outputs)
