"""One rank's side of a transfer: fills buckets from its tensors, and its tensors or an engine from buckets.

``WeightTransfer`` calls ``TransferEndpoint`` on every rank. A ``Transport`` carries the buckets: within a process, by a
process group, or through memory of a shared GPU. Two buckets are in flight at most. Every wait ends at a deadline, and
names the rank that was waited for.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import itertools
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from mcontroller.config.registry import Registry
from mcontroller.errors import ConfigError, MControllerError
from workers.gpu_ids import gpu_id, visible_gpus
from workers.weights.moves import Move, TensorInBucket
from workers.weights.shards import SliceReader, WeightShard
from workers.weights.transfer.plan import PeerSlices, RankSchedule, RankWeights
from workers.weights.whole_tensors import BucketMemory, PolicyWeights, Receivers, exchanged, filled_bucket

IN_FLIGHT = 2
"""Buckets that a rank keeps: one travels while the other is filled or read."""

_NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_POLL_S = 0.001


class PeerLost(MControllerError):
    """A rank of the other group that did not send or receive in time, or whose process ended.

    Attributes:
        peer: its number: ranks of the target follow the ranks of the source.
        cause: what was observed.
    """

    peer: int
    cause: str

    @classmethod
    def of(cls, peer: int, cause: str) -> PeerLost:
        """Return the error for a rank."""
        return cls(f"rank {peer} of the transfer: {cause}", peer=peer, cause=cause)


class Deadline:
    """A point in time, ``seconds`` after this object was made."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def left(self, peer: int) -> datetime.timedelta:
        """Return the time until then.

        Raises:
            PeerLost: there is none left; the rank that was waited for is ``peer``.
        """
        left = self._at - time.monotonic()
        if left <= 0:
            raise PeerLost.of(peer, f"nothing arrived within {self.seconds:g} s")
        return datetime.timedelta(seconds=left)


class TransferOutcome(NamedTuple):
    """The result of one rank's part of a transfer.

    Attributes:
        seconds: wall-clock time.
        buffer_bytes: memory that its side keeps in addition to the weights.
        version: the version of the policy that it sent; None for a rank that received.
        failure: what went wrong; "" if nothing.
        peer: the number of the rank that it waited for; None without a failure.
    """

    seconds: float
    buffer_bytes: int
    version: int | None
    failure: str = ""
    peer: int | None = None


class TransferEndpoint(PolicyWeights):
    """One rank's side of a transfer; for an engine, the weights that arrive.

    Args:
        schedule: the rank's part of the schedule.
        shards: this rank's tensors, in the order of their slots; none if it serves an engine.
        device: of the tensors.
        address: of this node, for other nodes.

    Raises:
        ConfigError: there is no such transport.
    """

    def __init__(
        self, schedule: RankSchedule, shards: Sequence[WeightShard], device: torch.device, address: str
    ) -> None:
        self._schedule, self._shards, self.device = schedule, shards, device
        self._end = TRANSPORTS.get_or_raise(schedule.transport)(schedule, device, address)

    def listen(self) -> Any:
        """Return what other ranks need to reach this one."""
        return self._end.listen()

    def connect(self, addresses: Mapping[int, Any]) -> TransferOutcome:
        """Connect to the ranks that this one sends to or receives from; ``addresses`` are by rank."""
        return self._run(lambda: self._end.connect(addresses), self._schedule.timeout)

    @torch.no_grad()
    def send(self, timeout: float, version: int) -> TransferOutcome:
        """Send the current weights; the outcome carries ``version``."""
        return self._run(self._send, timeout)._replace(version=version)

    @torch.no_grad()
    def receive(self, timeout: float, update: Callable[[], object] | None = None) -> TransferOutcome:
        """Replace the weights by the received ones; those of an engine by ``update``, which reads ``buckets``."""
        return self._run(update or self._receive, timeout)

    @torch.no_grad()
    def buckets(self, memory: BucketMemory, receivers: Receivers = "all") -> Iterator[list[TensorInBucket]]:
        """Iterate over the buckets of whole tensors that arrive for the engine of this rank."""
        for index, bucket in enumerate(self._schedule.buckets):
            slots = sorted({move.target_slot for slices in bucket for move in slices.moves})
            tensors = {slot: self._schedule.whole[slot] for slot in slots}
            yield filled_bucket(tensors, self._arriving(index), memory, self.device)
        self._end.flush()

    def close(self) -> None:
        """End the connections and free the buffers."""
        self._end.close()

    def _run(self, action: Callable[[], object], timeout: float) -> TransferOutcome:
        started, self._end.deadline = time.perf_counter(), Deadline(timeout)
        failure, peer = "", None
        try:
            action()
        except PeerLost as error:
            failure, peer = error.cause, error.peer
            self.close()  # peers that wait for this rank see it at once
        except MControllerError:
            self.close()
            raise
        seconds = time.perf_counter() - started
        return TransferOutcome(seconds, self._end.buffer_bytes, None, failure, peer)

    def _send(self) -> None:
        sources = SliceReader(self._shards)
        for index, bucket in enumerate(self._schedule.buckets):
            buffer = self._end.buffer(index)
            relayed = self._exchange(index, sources)
            for slices in bucket:
                self._fill(buffer[slices.start : slices.start + slices.nbytes], slices.moves, sources, relayed)
            if buffer.is_cuda:
                torch.cuda.current_stream().synchronize()
            self._end.send(index)
        self._end.flush()

    def _exchange(self, index: int, sources: SliceReader) -> Mapping[Move, Tensor]:
        """Exchange slices of a bucket with the other ranks that send, and return those that this one relays.

        The exchange is a collective of NCCL, which must not wait for a rank whose receiver is gone. So all ranks first
        report that they can send this bucket.
        """
        if not self._schedule.exchanges:
            return {}
        self._end.wait_for_senders()
        return dict(exchanged(self._schedule.exchanges[index], sources))

    def _receive(self) -> None:
        for shard in self._shards:
            shard.padding().zero_()
        for index in range(len(self._schedule.buckets)):
            for move, values in self._arriving(index):
                weights = self._shards[move.target_slot].param.data
                tensor = weights.narrow(move.dim, move.target_start, move.length)
                tensor.copy_(values.view(tensor.shape))
        self._end.flush()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _arriving(self, index: int) -> Iterator[tuple[Move, Tensor]]:
        """The slices of a bucket and their values, flat, each valid until the next one."""
        for slices, data in self._end.receive(index):
            yield from zip(slices.moves, _parts(data, slices.moves), strict=True)
            if data.is_cuda:
                torch.cuda.current_stream().synchronize()

    def _fill(self, data: Tensor, moves: Sequence[Move], sources: SliceReader, relayed: Mapping[Move, Tensor]) -> None:
        """Copy slices of this rank's tensors, or relayed ones, into ``data``, converted to the dtype that travels."""
        rank = self._schedule.rank
        for move, part in zip(moves, _parts(data, moves), strict=True):
            is_local = move.source_rank == rank
            tensor = sources.read(move) if is_local else relayed[move._replace(target_rank=rank)]
            part.view(tensor.shape).copy_(tensor)


def _parts(data: Tensor, moves: Sequence[Move]) -> tuple[Tensor, ...]:
    """Divide the bytes of slices, which have one dtype, into one tensor for each."""
    dtype = getattr(torch, moves[0].dtype)
    typed = data.view(dtype)
    ends = list(itertools.accumulate(move.nbytes // dtype.itemsize for move in moves))
    return tuple(typed[start:end] for start, end in zip([0, *ends], ends, strict=False))


# ---- how buckets travel ---------------------------------------------------------------------------------------------


class Transport:
    """One rank's end of a transfer.

    ``listen`` of all ranks returns before ``connect`` of any is called. A rank that sends calls ``buffer`` and ``send``
    for every bucket; a rank that receives calls ``receive``. Whatever waits raises PeerLost if a peer does not send or
    receive before the deadline, or if its process has ended.

    Args:
        schedule: what the rank sends or receives.
        device: of its tensors.
        address: of this node, on which other processes reach it.

    Attributes:
        buffer_bytes: the memory that this end keeps in addition to the weights.
        deadline: of the waits; the endpoint replaces it at the start of every transfer.
    """

    buffer_bytes = 0

    def __init__(self, schedule: RankSchedule, device: torch.device, address: str) -> None:
        self.schedule, self.device, self.address = schedule, device, address
        self.deadline = Deadline(schedule.timeout)

    @staticmethod
    def why_not(sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
        """Return why the transport cannot be used between these ranks; "" if it can."""
        raise NotImplementedError

    def listen(self) -> Any:
        """Return what other ranks need to reach this one: a value that can be pickled, or None."""

    def connect(self, addresses: Mapping[int, Any]) -> None:
        """Connect to the peers; ``addresses`` are what ``listen`` returned, by rank."""

    def buffer(self, index: int) -> Tensor:
        """Return the memory to fill with the bucket, uint8 ``[bytes]``; wait until it is free."""
        raise NotImplementedError

    def send(self, index: int) -> None:
        """Start sending the bucket that the buffer was filled with."""
        raise NotImplementedError

    def receive(self, index: int) -> Iterator[tuple[PeerSlices, Tensor]]:
        """Iterate over the slices of the bucket with their bytes, uint8 ``[bytes]``, each valid until the next one."""
        raise NotImplementedError

    def wait_for_senders(self) -> None:
        """Wait until all ranks that send have called this; used by transports whose ranks relay slices."""
        raise NotImplementedError

    def flush(self) -> None:
        """Wait until the peers have received all that was sent."""

    def close(self) -> None:
        """End all connections and free the buffers; in the middle of a transfer too."""


class InProcess(Transport):
    """Between local or simulated groups: keeps all buckets, because the source sends before the target receives."""

    _sent: ClassVar[defaultdict[tuple[str, int, int], deque[Tensor]]] = defaultdict(deque)
    """Slices that were not received yet, by transfer, sender and receiver."""

    @staticmethod
    def why_not(sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
        """Return why not: the ranks are several processes."""
        processes = {(rank.node, rank.pid) for rank in (*sources, *targets)}
        return "" if len(processes) == 1 else f"the ranks are {len(processes)} processes; expected one"

    def buffer(self, index: int) -> Tensor:
        """Return new memory."""
        self._bucket = torch.empty(self.schedule.bucket_bytes, dtype=torch.uint8, device=self.device)
        return self._bucket

    def send(self, index: int) -> None:
        """Keep the bucket."""
        for slices in self.schedule.buckets[index]:
            sent = self._sent[self.schedule.transfer, self.schedule.rank, slices.peer]
            sent.append(self._bucket[slices.start : slices.start + slices.nbytes])

    def receive(self, index: int) -> Iterator[tuple[PeerSlices, Tensor]]:
        """Iterate over the slices that were kept."""
        for slices in self.schedule.buckets[index]:
            sent = self._sent[self.schedule.transfer, slices.peer, self.schedule.rank]
            if not sent:
                raise PeerLost.of(
                    slices.peer, "it has sent nothing: in one process, the source sends before the target receives"
                )
            yield slices, sent.popleft()

    def close(self) -> None:
        """Drop what was not received."""
        for transfer, sender, receiver in list(self._sent):
            if transfer == self.schedule.transfer and self.schedule.rank in (sender, receiver):
                del self._sent[transfer, sender, receiver]


class ProcessGroup(Transport):
    """A process group of torch.distributed over the ranks of both groups: gloo on CPUs, NCCL on GPUs.

    It has a separate store, on rank 0, and separate connections: the default group of either side is not involved.

    Over NCCL, three things differ. A group's watchdog ends the process if a transfer takes longer than the group's
    timeout, unless the group was created with another error handling. ``wait(timeout)`` counts from the start of the
    operation, not from the call. And the first operation of a pair of ranks blocks until the other rank of the pair
    starts its own.
    """

    def __init__(self, schedule: RankSchedule, device: torch.device, address: str) -> None:
        super().__init__(schedule, device, address)
        self.buffer_bytes = IN_FLIGHT * schedule.bucket_bytes
        self._over_nccl = device.type == "cuda"
        self._store: dist.TCPStore | None = None
        self._group: Any = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._works: dict[int, list[tuple[int, Any]]] = {}
        """By bucket, the peers and the operations with them that were not waited for."""

    @staticmethod
    def why_not(sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
        """Return why not: ranks share a process or a GPU, or one group is on CPUs."""
        ranks = (*sources, *targets)
        if len({(rank.node, rank.pid) for rank in ranks}) < len(ranks):
            return "ranks of the groups share a process; a process is one rank of a process group"
        if len({rank.device == "cpu" for rank in ranks}) > 1:
            return "one group is on CPUs and the other on GPUs"
        gpus = Counter((rank.nccl_host, rank.device) for rank in ranks if rank.device != "cpu")
        shared = sorted(gpu for (_, gpu), count in gpus.items() if count > 1)
        return f"several ranks are on the GPU {shared[0]}: NCCL cannot connect them" if shared else ""

    def listen(self) -> Any:
        """Return the host and the port of the store, on rank 0."""
        if self.schedule.rank != 0:
            return None
        timeout = datetime.timedelta(seconds=self.schedule.timeout)
        self._store = dist.TCPStore(self.address, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        return self.address, self._store.port

    def connect(self, addresses: Mapping[int, Any]) -> None:
        """Create the process group; all ranks call this at the same time."""
        host, port = addresses[0]
        self._create_group(host, port, self.deadline.left(0))
        if self._over_nccl:
            self._connect_pairs()
        self._memory = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self.device)

    def _create_group(self, host: str, port: int, timeout: datetime.timedelta) -> None:
        rank, size = self.schedule.rank, self.schedule.size
        with _peer_lost(0):
            self._store = self._store or dist.TCPStore(host, port, is_master=False, timeout=timeout)
            store = dist.PrefixStore("weights", self._store)
            if self._over_nccl:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                with _without_nccl_error_handling():
                    self._group = dist.ProcessGroupNCCL(store, rank, size, options)
            else:
                self._group = dist.ProcessGroupGloo(store, rank, size, timeout)

    def _connect_pairs(self) -> None:
        """Exchange one byte with every peer, so that no later operation is the first of its pair.

        All ranks do this in the order of (rank that sends, rank that receives), so no ranks wait in a circle. Nothing
        starts before all peers are there: NCCL waits without a deadline for a rank that never comes.
        """
        assert self._store is not None
        self._store.set(f"is there: {self.schedule.rank}", "")
        for peer in self.schedule.peers:
            with _peer_lost(peer):
                self._store.wait([f"is there: {peer}"], self.deadline.left(peer))
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for peer in self.schedule.peers:
            self._wait(*self._start(byte, peer, sends=self.schedule.sends))

    def buffer(self, index: int) -> Tensor:
        """Return the memory of a bucket, after the one before in it was sent."""
        self._wait_for(index - IN_FLIGHT)
        return self._memory[self._start_of(index) :][: self.schedule.bucket_bytes]

    def send(self, index: int) -> None:
        """Start to send the bucket."""
        self._start_bucket(index)

    def receive(self, index: int) -> Iterator[tuple[PeerSlices, Tensor]]:
        """Start to receive this bucket and the next one, and iterate over the slices of this one."""
        for ahead in range(index, min(index + IN_FLIGHT, len(self.schedule.buckets))):
            if ahead not in self._works:
                self._start_bucket(ahead)
        for slices, (peer, work) in zip(self.schedule.buckets[index], self._works.pop(index), strict=True):
            self._wait(peer, work)
            yield slices, self._slices(index, slices)

    def flush(self) -> None:
        """Wait for everything that was started."""
        for index in sorted(self._works):
            self._wait_for(index)

    def close(self) -> None:
        """Drop the process group; operations that others wait for fail."""
        if self._group is not None:
            self._group.abort()
        self._group = self._store = None
        self._works = {}
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _start_of(self, index: int) -> int:
        return index % IN_FLIGHT * self.schedule.bucket_bytes

    def _slices(self, index: int, slices: PeerSlices) -> Tensor:
        return self._memory[self._start_of(index) + slices.start :][: slices.nbytes]

    def _start_bucket(self, index: int) -> None:
        self._works[index] = [
            self._start(self._slices(index, slices), slices.peer, sends=self.schedule.sends)
            for slices in self.schedule.buckets[index]
        ]

    def _start(self, memory: Tensor, peer: int, *, sends: bool) -> tuple[int, Any]:
        """Start to send or receive; return the peer and what can be waited for."""
        operation = self._group.send if sends else self._group.recv
        with _peer_lost(peer):  # the connection may have ended already
            return peer, operation([memory], peer, 0)

    def _wait_for(self, index: int) -> None:
        for peer, work in self._works.pop(index, ()):
            self._wait(peer, work)

    def _wait(self, peer: int, work: Any) -> None:
        left = self.deadline.left(peer)
        with _peer_lost(peer):
            if not self._over_nccl:
                work.wait(left)
                return
            while not work.is_completed():
                self.deadline.left(peer)
                time.sleep(_POLL_S)
            work.wait()


class CudaIpc(ProcessGroup):
    """Memory of a GPU that a sender has exported and its receivers have mapped, for groups whose ranks share GPUs.

    Status: run on one H100.

    NCCL rejects two processes of one GPU in a communicator. A sender allocates its two buckets on its own GPU, and
    exports them once for each receiver with torch's reduction of CUDA tensors. The receiver maps them on the same GPU,
    whose index may differ there, and copies from them to its weights: within the GPU, or to another GPU of the node if
    its weights are there. A process group over gloo carries one message before a slice is read and one after it.

    A process opens a CUDA context, of about 0.5 GB, on every GPU of which it maps memory. So a receiver maps memory of
    its own GPU alone if a sender runs there, which gets the slices of other senders over their default group.

    The order of reads and writes does not depend on events of CUDA: the sender synchronizes its stream before it sends
    that a bucket is full, and the receiver its own before it answers that it has read it.

    torch frees exported memory when all receivers have dropped it, and a process that was killed never does. So the
    sender drops the memory on behalf of its receivers when the transfer is closed: nothing reads it from then on.
    """

    def __init__(self, schedule: RankSchedule, device: torch.device, address: str) -> None:
        super().__init__(schedule, device, address)
        self._over_nccl = False
        self.buffer_bytes = IN_FLIGHT * schedule.bucket_bytes if schedule.sends else 0
        self._exports: list[dict[str, Any]] = []
        """The arguments that each receiver maps the buckets with."""
        self._mapped: dict[int, Tensor] = {}
        """By sender, its buckets."""

    @staticmethod
    def why_not(sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
        """Return why not: CPUs, several nodes, one process, or a GPU that a receiver cannot use."""
        ranks = (*sources, *targets)
        if any(rank.device == "cpu" for rank in ranks):
            return "there are weights on CPUs; expected GPUs"
        nodes = {rank.node for rank in ranks}
        if len(nodes) > 1:
            return f"the ranks are on {len(nodes)} nodes; expected one"
        if len({rank.pid for rank in ranks}) < len(ranks):
            return "ranks of the groups share a process"
        for number, target in enumerate(targets):
            for gpu in sorted({source.device for source in sources} - set(target.visible)):
                return (
                    f"rank {number} that receives cannot use GPU {gpu}, which weights come from: let it see that GPU "
                    "(a pool without isolate_gpus)"
                )
        return ""

    def listen(self) -> Any:
        """Return the address of the store on rank 0, this rank's GPU, and the buckets by receiver."""
        exports = {}
        if self.schedule.sends:
            self._memory = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self.device)
            for peer in self.schedule.peers:
                rebuild, arguments = exports[peer] = reductions.reduce_tensor(self._memory)  # counts as one receiver
                self._exports.append(_by_name(rebuild, arguments))
        return super().listen(), gpu_id(self.device), exports

    def connect(self, addresses: Mapping[int, Any]) -> None:
        """Create the process group, and map the buckets of the senders."""
        (host, port), _, _ = addresses[0]
        self._create_group(host, port, self.deadline.left(0))
        for peer in () if self.schedule.sends else self.schedule.peers:
            _, gpu, exports = addresses[peer]
            rebuild, arguments = exports[self.schedule.rank]
            device = {"storage_device": visible_gpus().index(gpu)}
            try:
                self._mapped[peer] = rebuild(**_by_name(rebuild, arguments) | device)
            except RuntimeError as error:
                raise PeerLost.of(peer, f"its memory on GPU {gpu} cannot be mapped: {error}") from error

    def wait_for_senders(self) -> None:
        """Report to the first sender, and wait for its answer, which it gives when all have reported."""
        byte, others = torch.zeros(1, dtype=torch.uint8), range(1, self.schedule.sources)
        for sends in (False, True) if self.schedule.rank == 0 else (True, False):
            for peer in others if self.schedule.rank == 0 else (0,):
                self._wait(*self._start(byte, peer, sends=sends))

    def send(self, index: int) -> None:
        """Send each receiver the position of its slices, and start to receive that it has read them."""
        works = self._works[index] = []
        for slices in self.schedule.buckets[index]:
            position = torch.tensor([self._start_of(index) + slices.start])
            works.append(self._start(position, slices.peer, sends=True))
            works.append(self._start(torch.empty_like(position), slices.peer, sends=False))

    def receive(self, index: int) -> Iterator[tuple[PeerSlices, Tensor]]:
        """Iterate over the slices with their memory in the senders' buckets; answer when each was read."""
        works = self._works[index] = []
        for slices in self.schedule.buckets[index]:
            position = torch.empty(1, dtype=torch.int64)
            self._wait(*self._start(position, slices.peer, sends=False))
            yield slices, self._mapped[slices.peer][int(position) :][: slices.nbytes]
            works.append(self._start(position, slices.peer, sends=True))

    def close(self) -> None:
        """Release what was exported, and drop the memory."""
        super().close()
        self._mapped = {}
        for export in self._exports:
            torch.UntypedStorage._release_ipc_counter(
                export["ref_counter_handle"], export["ref_counter_offset"], device="cuda"
            )
        self._exports = []
        if self.schedule.sends:
            torch.cuda.ipc_collect()


def _by_name(rebuild: Callable[..., Tensor], arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments of torch's function that maps an exported tensor, by name."""
    return dict(inspect.signature(rebuild).bind(*arguments).arguments)


@contextlib.contextmanager
def _peer_lost(peer: int) -> Iterator[None]:
    """Raise PeerLost for an error of the process group."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost.of(peer, str(error)) from error


@contextlib.contextmanager
def _without_nccl_error_handling() -> Iterator[None]:
    """Leave errors of the NCCL groups that the block creates to the program, which aborts the group itself.

    torch reads this setting (``ErrorHandlingMode`` of ProcessGroupNCCL) from the environment only.
    """
    before = os.environ.get(_NCCL_ERROR_HANDLING)
    os.environ[_NCCL_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NCCL_ERROR_HANDLING]
        else:
            os.environ[_NCCL_ERROR_HANDLING] = before


TRANSPORTS: Registry[type[Transport]] = Registry("transport of weights", key="transport")
"""In the order in which ``auto`` tries them: a process group, or CUDA IPC if ranks share a GPU."""
TRANSPORTS.add("in_process", InProcess)
TRANSPORTS.add("process_group", ProcessGroup)
TRANSPORTS.add("cuda_ipc", CudaIpc)


def choose_transport(name: str, sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
    """Return the transport to use between the ranks of two groups.

    Args:
        name: one of ``TRANSPORTS``, or ``auto`` for the first one that can be used.
        sources: the ranks that send.
        targets: the ranks that receive.

    Raises:
        ConfigError: there is no such transport, or it cannot be used between these ranks.
    """
    if name != "auto":
        reason = TRANSPORTS.get_or_raise(name).why_not(sources, targets)
        if reason:
            raise ConfigError(f"transport is {name!r}, but {reason}", key="transport", value=name)
        return name
    reasons = {name: transport.why_not(sources, targets) for name, transport in TRANSPORTS.items()}
    usable = [name for name, reason in reasons.items() if not reason]
    if not usable:
        text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ConfigError(
            f"no transport can be used between the groups: {text}", key="transport", value="auto", reasons=reasons
        )
    return usable[0]
