"""The check of weights that go to another process on the same GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mcontroller.errors import ResourceError
from workers.gpucheck.colocated.receiver import CASE, TIMEOUT_S, ReceivingProcess, call
from workers.gpucheck.policy import Policy
from workers.gpucheck.rows import Row, at_most, compared
from workers.gpucheck.session import CHECKS, Session
from workers.weights.not_arrived import WeightsNotArrived
from workers.weights.transfer.endpoint import Opening
from workers.weights.transfer.plan import plan_transfer
from workers.weights.transfer.transports import TRANSPORTS, choose_transport
from workers.weights.transfer.verification import differing_tensors, dtypes_of

__all__ = ["arrival_row", "kept_row"]

_TRANSFER, _BUCKET_BYTES = "gpucheck", 64 << 10

_HELP = (
    "this process cannot hand CUDA memory to another one: run both in one container, set no expandable_segments in "
    "PYTORCH_CUDA_ALLOC_CONF, and see docs/gpu.md, 'Weights between colocated groups'"
)


@CHECKS.register("transfer")
def weights_to_another_process(session: Session) -> Iterator[Row]:
    """Send weights to another process on the same GPU, twice; then kill it, and count the bytes that stay here."""
    with CASE.policy() as policy, ReceivingProcess(session) as receiver:
        before = torch.cuda.memory_allocated() if session.on_gpu else 0
        name = _open(policy, receiver)
        for what in ("initial", "changed"):
            error = _sent(policy, receiver)
            yield arrival_row(what, name, error, expected="cuda_ipc" if session.on_gpu else "shared_memory")
            for _, parameter in policy.parameters():
                parameter.mul_(1.5)
        receiver.kill()
        call(policy, "close_weights", _TRANSFER)
        if session.on_gpu:
            yield kept_row(torch.cuda.memory_allocated() - before)


def arrival_row(what: str, transport: str, error: WeightsNotArrived | None, *, expected: str) -> Row:
    """Return the row of a transfer, which is ok if all tensors arrived by the expected transport.

    Args:
        what: the weights that were sent.
        transport: the transport that was chosen.
        error: of comparing the fingerprints of both processes.
        expected: the transport to choose.
    """
    arrived = f"by {transport}" + (", not all" if error is not None else "")
    passed = error is None and transport == expected
    note = _HELP if error is None else f"{error}; {_HELP}"
    return compared(f"transfer: {what} weights", passed, arrived, f"all, by {expected}", note=note)


def kept_row(nbytes: int) -> Row:
    """Return the row of the bytes that the sender keeps after a transfer whose receiver was killed."""
    note = "the sender keeps its buckets: after a rollout that died, restart the actor's group too"
    return at_most("transfer: bytes kept after a receiver's death", nbytes, _BUCKET_BYTES / 2, note=note)


def _open(policy: Policy, receiver: ReceivingProcess) -> str:
    """Open both sides of a transfer; return the transport."""
    held = [call(policy, "describe_weights")], [receiver.call("describe_weights")]
    name = choose_transport("auto", *held)
    plan = plan_transfer(*held, _BUCKET_BYTES, direct=TRANSPORTS[name].uses_in_place)
    sends, receives = (
        Opening(_TRANSFER, name, rank == 0, rank, 2, plan.by_rank[rank], TIMEOUT_S, plan.direct_by_rank[rank])
        for rank in (0, 1)
    )
    addresses = {0: call(policy, "listen_for_weights", sends), 1: receiver.call("listen_for_weights", receives)}
    receiver.start("connect_weights", _TRANSFER, addresses)
    _check(call(policy, "connect_weights", _TRANSFER, addresses), receiver.result())
    return name


def _sent(policy: Policy, receiver: ReceivingProcess) -> WeightsNotArrived | None:
    """Send the weights once, and compare the fingerprints."""
    receiver.start("receive_weights", _TRANSFER, TIMEOUT_S)
    _check(call(policy, "send_weights", _TRANSFER, TIMEOUT_S), receiver.result())
    dtypes = dtypes_of([receiver.call("describe_weights")])
    expected, found = call(policy, "weight_fingerprints", dtypes), receiver.call("weight_fingerprints")
    return differing_tensors([expected], [found], 0, "of the other process")


def _check(*outcomes: Any) -> None:
    for outcome in outcomes:
        if outcome.failure:
            raise ResourceError(f"transfer: {outcome.failure}")
