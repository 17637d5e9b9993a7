"""WeightTransfer: the weights of one group to another, from the controller, which never has them.

Ranks describe which slices of which tensors they have (``plan.RankWeights``), and from this ``plan.schedule_transfer``
decides who sends what to whom. Each rank then has a ``TransferEndpoint``, which fills buckets from its weights, or its
weights or an engine from buckets, and sends or receives them; ``WeightSender`` has the registered methods.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Self

from mcontroller.data.batch import format_bytes
from mcontroller.errors import ConnectionLost, GroupError, MControllerError
from mcontroller.group import WorkerGroup
from mcontroller.transport import Future
from workers.weights.fingerprints import Verification, dtypes_by_name
from workers.weights.transfer.endpoint import TransferOutcome, choose_transport
from workers.weights.transfer.plan import RankSchedule, TransferSchedule, schedule_transfer

logger = logging.getLogger(__name__)

CALL_GRACE = 60.0
"""[seconds] A call to the ranks fails so long after their own deadline, at which they report who is missing."""

TARGET_GRACE = 10.0
"""[seconds] Time that the ranks of the target have to answer after the source has reported a failure."""


class TransferError(MControllerError):
    """A transfer of weights that did not complete; the source group is usable, the target's weights are incomplete.

    Attributes:
        source, target: the names of the groups.
        failures: what each rank reports, by group and rank: ``{("rollout", 1): "process ended"}``.
    """

    source: str
    target: str
    failures: dict[tuple[str, int], str]


@dataclass(frozen=True)
class TransferReport:
    """The cost of one transfer.

    Attributes:
        transport: the name of the transport.
        bytes_sent: bytes sent, over all ranks: no more than the ranks of the target have.
        seconds: wall-clock time of the slowest rank.
        buffer_bytes: the most memory that a rank keeps for the transfer, in addition to the weights.
        policy_version: the version of the policy that was sent.
        verify_seconds: wall-clock time of comparing fingerprints of both groups; None if they were not compared.
        fingerprint: of all weights together, the same in every layout; None if fingerprints were not compared.
    """

    transport: str
    bytes_sent: int
    seconds: float
    buffer_bytes: int
    policy_version: int
    verify_seconds: float | None = None
    fingerprint: int | None = None

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log."""
        verified = {} if self.verify_seconds is None else {"weights/verify_seconds": self.verify_seconds}
        return {
            **verified,
            "weights/seconds": self.seconds,
            "weights/bytes_sent": float(self.bytes_sent),
            "weights/policy_version": float(self.policy_version),
        }


class WeightTransfer:
    """Copies of the weights of one group's model to another group: scheduled once, run whenever the policy has changed.

    Slices go directly from the ranks that have them to the ranks that need them. No rank receives more than it needs,
    and the weights do not pass through the controller. Both groups have workers of ``ActorRolloutRefWorker``, in any
    layouts. If the target serves engines, these get whole tensors with Hugging Face names, bucket after bucket. After
    every transfer the fingerprints of all tensors are compared, unless the configuration of the target has
    ``rollout.verify_weights=never``.

    Args:
        source: the group that weights come from.
        target: the group that weights go to. Its weights and persistent buffers are replaced.
        transport: a name of ``TRANSPORTS``: ``in_process`` (local and simulated groups), ``process_group`` (gloo or
            NCCL), ``cuda_ipc`` (GPUs of one node, which ranks may share); ``auto`` is the first of these that can be
            used.
        bucket_bytes: most bytes that a rank sends, and most that it receives, at once. A rank keeps at most two such
            buckets.
        timeout: seconds after which connecting or running a transfer fails, if a rank does not answer.

    Raises:
        DataError: the groups do not have the same model.
        CallRejected: the engines of the target do not have the model of the source, or the position of a weight in the
            whole model is unknown.
        ConfigError: the transport does not exist, or cannot be used between these groups.
        TransferError: the ranks cannot reach each other.
        GroupError: a call to one of the groups failed.

    Examples:
        >>> with WeightTransfer(actor, rollout) as transfer:
        ...     print(transfer.explain())
        ...     actor.update_actor(batch)
        ...     transfer.run()
    """

    def __init__(
        self,
        source: WorkerGroup[Any],
        target: WorkerGroup[Any],
        *,
        transport: str = "auto",
        bucket_bytes: int = 64 << 20,
        timeout: float = 600.0,
    ) -> None:
        self.source, self.target = source, target
        self.timeout = timeout
        self.bucket_bytes = bucket_bytes
        targets = target.describe_weights()
        engine = next((rank.engine for rank in targets if rank.engine is not None), None)
        self._hf_names = engine is not None
        sources = source.describe_weights(engine)
        self.transport = choose_transport(transport, sources, targets)
        self.schedule: TransferSchedule = schedule_transfer(
            sources, targets, bucket_bytes, relayed=self.transport == "cuda_ipc"
        )
        self._verifies = all(rank.verify for rank in targets)
        self._verification = Verification(f"group {target.name}")
        if not self._verifies:
            logger.warning(
                "the weights that %s receives are not verified: rollout.verify_weights is never", target.name
            )
        self._id = uuid.uuid4().hex
        self._open = True
        self._pids = [rank.pid for rank in targets]
        self._connect()

    def run(self) -> TransferReport:
        """Send the current weights of the source to the target, and return what it cost.

        Raises:
            TransferError: a rank of the other group did not answer in time, or its process ended. The source group is
                usable, the target is broken, and this transfer is closed; restart the target and open a new one.
            WorkerDied: the process of a rank of the source ended.
            WeightsNotArrived: the target does not have the weights of the source. It generates after a transfer that
                succeeds.
        """
        if not self._open:
            raise TransferError(
                f"the transfer of weights from {self.source.name} to {self.target.name} is closed: open a new "
                "WeightTransfer",
                source=self.source.name,
                target=self.target.name,
                failures={},
            )
        sent, received = self._both("send_weights", "receive_weights", self._id, self.timeout)
        (version,) = {outcome.version for outcome in sent if outcome.version is not None}
        verify_seconds, fingerprint = self._verified(version) if self._verifies else (None, None)
        self.target.accept_weights(version)
        return TransferReport(
            transport=self.transport,
            bytes_sent=self.schedule.nbytes,
            seconds=max(outcome.seconds for outcome in (*sent, *received)),
            buffer_bytes=max(outcome.buffer_bytes for outcome in (*sent, *received)),
            policy_version=version,
            verify_seconds=verify_seconds,
            fingerprint=fingerprint,
        )

    def explain(self) -> str:
        """Return which rank sends how many bytes to which, and by which transport: a line for each rank that gets."""
        schedule, target = self.schedule, self.target.name
        lines = [
            f"{self.source.name} (world_size={schedule.source_size}) -> {target} (world_size={schedule.target_size}) "
            f"by {self.transport}: {format_bytes(schedule.nbytes)} in {len(schedule.buckets)} buckets of at most "
            f"{format_bytes(self.bucket_bytes)}"
        ]
        senders: dict[int, list[str]] = defaultdict(list)
        for (sender, receiver), nbytes in schedule.routes.items():
            senders[receiver].append(f"{format_bytes(nbytes)} from rank {sender}")
        lines += [f"  {target} rank {receiver} <- {', '.join(senders[receiver])}" for receiver in sorted(senders)]
        return "\n".join(lines)

    def close(self) -> None:
        """End the connections and free the buffers of all ranks; after a failure, of the remaining ranks."""
        self._close()

    def _close(self) -> GroupError | None:
        """Close the transfer, and return the failure of a group whose processes have ended."""
        failure, groups = None, (self.source, self.target) if self._open else ()
        self._open = False
        for group in groups:
            try:
                group.close_weights(self._id)
            except GroupError as error:
                failure = failure or error
        return failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self) -> None:
        sources = self.schedule.source_size
        size = sources + self.schedule.target_size
        schedules = [
            RankSchedule(
                transfer=self._id,
                transport=self.transport,
                rank=rank,
                size=size,
                sources=sources,
                buckets=self.schedule.by_rank[rank],
                timeout=self.timeout,
                hf_names=self._hf_names,
                whole=self.schedule.targets[rank - sources] if self._hf_names and rank >= sources else (),
                exchanges=self.schedule.exchanges if rank < sources else (),
            )
            for rank in range(size)
        ]
        try:
            addresses = [
                *self.source.listen_for_weights(schedules[:sources]),
                *self.target.listen_for_weights(schedules[sources:]),
            ]
        except GroupError:
            self.close()
            raise
        known = {rank: address for rank, address in enumerate(addresses) if address is not None}
        self._both("connect_weights", "connect_weights", self._id, known)

    def _verified(self, version: int) -> tuple[float, int]:
        """Compare the fingerprints of both groups, which compute them at the same time.

        Returns:
            the seconds, and a fingerprint of all weights together.
        """
        started = time.perf_counter()
        dtypes = dtypes_by_name(self.schedule.targets)
        expected = self.source.weight_fingerprints.options(blocking=False)(dtypes, self._hf_names)
        arrived = self.target.weight_fingerprints.options(blocking=False)()
        fingerprint = self._verification.check(expected.get(), arrived.get(), version)
        return time.perf_counter() - started, fingerprint

    def _both(self, of_source: str, of_target: str, *args: Any) -> tuple[list[TransferOutcome], list[TransferOutcome]]:
        """Call a method of each group at the same time, and return the outcomes of their ranks."""
        deadline = self.timeout + CALL_GRACE
        sending = getattr(self.source, of_source).options(blocking=False, timeout=deadline)(*args)
        receiving = getattr(self.target, of_target).options(blocking=False, timeout=deadline)(*args)
        sent = _outcomes(sending)
        failed = isinstance(sent, GroupError) or any(outcome.failure for outcome in sent)
        received = _outcomes(receiving, TARGET_GRACE if failed else None)
        failures = self._failures(sent, received)
        if failures:
            # A process that has answered and then ended is known by the lost connection of its peer alone.
            ended = self._close()
            cause = next((error for error in (sent, received, ended) if isinstance(error, GroupError)), None)
            what = "; ".join(f"{group} rank {rank}: {text}" for (group, rank), text in failures.items())
            if isinstance(received, list) and cause is None and of_target == "receive_weights":  # all processes live
                failed_ranks = [rank for group, rank in failures if group == self.target.name]
                waiting_ranks = [rank for rank, outcome in enumerate(received) if outcome.peer is not None]
                cause = self._give_up_target((failed_ranks or waiting_ranks)[0], what)
            raise TransferError(
                f"weights from {self.source.name} to {self.target.name} did not arrive: {what}",
                source=self.source.name,
                target=self.target.name,
                failures=failures,
            ) from cause
        assert not isinstance(sent, GroupError) and not isinstance(received, GroupError)
        return sent, received

    def _give_up_target(self, rank: int, what: str) -> ConnectionLost:
        """Break the target, of which a rank has a part of the weights, so that its restart is what mends the run."""
        error = ConnectionLost(
            f"{self.target.name} rank {rank} lost its connection in a transfer of weights from {self.source.name}, "
            f"although its process lives: {what}",
            role=self.target.name,
            rank=rank,
            node=self.target.executor.nodes[rank],
            pid=self._pids[rank],
            method="receive_weights",
        )
        self.target.executor.fail(error)
        return error

    def _failures(
        self, sent: list[TransferOutcome] | GroupError, received: list[TransferOutcome] | GroupError
    ) -> dict[tuple[str, int], str]:
        """By group and rank, what went wrong: as the groups report it, or else as the rank's peers do."""
        by_name = ((self.source.name, sent), (self.target.name, received))
        broken: dict[tuple[str, int], str] = {}
        noticed: dict[tuple[str, int], str] = {}
        noticing: set[tuple[str, int]] = set()
        for group, outcomes in by_name:
            if isinstance(outcomes, GroupError):
                ranks = outcomes.fields.get("ranks") or (outcomes.fields.get("rank", -1),)
                broken |= {(group, rank): str(outcomes) for rank in ranks}
                continue
            for rank, outcome in enumerate(outcomes):
                if outcome.peer is not None:
                    noticing.add((group, rank))
                    noticed.setdefault(self._named(outcome.peer), f"{outcome.failure} (seen by {group} rank {rank})")
        # A rank that gives up because of its peer is not the cause for those that wait for it.
        return broken or {rank: text for rank, text in noticed.items() if rank not in noticing} or noticed

    def _named(self, number: int) -> tuple[str, int]:
        sources = self.schedule.source_size
        return (self.source.name, number) if number < sources else (self.target.name, number - sources)


def _outcomes(
    future: Future[list[TransferOutcome]], timeout: float | None = None
) -> list[TransferOutcome] | GroupError:
    try:
        return future.get(timeout)
    except GroupError as error:
        return error
