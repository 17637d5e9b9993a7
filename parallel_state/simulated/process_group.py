"""The process group and the store of a simulated rank, whose methods torch.distributed calls."""

# torch calls these methods with more forms of arguments than its type stubs have, and by older names.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallel_state.hangs.lines import calling_line
from parallel_state.hangs.waits import waited
from parallel_state.simulated.calls import Call, SharedGroup
from parallel_state.simulated.collectives import reduction_name

_Tensors = Sequence[torch.Tensor]


class SimulatedWork(dist.Work):
    """The handle of a call.

    Args:
        simulation: the ``Simulation``, which makes groups.
        call: the call.
    """

    def __init__(self, simulation: Any, call: Call) -> None:
        super().__init__()
        self._simulation, self._call = simulation, call

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait until all members have made their part; there is no timeout."""
        began = time.monotonic_ns()
        self._simulation.wait(self._call)
        waited.nanoseconds += time.monotonic_ns() - began
        return True

    def synchronize(self) -> None:
        """Wait, as ``wait`` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all members have made their part; other ranks run first."""
        return bool(self._simulation.poll(self._call))

    def exception(self) -> None:
        """Return None: a failure ends all ranks."""

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the tensors that were written."""
        self.wait()
        return self._call.outputs or self._call.inputs

    def source_rank(self) -> int:
        """Return the rank in the group of the sender."""
        peer = self._call.peer
        return -1 if peer is None else self._call.group.ranks.index(peer)

    _source_rank = source_rank  # the name by which torch.distributed.recv calls it

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait, and return a completed future."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future


class SimulatedGroup(dist.ProcessGroup):
    """One rank's membership in a group.

    The methods have the names and signatures by which torch.distributed calls those of a process group.

    Args:
        simulation: the ``Simulation``, which makes groups.
        shared: what the members share.
        rank: the global rank.
        unique_name: the name by which functional collectives find the group, unique in this process.
    """

    def __init__(self, simulation: Any, shared: SharedGroup, rank: int, unique_name: str) -> None:
        super().__init__(shared.ranks.index(rank), len(shared.ranks))  # type: ignore[call-arg]
        self._simulation = simulation
        self.shared = shared
        self.global_rank = rank
        self._index = shared.ranks.index(rank)
        self._number = 0
        self._routes: Counter[tuple[str, int | None, int]] = Counter()
        self._unique_name = unique_name

    @property
    def group_name(self) -> str:
        """The name by which functional collectives find the group; unique in this process."""
        return self._unique_name

    @property
    def group_desc(self) -> str:
        """The description passed to ``new_group``."""
        return self.shared.description or "undefined"

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors the group takes."""
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> SimulatedGroup:
        """Return the group, which is its own backend."""
        return self

    def name(self) -> str:
        """Return the backend's name."""
        return "simulated"

    getBackendName = name  # the name by which C++ calls it

    def shutdown(self) -> None:
        """Do nothing: there is no connection."""

    def abort(self) -> None:
        """Do nothing: there is no connection."""

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Do nothing: there is no timeout."""

    def __repr__(self) -> str:
        return f"SimulatedGroup({self.shared}, of rank {self.global_rank})"

    def _collective(
        self, operation: str, inputs: _Tensors, outputs: _Tensors, opts: Any = None, *, key: Any = None, **options: Any
    ) -> SimulatedWork:
        if hasattr(opts, "reduceOp"):
            options["op"] = reduction_name(opts.reduceOp)
        if hasattr(opts, "rootRank"):
            options["root"] = self._checked(opts.rootRank, f"{operation} with root")
        if key is None:
            key = _sized(inputs if len(inputs) else outputs)
        call = Call(
            operation,
            self.global_rank,
            self._index,
            self.shared,
            self._number,
            (*key, (options.get("op"), options.get("root"))),
            list(inputs),
            list(outputs),
            calling_line(),
            options,
            is_async=bool(getattr(opts, "asyncOp", False)),
        )
        self._number += 1
        self._simulation.announce(call)
        return SimulatedWork(self._simulation, call)

    def allreduce(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        """Reduce tensors in place."""
        listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        return self._collective("all_reduce", listed, [], opts if opts is not None else dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> SimulatedWork:
        """Reduce several tensors in place."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: _Tensors, opts: Any) -> SimulatedWork:
        """Reduce to the root."""
        return self._collective("reduce", tensors, [], opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        """Send the root's tensors to all members."""
        listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        return self._collective("broadcast", listed, [], opts if opts is not None else dist.BroadcastOptions())

    def allgather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> SimulatedWork:
        """Gather one tensor of each member on all members."""
        return self._collective("all_gather", inputs, outputs[0], opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> SimulatedWork:
        """Gather into one tensor."""
        return self._collective("all_gather_into_tensor", [input], [output], opts)

    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> SimulatedWork:
        """Gather several tensors, each into one tensor."""
        return self._collective("all_gather_into_tensor", inputs, outputs, opts)

    def allgather_object(self, objects: list[Any], value: Any) -> None:
        """Gather a Python object of each member, by reference, as ``torch.distributed.all_gather_object`` copies it."""
        self._collective("all_gather_object", [], [], key=((), ()), objects=objects, value=value).wait()

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> SimulatedWork:
        """Reduce one tensor, and keep a part of it on each member."""
        return self._collective("reduce_scatter_tensor", [input], [output], opts)

    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any) -> SimulatedWork:
        """Reduce several tensors, and keep a part of each on each member."""
        return self._collective("reduce_scatter_tensor", inputs, outputs, opts)

    def reduce_scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any) -> SimulatedWork:
        """Reduce a list of tensors, one for each member."""
        return self._collective("reduce_scatter", inputs[0], outputs, opts)

    def gather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any) -> SimulatedWork:
        """Gather on the root."""
        return self._collective("gather", inputs, outputs[0] if outputs else [], opts, key=_sized(inputs))

    def scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any) -> SimulatedWork:
        """Send one tensor of the root to each member."""
        return self._collective("scatter", inputs[0] if inputs else [], outputs, opts, key=_sized(outputs))

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> SimulatedWork:
        """Send one tensor to each member."""
        sends, receives = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
        key = inputs[0].dtype if len(inputs) else None, ()
        return self._collective("all_to_all", inputs, outputs, opts, key=key, sends=sends, receives=receives)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> SimulatedWork:
        """Send rows of one tensor to each member; the splits may be lists, arrays or tensors."""
        return self._collective(
            "all_to_all_single",
            [input],
            [output],
            opts,
            key=(input.dtype, input.shape[1:]),
            sends=self._splits(input_splits, input),
            receives=self._splits(output_splits, output),
        )

    def _splits(self, splits: Any, tensor: torch.Tensor) -> list[int]:
        if splits is not None and len(splits):
            return [int(rows) for rows in splits]
        return [tensor.shape[0] // len(self.shared.ranks)] * len(self.shared.ranks)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        """Wait for all members."""
        return self._collective("barrier", [], [], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all members; the report of a deadlock names those who are missing."""
        self.barrier().wait()

    # The names of the same methods before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def send(self, tensors: _Tensors, dst: int, tag: int = 0) -> SimulatedWork:
        """Send to a member; complete when it has received."""
        return self._transfer("send", tensors, dst, tag)

    def recv(self, tensors: _Tensors, src: int, tag: int = 0) -> SimulatedWork:
        """Receive from a member."""
        return self._transfer("recv", tensors, src, tag)

    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> SimulatedWork:
        """Receive from any member."""
        return self._transfer("recv", tensors, None, tag)

    def _transfer(self, operation: str, tensors: _Tensors, peer: int | None, tag: int) -> SimulatedWork:
        route = operation, peer, tag
        self._routes[route] += 1
        call = Call(
            operation,
            self.global_rank,
            self._index,
            self.shared,
            -self._routes[route],
            tuple((tensor.dtype, tensor.numel()) for tensor in tensors),
            list(tensors) if operation == "send" else [],
            list(tensors) if operation == "recv" else [],
            calling_line(),
            {"tag": tag} if tag else {},
            peer=None if peer is None else self.shared.ranks[self._checked(peer, f"{operation} with rank")],
            is_async=True,
        )
        self._simulation.announce(call)
        return SimulatedWork(self._simulation, call)

    def _checked(self, index: int, what: str) -> int:
        """Return a rank in the group; raise ValueError if there is no such rank."""
        if not 0 <= index < len(self.shared.ranks):
            raise ValueError(f"{what} {index}, and the group has {len(self.shared.ranks)} ranks: {self.shared}")
        return index


def _sized(tensors: _Tensors) -> tuple[Any, Any]:
    return tuple(tensor.dtype for tensor in tensors), tuple(tensor.shape for tensor in tensors)


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class SimulatedStore(dist.Store):
    """The key-value store of the ranks, for their rendezvous; a key that is not set lets other ranks run until it is.

    Args:
        simulation: the ``Simulation``, which lets other ranks run.
        values: the values by key, which all ranks share.
    """

    timeout: datetime.timedelta  # of torch's, whose types leave it out

    def __init__(self, simulation: Any, values: dict[str, bytes]) -> None:
        super().__init__()
        self._simulation, self._values = simulation, values

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._values[key] = _bytes(value)
        self._simulation.keys_changed()

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until it is set."""
        self._simulation.wait_for_keys([key], self.timeout)
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return it; other ranks run first if 0 is added."""
        if not amount:
            self._simulation.poll_keys([key])
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self.set(key, self._values.get(key, b"") + _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key that has the expected value, or that is not set if that is empty; return its value."""
        now = self._values.get(key)
        if (now or b"") == _bytes(expected):
            self.set(key, desired)
            return _bytes(desired)
        self._simulation.poll_keys([key])
        return _bytes(expected) if now is None else now

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys; wait until all are set."""
        self._simulation.wait_for_keys(keys, self.timeout)
        return [self._values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Whether a store has ``append``, ``multi_get`` and ``multi_set``."""
        return True

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are set. The timeout ends when no rank can go on, not with the clock."""
        self._simulation.wait_for_keys(keys, self.timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set; other ranks run first if not."""
        if not all(key in self._values for key in keys):
            self._simulation.poll_keys(keys)
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it was set."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._values)

    def clone(self) -> SimulatedStore:
        """Return this store: there is no connection."""
        return self

    deleteKey, getNumKeys = delete_key, num_keys  # the names by which a PrefixStore calls them
