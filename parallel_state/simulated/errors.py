"""The errors of simulated ranks."""

from __future__ import annotations

from torch.distributed import DistStoreError

from parallel_state.errors import ParallelStateError


class SimulationError(ParallelStateError):
    """Root of the errors that simulated ranks find in how ranks communicate.

    Attributes:
        ranks: the ranks that the message names as the cause, or as the two sides.
    """

    ranks: tuple[int, ...]


class Deadlock(SimulationError):
    """No rank can go on: each waits for another one, or for one that has ended."""


class KeyNotSet(Deadlock, DistStoreError):
    """A rank waits for a key of the store, and no rank will set it: the wait ends as at the end of its timeout."""


class CollectiveMismatch(SimulationError):
    """Ranks made calls that do not fit together: the message has both."""


class GroupOrderError(SimulationError):
    """Ranks called collectives of several groups in different orders, with which NCCL may hang.

    Attributes:
        groups: the labels of the groups.
    """

    groups: tuple[str, ...]


class NonMemberError(SimulationError):
    """A rank called a collective of a group that it is not a member of."""


class UnfinishedCalls(SimulationError):
    """All ranks have ended, and some made calls or groups that others did not make."""


class AsyncAccessError(SimulationError):
    """A tensor was changed between an asynchronous call and its wait."""


class Disagreement(SimulationError):
    """Values that must be equal on some ranks differ, or values that must differ are equal."""


class UnsupportedError(SimulationError):
    """Something that cannot be simulated: threads that communicate, other devices than the CPU, fork."""


class SharedStateWarning(UserWarning):
    """Ranks rebound globals of modules, or attributes of classes, that all simulated ranks share."""


class RankStopped(BaseException):
    """Raised on the other ranks after a failure, so that their threads end. Not for users."""
