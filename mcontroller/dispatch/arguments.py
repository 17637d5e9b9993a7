"""Dispatch of a call's arguments: split the caller's batches and return the arguments of each shard."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import FunctionType
from typing import Any

from mcontroller.data.protocol import DataProto
from mcontroller.dispatch.future import DataProtoFuture, Future, LazyBatch
from mcontroller.dispatch.modes import RowRule
from mcontroller.dispatch.prepared_call import PreparedCall
from mcontroller.dispatch.referenced import ReferencedBatch, ReferencedShard
from mcontroller.dispatch.registration import owner_of, written_parameters
from mcontroller.dispatch.remote_batch import Part, RemoteBatch, ResultBatch, Split, Window, take_shard
from mcontroller.partition import Partition, split_rows
from mcontroller.transport import Arguments, Executor

__all__ = ["dispatch"]

Key = int | str
"""The position or the keyword of an argument."""

CountedBatch = DataProto | ReferencedBatch
"""An argument whose number of rows is known."""


def dispatch(
    call: PreparedCall,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rule: RowRule,
    *,
    materialize: bool = True,
    share: bool = True,
) -> PreparedCall:
    """Return the call with the arguments of each shard of its plan; the caller's arguments stay unchanged.

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
    if plan.spec.functions is not None or plan.spec.arguments != "rows":
        args = [value.here() if isinstance(value, ReferencedBatch) else value for value in args]
        kwargs = {key: value.here() if isinstance(value, ReferencedBatch) else value for key, value in kwargs.items()}
    if plan.spec.functions is not None:
        args, kwargs = _from_function(call, plan.spec.functions[0](group, *args, **kwargs))
    _check_leading_function(call, args)
    _check_signature(call, args, kwargs)
    named: list[tuple[Key, Any]] = [*enumerate(args), *kwargs.items()]
    values = {key: _fetch_if_foreign(value, group.executor) for key, value in named}
    if plan.spec.arguments == "entries":
        return replace(call, shards=_entries(call, values, materialize))
    if plan.spec.arguments == "whole":
        whole = {key: _passed(value, materialize) for key, value in values.items()}
        return replace(call, shards=[_arguments(whole)])
    shards, origin = _split(call, values, rule)
    plain = {key: value for key, value in values.items() if key not in shards}
    if share and plan.shard_count > 1:
        plain = {key: group.executor.share(value, len(plan.ranks)) for key, value in plain.items()}
    by_shard = [_of_shard(values, plain, shards, shard, materialize) for shard in range(plan.shard_count)]
    result = next((key for key, of_key in shards.items() if isinstance(of_key[0], Part)), None)
    received = None if result is None else values[result].rows.as_received()
    return replace(call, shards=[_arguments(of_shard) for of_shard in by_shard], origin=origin, received=received)


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
        taken = written_parameters(signature)
        listed = ", ".join(str(each.replace(annotation=each.empty)) for each in taken)
        raise call.error(f"{error}; it takes ({listed})", taken=tuple(each.name for each in taken)) from error


@lru_cache(maxsize=1024)
def _bind(worker_cls: type, name: str, positional: int, keywords: tuple[str, ...]) -> None:
    """Raise TypeError unless the method takes so many positional arguments and these keywords."""
    signature = _signature(worker_cls, name)
    if signature is not None:  # else only the worker objects have the method, or its signature is not known
        signature.bind(*range(positional), **dict.fromkeys(keywords))


@lru_cache(maxsize=1024)
def _signature(worker_cls: type, name: str) -> inspect.Signature | None:
    method = inspect.getattr_static(owner_of(worker_cls, name), name, None)
    if not isinstance(method, FunctionType | staticmethod | classmethod):
        return None
    return inspect.signature(method.__get__(_INSTANCE, worker_cls), follow_wrapped=False)


_INSTANCE: Any = object()
"""A placeholder for a worker object, to bind methods without constructing one."""


def _arguments(values: Mapping[Key, Any]) -> Arguments:
    return Arguments(
        tuple(value for key, value in values.items() if isinstance(key, int)),
        {key: value for key, value in values.items() if isinstance(key, str)},
    )


def _of_shard(
    keys: Iterable[Key], plain: Mapping[Key, Any], shards: Mapping[Key, Sequence[Any]], shard: int, materialize: bool
) -> dict[Key, Any]:
    return {key: _passed(shards[key][shard], materialize) if key in shards else plain[key] for key in keys}


def _fetch_if_foreign(value: Any, executor: Executor) -> Any:
    """Return the value of what the group's transport cannot pass on; any other value unchanged."""
    if isinstance(value, ReferencedBatch):
        return value if value.transports <= {executor.transport} else value.here()
    if not isinstance(value, Future) or (isinstance(value, DataProtoFuture) and value.transport == executor.transport):
        return value
    return value.get()


def _passed(value: Any, materialize: bool) -> Any:
    """Return the ``Deferred`` that replaces a future; any other value unchanged."""
    rows = value.rows if isinstance(value, DataProtoFuture) else value
    return rows if materialize or not isinstance(rows, RemoteBatch | Part) else LazyBatch(rows)


def _from_function(call: PreparedCall, returned: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(returned, tuple) and len(returned) == 2:
        args, kwargs = returned
        if isinstance(args, tuple | list) and isinstance(kwargs, Mapping):
            return args, kwargs
    raise call.error(
        f"its dispatch_fn returned {type(returned).__name__}; expected (args, kwargs), with one list entry per rank"
    )


def _entries(call: PreparedCall, values: Mapping[Key, Any], materialize: bool) -> list[Arguments]:
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
                {key: _passed(_fetch_if_foreign(value, executor), materialize) for key, value in entries.items()}
            )
        shards.append(by_identity[identity])
    return shards


def _entries_hint(value: Any) -> str:
    if isinstance(value, DataProto | DataProtoFuture):
        return ": split it with chunk(), or register the method with a mode whose name ends in PROTO"
    return ": to send every rank the same value, register the method with Dispatch.ONE_TO_ALL"


def _check_leading_function(call: PreparedCall, args: Sequence[Any]) -> None:
    first = args[0] if args else None
    if call.plan.spec.leading_function and not callable(first):
        raise call.error(
            f"the first argument is {type(first).__name__}; expected a function, which goes to every rank",
            argument=0,
        )


def _split(
    call: PreparedCall, values: Mapping[Key, Any], rule: RowRule
) -> tuple[dict[Key, Sequence[Any]], Partition | Split | None]:
    """Return the shards of every argument that has rows, and how the rows were split."""
    batches = {key: value for key, value in values.items() if isinstance(value, DataProto | ReferencedBatch)}
    futures = {key: value.rows for key, value in values.items() if isinstance(value, DataProtoFuture)}
    rows = _same_rows(call, batches)
    if values and not (batches or futures or call.plan.spec.leading_function):
        listed = ", ".join(f"{_name(key)} is {type(value).__name__}" for key, value in values.items())
        raise call.error(
            f"none of its arguments has rows to split: {listed}; pass a DataProto (made by from_dict or "
            "from_tensordict), or register the method with Dispatch.ONE_TO_ALL"
        )
    if futures:
        return _split_futures(call, batches, futures, rows, rule)
    if not batches:
        return {}, None
    partition = _partition(call, batches, rows, rule)
    return {key: _take(batch, partition) for key, batch in batches.items()}, partition


def _take(batch: CountedBatch, partition: Partition) -> Sequence[DataProto | ReferencedShard]:
    if isinstance(batch, ReferencedBatch):
        return batch.split(partition)
    return [take_shard(batch, partition, shard) for shard in range(len(partition.shards))]


def _same_rows(call: PreparedCall, batches: Mapping[Key, CountedBatch]) -> int | None:
    """Return the number of rows of all batches; None if there are none."""
    lengths = {key: len(batch) for key, batch in batches.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{_name(key)} has {length}" for key, length in lengths.items())
        raise call.error(f"batches of one call must have the same number of rows: {listed}", lengths=lengths)
    return next(iter(lengths.values()), None)


def _partition(call: PreparedCall, batches: Mapping[Key, CountedBatch], rows: int | None, rule: RowRule) -> Partition:
    lengths = groups = within = None
    if rule.balance is not None:
        lengths = _with_column(call, batches, rule.balance).row_lengths(rule.balance)
    if rule.group_by is not None:
        groups = _labels(call, _with_column(call, batches, rule.group_by), rule.group_by)
    if rule.within is not None:
        within = _labels(call, _with_column(call, batches, rule.within), rule.within, several=True)
    padding = rule.padding
    whole = [batch.columns if isinstance(batch, ReferencedBatch) else batch for batch in batches.values()]
    if padding is None and any(batch.is_padding_enabled() for batch in whole):
        padding = "repeat"
    shards = call.plan.shard_count
    return split_rows(rows or 0, shards, padding=padding, lengths=lengths, groups=groups, within=within)


def _with_column(call: PreparedCall, batches: Mapping[Key, CountedBatch], column: str) -> DataProto:
    for each in batches.values():
        if isinstance(each, DataProto):
            batch = each
        else:
            batch = each.read([column]).columns if column in each.names else each.columns
        if column in batch.non_tensor_batch or column in batch.tensors():
            return batch
    raise call.error(
        f"rows are split by column {column!r}, which no batch of the call has: add it, or call with "
        f".options(balance=None, group_by=None, within=None)",
        column=column,
    )


def _labels(call: PreparedCall, batch: DataProto, column: str, several: bool = False) -> list[Hashable]:
    """Return the label of each row; with ``several``, a row of a tensor of two dims is a label."""
    values: Any = batch.non_tensor_batch[column] if column in batch.non_tensor_batch else batch.tensors()[column]
    labels: list[Any] = [tuple(row) if several and isinstance(row, list) else row for row in values.tolist()]
    wrong = next((label for label in labels if not isinstance(label, Hashable)), None)
    if wrong is not None:
        raise call.error(
            f"column {column!r} has {wrong!r} as the label of a row; expected a string or a number for each row",
            column=column,
        )
    return labels


def _split_futures(
    call: PreparedCall, batches: Mapping[Key, CountedBatch], futures: Mapping[Key, Any], rows: int | None, rule: RowRule
) -> tuple[dict[Key, Sequence[Any]], Partition | Split | None]:
    """Split part by part if every future has one part per shard and the same split; otherwise by overlapping rows.

    The rows of futures are not balanced: they keep the split of their own call.
    """
    count = call.plan.shard_count
    first, *others = futures.values()
    aligned = all(isinstance(future, ResultBatch) and len(future.parts) == count for future in futures.values())
    if aligned and all(future.origin == first.origin for future in others):
        origin = first.origin
        if not batches:
            return {key: _parts(futures, key) for key in futures}, origin
        if isinstance(origin, Partition) and origin.size == rows:
            taken = {key: _take(batch, origin) for key, batch in batches.items()}
            sizes = [len(origin.rows(shard)) for shard in range(count)]
            lengths = {_name(key): sizes for key in taken}
            return {**taken, **{key: _parts(futures, key, lengths) for key in futures}}, origin
    expected = first.counts_only() if rows is None and others else rows
    shards: dict[Key, Sequence[Any]] = {
        key: [Window(future, shard, count, rule.padding, expected) for shard in range(count)]
        for key, future in futures.items()
    }
    if rows is None:
        return shards, Split(first.counts_only(), count, rule.padding)
    partition = split_rows(rows, count, padding=rule.padding)
    return {**shards, **{key: _take(batch, partition) for key, batch in batches.items()}}, partition


def _parts(
    futures: Mapping[Key, ResultBatch], key: Key, batch_lengths: Mapping[str, Sequence[int]] | None = None
) -> list[Part]:
    """Return the parts of one future; each must have as many rows as its shard of the other arguments."""
    lengths: dict[str, Sequence[Any]] = {_name(other): rows.lengths for other, rows in futures.items() if other != key}
    lengths.update(batch_lengths or {})
    return [
        Part(part, futures[key].lengths[shard], tuple((name, of[shard]) for name, of in lengths.items()))
        for shard, part in enumerate(futures[key].parts)
    ]


def _name(key: Key) -> str:
    return f"argument {key}" if isinstance(key, int) else f"argument {key!r}"


def _shard_name(call: PreparedCall) -> str:
    axes = call.plan.spec.axes
    return "rank" if axes == ("rank",) else f"shard of {' x '.join(axes)}"
