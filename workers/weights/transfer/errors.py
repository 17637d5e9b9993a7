"""The errors of a transfer of weights between groups."""

from __future__ import annotations

from mcontroller.errors import MControllerError

__all__ = ["PeerLost", "TransferError"]


class TransferError(MControllerError):
    """A transfer of weights that did not complete; the source group is usable, the target's weights are incomplete.

    Attributes:
        source, target: the names of the groups.
        failures: what each rank reports, by group and rank: ``{("rollout", 1): "process ended"}``.
    """

    source: str
    target: str
    failures: dict[tuple[str, int], str]


class PeerLost(MControllerError):
    """A rank of the other group that did not send or receive in time, or whose process ended.

    Attributes:
        peer: its number: ranks of the target follow the ranks of the source.
        cause: what was observed.
    """

    peer: int
    cause: str
