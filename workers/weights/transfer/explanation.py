"""The text of ``WeightTransfer.explain``."""

from __future__ import annotations

from collections import defaultdict

from workers.weights.transfer.plan import TransferPlan

__all__ = ["explanation"]

_MOST_LINES = 40


def explanation(plan: TransferPlan, transport: str, bucket_bytes: int, source: str, target: str) -> str:
    """Return which rank sends how many bytes to which, one line for each rank of the target.

    Args:
        plan: the transfer.
        transport: the name of the transport.
        bucket_bytes: the most bytes that a rank sends at once.
        source: the name of the group that weights come from.
        target: the name of the group that they go to.
    """
    sent = sum(plan.routes.values())
    direct = sum(move.nbytes for move in plan.direct)
    outside = f"{_size(direct)} directly from weights to weights, {_size(sent - direct)}" if direct else _size(sent)
    lines = [
        f"{source} ({_ranks(plan.source_size)}) -> {target} ({_ranks(plan.target_size)}) by {transport}: "
        f"{outside} in {len(plan.buckets)} buckets of at most {_size(bucket_bytes)}; the least is "
        f"{_size(plan.least_bytes)}"
    ]
    senders: dict[int, dict[int, int]] = defaultdict(dict)
    for (sender, receiver), nbytes in plan.routes.items():
        senders[receiver][sender] = nbytes
    for receiver, by_sender in sorted(senders.items())[:_MOST_LINES]:
        parts = ", ".join(f"{_size(nbytes)} from rank {sender}" for sender, nbytes in by_sender.items())
        lines.append(f"  {target} rank {receiver} <- {parts}")
    if len(senders) > _MOST_LINES:
        lines.append(f"  ... and {len(senders) - _MOST_LINES} more ranks")
    return "\n".join(lines)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError  # the last unit returns
