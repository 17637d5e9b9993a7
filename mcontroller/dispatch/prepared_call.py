"""PreparedCall: one call of a group's method, with the arguments of each shard and how its results are collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from mcontroller.data.protocol import DataProto, concat_batches
from mcontroller.data.remote import RemoteColumns
from mcontroller.data.rows import concat_on_one_thread
from mcontroller.dispatch.modes import RANK, ArgumentRule, DispatchSpec, Plan, ResultRule
from mcontroller.errors import DataError, DispatchError
from mcontroller.partition import Partition, Restoration
from mcontroller.transport import Arguments, Executor, Future, InFlightCall

__all__ = ["CallingGroup", "PreparedCall"]

_ROW = "the row in the results of the ranks"
"""Name of a column of row numbers."""


class CallingGroup(Protocol):
    """The part of a ``WorkerGroup`` that a prepared call uses."""

    @property
    def name(self) -> str:
        """The role, as error messages name it."""

    @property
    def worker_cls(self) -> type:
        """The class of the worker objects."""

    @property
    def executor(self) -> Executor:
        """The executor that runs the call on the ranks."""


@dataclass(frozen=True)
class PreparedCall:
    """One call of a method of a group.

    Attributes:
        group: the group that is called.
        method: name of the method.
        plan: which rank gets which shard, and which ranks return.
        shards: the arguments of each shard; empty until ``dispatch`` has split the caller's arguments.
        origin: how rows were split; None if they were not.
        changes_rows: whether the method may return another number of rows than it got.
    """

    group: CallingGroup
    method: str
    plan: Plan
    shards: Sequence[Arguments] = ()
    origin: Partition | None = None
    changes_rows: bool = False

    def error(self, text: str, **fields: Any) -> DispatchError:
        """Return an error about this call that names the role, the method and the mode."""
        known = {"role": self.group.name, "method": self.method, "mode": self.plan.spec.name}
        return DispatchError(f"{self.group.name}.{self.method} ({self.plan.spec}): {text}", **known, **fields)

    @property
    def arguments(self) -> dict[int, Arguments]:
        """The arguments of every rank that runs the method. Ranks with the same shard share one object."""
        return {rank: self.shards[shard] for rank, shard in zip(self.plan.ranks, self.plan.shards, strict=True)}

    @property
    def concatenates(self) -> bool:
        """Whether the result is one DataProto, which can be passed on before it has arrived."""
        return self.plan.spec.result == "concat"

    def future(self, in_flight: InFlightCall) -> Future[Any]:
        """Return the future of the collected result."""

        def collected(timeout: float | None) -> Any:
            joined = self.concatenates and len(self.plan.collected) > 1
            return self.collect(in_flight.result(timeout, joined=joined))

        return Future(in_flight, collected)

    def kept(self, in_flight: InFlightCall) -> DataProto:
        """Return the collected result of a call that has succeeded; its tensors stay on the workers.

        Raises:
            DispatchError: as ``collect``.
            DataError: as ``collect``.
        """
        outlines = None if in_flight.is_read else self.group.executor.fetch(in_flight.outlines)
        if outlines is None or None in outlines or len({frozenset(names) for names, _ in outlines}) > 1:
            whole: DataProto = self.collect(in_flight.result())  # raises if the values cannot be concatenated
            return whole
        names, batches = outlines[0][0], [batch for _, batch in outlines]
        starts = np.cumsum([0, *map(len, batches)])
        if not names:
            joined: DataProto = self.collect(batches)
            return joined
        rows = [torch.arange(start, stop) for start, stop in pairwise(starts)]
        numbered: DataProto = self.collect(
            [batch.with_tensors({_ROW: row}) for batch, row in zip(batches, rows, strict=True)]
        )
        index = numbered.pop([_ROW]).tensors()[_ROW].numpy()
        executor = self.group.executor
        sources = {name: name for name in names}
        remote = RemoteColumns(sources, tuple(in_flight.parts), starts, index, executor.transport, executor.fetch)
        return numbered.derive(None, numbered.non_tensor_batch, numbered.meta_info, [remote])

    def collect(self, values: Sequence[Any]) -> Any:
        """Return the caller's result from the values of the returning ranks, in the order of the results.

        With the result ``concat``, DataProtos are joined in the order of the caller's rows, without padding rows.
        DataProtos that have only ``meta_info`` are joined as ``DataProto.concat`` does, but a key of ``meta_info``
        whose values differ keeps that of the first returning rank. In a list, padding rows are dropped from every
        DataProto.

        Args:
            values: the values.

        Raises:
            DispatchError: a rank returned something other than a DataProto for ``concat``, or another number of rows
                than it got without ``changes_rows``; or padding or a changed order of rows cannot be undone, because
                the rows of a shard did not all come back as the same number of rows.
        """
        spec = self.plan.spec
        if spec.functions is not None:
            return spec.functions[1](self.group, list(values))
        if spec.result == "value":
            return values[0]
        if not self.concatenates:
            return [self._without_padding(shard, value) for shard, value in enumerate(values)]
        for rank, value in zip(self.plan.collected, values, strict=True):
            if not isinstance(value, DataProto):
                raise self.error(_not_a_batch(self.plan.spec, rank, value), rank=rank, type=type(value).__name__)
        return self._join(values)

    def _join(self, values: Sequence[DataProto]) -> DataProto:
        if self.origin is None or not any(value.has_columns() for value in values):
            return self._concat(values)
        lengths = [len(value) if value.has_columns() else 0 for value in values]
        if not self.changes_rows:
            self._check_same_rows(self.origin, lengths)
        keep, order = self._restored(self.origin, lengths)
        kept = [value if rows == len(value) else value.slice(0, rows) for value, rows in zip(values, keep, strict=True)]
        joined = self._concat(kept)
        return joined if order is None else joined.select_idxs(order)

    def _concat(self, values: Sequence[DataProto]) -> DataProto:
        try:
            # On one thread, because the workers need the cores. A difference in meta_info must not discard their work.
            return concat_batches(values, concat_on_one_thread, keep_first=True)
        except DataError as error:
            parts = ", ".join(f"part {part} of rank {rank}" for part, rank in enumerate(self.plan.collected[:8]))
            fields = {**error.fields, "ranks": self.plan.collected}
            call = f"{self.group.name}.{self.method}"
            raise DataError(f"{call}: its results cannot be concatenated ({parts}): {error}", **fields) from error

    def _check_same_rows(self, origin: Partition, lengths: Sequence[int]) -> None:
        received = [len(rows) for rows in origin.shards]
        differing = [
            f"rank {rank} got {rows} rows and returned {count}"
            for rank, rows, count in zip(self.plan.collected, received, lengths, strict=True)
            if count != rows
        ]
        if not differing or not any(received):  # a batch of meta_info alone promises nothing
            return
        more = f" and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise self.error(
            f"{'; '.join(differing[:8])}{more}: return a row for each row, or declare that the method returns another "
            "number with @register(..., changes_rows=True)",
            returned=tuple(lengths),
            ranks=self.plan.collected,
        )

    def _without_padding(self, shard: int, value: Any) -> Any:
        origin = self.origin
        if origin is None or not origin.pads[shard] or not isinstance(value, DataProto) or not value.has_columns():
            return value
        lengths = [len(value) if index == shard else 0 for index in range(len(origin.shards))]
        return value.slice(0, self._restored(origin, lengths).keep[shard])

    def _restored(self, origin: Partition, lengths: Sequence[int]) -> Restoration:
        try:
            return origin.restore(lengths)
        except DataError as error:
            raise self.error(str(error), **error.fields) from error


def _not_a_batch(spec: DispatchSpec[ArgumentRule, ResultRule], rank: int, value: object) -> str:
    """Return the error text for a rank that returned something other than a DataProto in a mode that concatenates."""
    mode = f"Dispatch.over({', '.join(map(repr, spec.axes))}, collect={dict(spec.collect)}, result='list')"
    listed = "Dispatch.DP_COMPUTE_METRIC" if spec.axes == (RANK,) else mode
    return (
        f"rank {rank} returned {'None' if value is None else type(value).__name__}; expected a DataProto, because the "
        "results are concatenated. Return DataProto.from_dict(...), or DataProto(meta_info=...) for metrics; for a "
        f"list of values, register the method with {listed}"
    )
