"""The error of weights that did not arrive in the engine."""

from __future__ import annotations

from mcontroller.errors import MControllerError

__all__ = ["CanariesNotFollowed", "WeightsNotArrived"]


class WeightsNotArrived(MControllerError):
    """After an update, the engine does not hold the weights of the policy; it gets them again before it generates.

    Attributes:
        update: the number of the update, ``weights_version`` of the worker; the version of the policy if the weights
            were sent from another group.
        tensors: by name, the fingerprints of the policy and of the engine; several if copies differ.
        old: names of those of ``tensors`` of which the engine holds the values of the update before.
        missing: names of tensors of the policy that no rank's engine holds.
        unknown: names of tensors that the engine holds and the policy does not have.
        ranks: ranks whose engine holds a value of ``tensors`` that is not the policy's.
    """

    update: int
    tensors: dict[str, tuple[list[int], list[int]]]
    old: list[str]
    missing: list[str]
    unknown: list[str]
    ranks: list[int]


class CanariesNotFollowed(WeightsNotArrived):
    """After an update, log-probabilities of the engine did not change as those of the policy did.

    Attributes:
        update: the number of the update.
        lost: the share of the policy's change that is not in the engine's: 1 for old weights.
        error: the standard error of ``lost``.
        moved: the mean square of the engine's change, divided by that of the policy's.
        mismatch: the mean difference between engine and policy before and after the update, in nats.
        prompts: numbers of the canary prompts that differ most, those first.
        shards: data-parallel shards whose engine differs.
    """

    lost: float
    error: float
    moved: float
    mismatch: tuple[float, float]
    prompts: list[int]
    shards: list[int]
