"""A call that has been dispatched: what it sends, and how what comes back is put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mcontroller.data.copies import concat_on_one_thread
from mcontroller.data.protocol import DataProto, concat_batches
from mcontroller.dispatch.future import DataProtoFuture, Future
from mcontroller.dispatch.modes import Plan
from mcontroller.dispatch.remote_batch import ResultBatch, Split
from mcontroller.errors import DataError, DispatchError
from mcontroller.partition import Partition, Restoration
from mcontroller.transport import Arguments, Executor, Pending, RankCall

__all__ = ["Call", "Caller", "Dispatched"]


class Caller(Protocol):
    """The group that calls."""

    @property
    def name(self) -> str: ...

    @property
    def worker_cls(self) -> type: ...

    @property
    def executor(self) -> Executor: ...


@dataclass(frozen=True)
class Call:
    """Who is called and how, for dispatching and for what errors say."""

    group: Caller
    method: str
    plan: Plan

    def error(self, text: str, **fields: Any) -> DispatchError:
        who = {"role": self.group.name, "method": self.method, "mode": self.plan.spec.name}
        return DispatchError(f"{self.group.name}.{self.method} ({self.plan.spec}): {text}", **who, **fields)


@dataclass(frozen=True)
class Dispatched:
    """What a call sends, and how what comes back is put together.

    ``shards`` are the arguments of each shard; ``origin`` says how rows were split (None: they were not).
    """

    call: Call
    shards: Sequence[Arguments]
    origin: Partition | Split | None

    @property
    def plan(self) -> Plan:
        return self.call.plan

    @property
    def calls(self) -> list[RankCall]:
        """One per running rank, in rank order."""
        returning = set(self.plan.collected)
        return [
            RankCall(rank, self.shards[shard], rank in returning)
            for rank, shard in zip(self.plan.ranks, self.plan.shards, strict=True)
        ]

    @property
    def concatenates(self) -> bool:
        """Whether the result is one DataProto, which can be passed on before it is there."""
        return self.plan.spec.result == "concat"

    def future(self, pending: Pending, executor: Executor) -> Future:
        """The future of the collected result."""

        def collected(timeout: float | None) -> Any:
            joined = self.concatenates and len(self.plan.collected) > 1
            return self.collect(self._in_order(pending.result(timeout, joined=joined)), executor)

        if not (self.concatenates and pending.lengths):
            return Future([pending], collected)
        parts, lengths = self._in_order(pending.parts), self._in_order(pending.lengths)
        rows = ResultBatch(tuple(parts), tuple(lengths), self.origin, f"{self.call.group.name}.{self.call.method}")
        return DataProtoFuture(rows, executor.fetch, [pending], transport=executor.transport, collect=collected)

    def _in_order(self, by_rank: Sequence[Any]) -> list[Any]:
        """From the order of ranks to the order of results."""
        place = {rank: index for index, rank in enumerate(sorted(self.plan.collected))}
        return [by_rank[place[rank]] for rank in self.plan.collected]

    def collect(self, values: Sequence[Any], executor: Executor) -> Any:
        """The caller's result from the values of the collecting ranks, in the order of results.

        A result of ``concat``: DataProtos are joined in the order of the caller's rows, without padding rows; those
        that hold only ``meta_info`` are joined as ``DataProto.concat`` joins it; any other values stay a list. In a
        list, padding rows are dropped from every DataProto. Raises DispatchError where padding or a changed order
        cannot be undone, since a shard's rows did not come back as the same number of rows each.
        """
        spec = self.plan.spec
        if spec.functions is not None:
            return spec.functions[1](self.call.group, list(values))
        if spec.result == "value":
            return values[0]
        origin = self.origin.partition(executor.fetch) if isinstance(self.origin, Split) else self.origin
        if not self.concatenates:
            return [self._own_rows(origin, shard, value) for shard, value in enumerate(values)]
        if not all(isinstance(value, DataProto) for value in values):
            return list(values)
        return self._join(origin, values)

    def _join(self, origin: Partition | None, values: Sequence[DataProto]) -> DataProto:
        if origin is None or not any(value.has_columns() for value in values):
            return self._concat(values)
        keep, order = self._restored(origin, [len(value) for value in values])
        kept = [value if rows == len(value) else value.slice(0, rows) for value, rows in zip(values, keep, strict=True)]
        joined = self._concat(kept)
        return joined if order is None else joined.select_idxs(order)

    def _concat(self, values: Sequence[DataProto]) -> DataProto:
        try:
            return concat_batches(values, concat_on_one_thread)  # the workers need the cores for their next call
        except DataError as error:
            who = f"{self.call.group.name}.{self.call.method}"
            parts = ", ".join(f"part {part} of rank {rank}" for part, rank in enumerate(self.plan.collected[:8]))
            fields = {**error.fields, "ranks": self.plan.collected}
            raise DataError(f"{who}: its results do not join ({parts}): {error}", **fields) from error

    def _own_rows(self, origin: Partition | None, shard: int, value: Any) -> Any:
        if origin is None or not origin.pads[shard] or not isinstance(value, DataProto) or not value.has_columns():
            return value
        lengths = [len(value) if index == shard else 0 for index in range(len(origin.shards))]
        return value.slice(0, self._restored(origin, lengths).keep[shard])

    def _restored(self, origin: Partition, lengths: Sequence[int]) -> Restoration:
        try:
            return origin.restore(lengths)
        except DataError as error:
            raise self.call.error(str(error), **error.fields) from error
