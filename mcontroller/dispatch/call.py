"""One call of a group's method: the arguments of each shard, split from the caller's, and the collected result."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from types import FunctionType
from typing import Any

import numpy as np
import torch

from mcontroller.data.batch import DataProto, concat_batches
from mcontroller.data.meta import rows_together
from mcontroller.data.remote import RemoteColumns
from mcontroller.dispatch.modes import RANK, DispatchSpec, Plan, RowRule
from mcontroller.dispatch.registration import written_parameters
from mcontroller.errors import DataError, DispatchError
from mcontroller.partition import Partition, Restoration, split_rows
from mcontroller.trace.recorder import start_timer
from mcontroller.transport import Arguments, Deferred, Executor, Fetch, Future, Handle, InFlightCall, stored_value

Key = int | str
"""The position or the keyword of an argument."""

LOSS_MASKS = ("response_mask", "loss_mask")

_INSTANCE: Any = object()
"""A placeholder for a worker object, to bind methods without constructing one."""

_ROW = "the row in the results of the ranks"
"""Name of a column of row numbers."""


@dataclass(slots=True)
class PreparedCall:
    """One call of a method of a group.

    Attributes:
        group: the ``WorkerGroup`` that is called.
        method: name of the method.
        plan: which rank gets which shard, and which ranks return.
        shards: the arguments of each shard; empty until ``dispatch`` has split the caller's arguments.
        origin: how rows were split; None if they were not.
        changes_rows: whether the method may return another number of rows than it got.
    """

    group: Any
    method: str
    plan: Plan
    shards: Sequence[Arguments] = ()
    origin: Partition | None = None
    changes_rows: bool = False

    def of_function(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return what a function of a user's mode returns; a note on its error names the call."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            error.add_note(str(self.error(f"raised in {name}")))
            raise

    def error(self, text: str, **fields: Any) -> DispatchError:
        """Return an error about this call that names the role, the method and the mode."""
        known = {"role": self.group.name, "method": self.method, "mode": self.plan.spec.name}
        return DispatchError(f"{self.group.name}.{self.method} ({self.plan.spec}): {text}", **known, **fields)

    @property
    def arguments(self) -> dict[int, Arguments]:
        """The arguments of every rank that runs the method. Ranks with the same shard share one object."""
        return {rank: self.shards[shard] for rank, shard in zip(self.plan.ranks, self.plan.shards, strict=True)}

    def result(self, in_flight: InFlightCall, timeout: float | None = None) -> Any:
        """Wait for the ranks, and return the collected result; see ``InFlightCall.result`` and ``collect``."""
        timer = start_timer(f"{self.group.name}.{self.method}", in_flight.number)
        values = in_flight.result(timeout)
        timer("wait")
        result = self.collect(values)
        timer("collect")
        timer.end()
        return result

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
        if names:  # number the rows, to see in which order and with which of them the result is collected
            rows = [torch.arange(start, stop) for start, stop in pairwise(starts)]
            batches = [batch.with_tensors({_ROW: row}) for batch, row in zip(batches, rows, strict=True)]
        joined: DataProto = self.collect(batches)
        if not names:
            return joined
        index = joined.tensors([_ROW])[_ROW].numpy()
        executor, sources = self.group.executor, {name: name for name in names}
        remote = RemoteColumns(sources, tuple(in_flight.parts), starts, index, executor.transport, executor.fetch)
        joined.batch = None
        return joined.with_remote([remote])

    def collect(self, values: Sequence[Any]) -> Any:
        """Return the caller's result from the values of the returning ranks, in the order of the results.

        With the result ``concat``, DataProtos are joined in the order of the caller's rows, without padding rows.
        DataProtos that have only ``meta_info`` are joined as ``DataProto.concat`` does, but a key of ``meta_info``
        whose values differ keeps the value of the first returning rank. In a list, padding rows are dropped from every
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
            return self.of_function("collect_fn", spec.functions[1], self.group, list(values))
        if spec.result == "value":
            return values[0]
        if spec.result != "concat":
            return [self._without_padding(shard, value) for shard, value in enumerate(values)]
        for rank, value in zip(self.plan.collected, values, strict=True):
            if not isinstance(value, DataProto):
                raise self.error(_not_a_batch(self.plan.spec, rank, value), rank=rank, type=type(value).__name__)
        return self._join(values)

    def _join(self, values: Sequence[DataProto]) -> DataProto:
        order: tuple[int, ...] | None = None
        if self.origin is not None and any(value.has_columns() for value in values):
            lengths = [len(value) if value.has_columns() else 0 for value in values]
            if not self.changes_rows:
                self._check_same_rows(self.origin, lengths)
            keep, order = self._restored(self.origin, lengths)
            rows = zip(values, keep, strict=True)
            values = [value if kept == len(value) else value.slice(0, kept) for value, kept in rows]
        try:
            joined = concat_batches(values, keep_first=True)  # a difference in meta_info must not discard the work
        except DataError as error:
            parts = ", ".join(f"part {part} of rank {rank}" for part, rank in enumerate(self.plan.collected[:8]))
            fields = {**error.fields, "ranks": self.plan.collected}
            call = f"{self.group.name}.{self.method}"
            raise DataError(f"{call}: its results cannot be concatenated ({parts}): {error}", **fields) from error
        return joined if order is None else joined.select_idxs(order)

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


def _not_a_batch(spec: DispatchSpec, rank: int, value: object) -> str:
    """Return the error text for a rank that returned something other than a DataProto in a mode that concatenates."""
    mode = f"Dispatch.over({', '.join(map(repr, spec.axes))}, collect={dict(spec.collect)}, result='list')"
    listed = "Dispatch.DP_COMPUTE_METRIC" if spec.axes == (RANK,) else mode
    return (
        f"rank {rank} returned {'None' if value is None else type(value).__name__}; expected a DataProto, because the "
        "results are concatenated. Return DataProto.from_dict(...), or DataProto(meta_info=...) for metrics; for a "
        f"list of values, register the method with {listed}"
    )


# ---- the arguments of each shard ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SentBatch(Deferred):
    """A batch as it is sent to a rank, which fetches the tensors that are kept on workers.

    Attributes:
        sent: the columns that are sent, and the ``meta_info``.
        remote: the tensors to fetch.
        lazy: whether they are fetched when the method reads them.
        loss_free: this many rows at the end do not count in a loss.
    """

    sent: DataProto
    remote: tuple[RemoteColumns, ...]
    lazy: bool = False
    loss_free: int = 0

    def handles(self) -> Sequence[Handle]:
        """Return the handles of the tensors to fetch."""
        return [part for columns in self.remote for part in columns.parts]

    def resolve(self, fetch: Fetch) -> DataProto:
        """Return the batch."""
        batch = self.sent.with_remote([replace(columns, fetch=fetch) for columns in self.remote])
        batch = batch if self.lazy else batch.get()
        return without_loss(batch, self.loss_free) if self.loss_free else batch


def without_loss(batch: DataProto, rows: int) -> DataProto:
    """Return the batch with loss masks, in new memory, that are 0 in the last ``rows`` rows.

    Raises:
        DispatchError: the batch has no loss mask.
    """
    names = [name for name in LOSS_MASKS if name in batch.tensor_names]
    if not names:
        raise DispatchError(
            f"padding='zero_loss' sets {' or '.join(LOSS_MASKS)} to 0 in padding rows, and the batch has neither: add "
            "one, or pad with 'repeat'",
            columns=tuple(batch.tensor_names),
        )
    masks = {name: mask.clone() for name, mask in batch.tensors(names).items()}
    for mask in masks.values():
        mask[len(batch) - rows :] = 0
    return batch.with_tensors(masks)


def dispatch(
    call: PreparedCall,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rule: RowRule,
    *,
    materialize: bool = True,
    share: bool = True,
) -> PreparedCall:
    """Set the arguments of each shard of the call's plan, and return the call; the caller's arguments stay unchanged.

    Args:
        call: the call, still without arguments.
        args: positional arguments, as the caller passed them.
        kwargs: keyword arguments, as the caller passed them.
        rule: how rows are split.
        materialize: whether futures become batches before the method runs.
        share: whether the transport may store a plain value once for all its readers; False sends nothing.

    Raises:
        DispatchError: the arguments do not fit the method or its mode.
    """
    plan, group = call.plan, call.group
    if plan.spec.functions is not None:
        result = call.of_function("dispatch_fn", plan.spec.functions[0], group, *args, **kwargs)
        args, kwargs = _from_function(call, result)
    if plan.spec.leading_function and not (args and callable(args[0])):
        raise call.error(
            f"the first positional argument is {type(args[0] if args else None).__name__}; expected a function, which "
            "goes to every rank",
            argument=0,
        )
    _check_signature(call, args, kwargs)
    named: list[tuple[Key, Any]] = [*enumerate(args), *kwargs.items()]
    values = {key: _sendable(value, group.executor) for key, value in named}
    if plan.spec.arguments == "entries":
        call.shards = _entries(call, values, lazy=not materialize)
        return call
    if plan.spec.arguments == "whole":
        call.shards = [_arguments({key: _sent(value, not materialize) for key, value in values.items()})]
        return call
    shards, call.origin = _split(call, values, rule, lazy=not materialize)
    plain = {key: value for key, value in values.items() if key not in shards}
    if share and plan.shard_count > 1:
        plain = {key: group.executor.share(value, len(plan.ranks)) for key, value in plain.items()}
    call.shards = [
        _arguments({key: shards[key][shard] if key in shards else plain[key] for key in values})
        for shard in range(plan.shard_count)
    ]
    return call


def _check_signature(call: PreparedCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise DispatchError for arguments that the method does not take, before they can fail on every rank.

    For a decorated method this is the signature of the decorator's wrapper, which may change the arguments.
    """
    worker_cls = call.group.worker_cls
    try:
        _bind(worker_cls, call.method, len(args), tuple(kwargs))
    except TypeError as error:
        signature = _signature(worker_cls, call.method)
        assert signature is not None
        parameters = written_parameters(signature)
        listed = ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)
        names = tuple(parameter.name for parameter in parameters)
        raise call.error(f"{error}; it takes ({listed})", parameters=names) from error


@lru_cache(maxsize=1024)
def _bind(worker_cls: type, name: str, positional: int, keywords: tuple[str, ...]) -> None:
    """Raise TypeError unless the method takes so many positional arguments and these keywords."""
    signature = _signature(worker_cls, name)
    if signature is not None:  # else only the worker objects have the method, or its signature is not known
        signature.bind(*range(positional), **dict.fromkeys(keywords))


@lru_cache(maxsize=1024)
def _signature(worker_cls: type, name: str) -> inspect.Signature | None:
    method = inspect.getattr_static(worker_cls, name, None)
    if not isinstance(method, FunctionType | staticmethod | classmethod):
        return None
    return inspect.signature(method.__get__(_INSTANCE, worker_cls), follow_wrapped=False)


def _arguments(values: Mapping[Key, Any]) -> Arguments:
    return Arguments(
        tuple(value for key, value in values.items() if isinstance(key, int)),
        {key: value for key, value in values.items() if isinstance(key, str)},
    )


def _sendable(value: Any, executor: Executor) -> Any:
    """Return what no transport, or another one, passes on as a local value; any other value unchanged."""
    value = stored_value(value)
    if isinstance(value, Future):
        return value.get()
    if isinstance(value, DataProto) and any(columns.transport != executor.transport for columns in value.remote):
        return value.slice().get()
    return value


def _sent(value: Any, lazy: bool, loss_free: int = 0) -> Any:
    """Return the form in which a batch is sent, without a loss in its last rows; any other value unchanged."""
    if not isinstance(value, DataProto):
        return value
    if not value.remote:
        return without_loss(value, loss_free) if loss_free else value
    remote = tuple(columns.sent() for columns in value.remote)
    return SentBatch(_without_remote(value), remote, lazy, loss_free)


def _without_remote(batch: DataProto) -> DataProto:
    """Return the columns of a batch that are on no worker, without the copies of those that are."""
    return batch.select([name for name in batch.local_tensors() if name not in batch.remote_names])


def _shards(batch: DataProto, partition: Partition, lazy: bool) -> list[Any]:
    """Return the rows of each shard as they are sent."""
    if batch.remote:
        batch = _without_remote(batch).with_remote(batch.remote)
    shards: list[Any] = []
    for rows, pads in zip(partition.shards, partition.pads, strict=True):
        shard = batch.slice(rows.start, rows.stop) if isinstance(rows, range) else batch.select_idxs(rows)
        shards.append(_sent(shard, lazy, pads if partition.zero_loss else 0))
    return shards


def _from_function(call: PreparedCall, returned: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(returned, tuple) and len(returned) == 2:
        args, kwargs = returned
        if isinstance(args, tuple | list) and isinstance(kwargs, Mapping):
            return args, kwargs
    raise call.error(
        f"its dispatch_fn returned {type(returned).__name__}; expected (args, kwargs), with one list entry per rank"
    )


def _entries(call: PreparedCall, values: Mapping[Key, Any], lazy: bool) -> list[Arguments]:
    """Return the ``Arguments`` of each shard; shards with the same objects as entries share one."""
    count = call.plan.shard_count
    for key, value in values.items():
        if not isinstance(value, list | tuple) or (isinstance(value, tuple) and not call.plan.spec.tuples):
            raise call.error(
                f"{_name(key)} is {type(value).__name__}; expected a list of {count} entries, one per "
                f"{_shard_name(call)}{_entries_hint(value)}",
                argument=key,
                expected=count,
            )
        if len(value) != count:
            raise call.error(
                f"{_name(key)} has {len(value)} entries; expected {count}, one per {_shard_name(call)}",
                argument=key,
                given=len(value),
                expected=count,
            )
    by_identity: dict[tuple[int, ...], Arguments] = {}
    shards = []
    for shard in range(count):
        entries = {key: value[shard] for key, value in values.items()}
        identity = tuple(map(id, entries.values()))
        if identity not in by_identity:
            executor = call.group.executor
            by_identity[identity] = _arguments(
                {key: _sent(_sendable(value, executor), lazy) for key, value in entries.items()}
            )
        shards.append(by_identity[identity])
    return shards


def _entries_hint(value: Any) -> str:
    if isinstance(value, DataProto):
        return ": split it with chunk(), or register the method with a mode whose name ends in PROTO"
    return ": to send every rank the same value, register the method with Dispatch.ONE_TO_ALL"


def _split(
    call: PreparedCall, values: Mapping[Key, Any], rule: RowRule, lazy: bool
) -> tuple[dict[Key, Sequence[Any]], Partition | None]:
    """Return the shards of every argument that has rows, and how the rows were split."""
    batches = {key: value for key, value in values.items() if isinstance(value, DataProto)}
    if values and not (batches or call.plan.spec.leading_function):
        listed = ", ".join(f"{_name(key)} is {type(value).__name__}" for key, value in values.items())
        raise call.error(
            f"none of its arguments has rows to split: {listed}; pass a DataProto (made by from_dict or "
            "from_tensordict), or register the method with Dispatch.ONE_TO_ALL"
        )
    if not batches:
        return {}, None
    partition = _partition(call, batches, rule)
    return {key: _shards(batch, partition, lazy) for key, batch in batches.items()}, partition


def _partition(call: PreparedCall, batches: Mapping[Key, DataProto], rule: RowRule) -> Partition:
    rows = {key: len(batch) for key, batch in batches.items()}
    if len(set(rows.values())) > 1:
        listed = ", ".join(f"{_name(key)} has {length}" for key, length in rows.items())
        raise call.error(f"batches of one call must have the same number of rows: {listed}", lengths=rows)
    lengths = groups = within = None
    if rule.balance is not None:
        lengths = _with_column(call, batches, rule.balance).row_lengths(rule.balance)
    if rule.group_by is not None:
        groups = _labels(call, _with_column(call, batches, rule.group_by), rule.group_by)
    if rule.within is not None:
        within = _labels(call, _with_column(call, batches, rule.within), rule.within, several=True)
    padding = rule.padding
    if padding is None and any(batch.is_padding_enabled() for batch in batches.values()):
        padding = "repeat"
    together = math.lcm(*(rows_together(batch.meta_info, len(batch)) for batch in batches.values()))
    return split_rows(
        next(iter(rows.values())),
        call.plan.shard_count,
        padding=padding,
        lengths=lengths,
        groups=groups,
        within=within,
        together=together,
    )


def _with_column(call: PreparedCall, batches: Mapping[Key, DataProto], column: str) -> DataProto:
    for batch in batches.values():
        if column in batch.column_names():
            return batch
    raise call.error(
        f"rows are split by column {column!r}, which no batch of the call has: add it, or call with "
        f".options(balance=None, group_by=None, within=None)",
        column=column,
    )


def _labels(call: PreparedCall, batch: DataProto, column: str, several: bool = False) -> list[Hashable]:
    """Return the label of each row; with ``several``, a row of a tensor of two dims is a label."""
    columns = batch.non_tensor_batch if column in batch.non_tensor_batch else batch.tensors([column])
    values: Any = columns[column]
    labels: list[Any] = [tuple(row) if several and isinstance(row, list) else row for row in values.tolist()]
    wrong = next((label for label in labels if not isinstance(label, Hashable)), None)
    if wrong is not None:
        raise call.error(
            f"column {column!r} has {wrong!r} as the label of a row; expected a string or a number for each row",
            column=column,
        )
    return labels


def _name(key: Key) -> str:
    return f"argument {key}" if isinstance(key, int) else f"argument {key!r}"


def _shard_name(call: PreparedCall) -> str:
    axes = call.plan.spec.axes
    return "rank" if axes == ("rank",) else f"shard of {' x '.join(axes)}"
