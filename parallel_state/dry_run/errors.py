"""The errors of a dry run."""

from __future__ import annotations

from parallel_state.errors import MControllerError


class DryRunError(MControllerError, ValueError):
    """A program that cannot run without data, or an argument that no dry run can have; the message says what to do."""


class DoesNotFit(MControllerError, AssertionError):
    """A peak is above a limit.

    Attributes:
        peak: bytes on the rank that needs the most.
        limit: bytes.
    """

    peak: int
    limit: int
