"""The error of weights that did not arrive in the engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Self

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
        stale_tokens: tokens of a prompt of which the engine's prefix cache has keys and values of earlier weights.
    """

    update: int
    tensors: dict[str, tuple[list[int], list[int]]]
    old: list[str]
    missing: list[str]
    unknown: list[str]
    ranks: list[int]
    stale_tokens: int

    @classmethod
    def of_tensors(
        cls,
        update: int,
        count: int,
        *,
        tensors: dict[str, tuple[list[int], list[int]]],
        old: list[str],
        missing: list[str],
        unknown: list[str],
        ranks: list[int],
        stale_tokens: int = 0,
        target: str = "the engine",
    ) -> Self:
        """Return the error of fingerprints that differ.

        Args:
            update: see the attributes.
            count: how many tensors were compared.
            tensors: see the attributes.
            old: see the attributes.
            missing: see the attributes.
            unknown: see the attributes.
            ranks: see the attributes.
            stale_tokens: see the attributes.
            target: what the weights did not arrive in.
        """
        text = _text(count, tensors, old, missing, unknown)
        if stale_tokens:
            text += "; " if text else ""
            text += f"its prefix cache has keys and values of earlier weights ({stale_tokens} tokens of a prompt)"
        on = f" (ranks {', '.join(map(str, ranks[:16]))}{' and more' if len(ranks) > 16 else ''})" if ranks else ""
        return cls(
            f"update {update} of the weights did not arrive in {target}{on}: {text}",
            update=update,
            tensors=tensors,
            old=old,
            missing=missing,
            unknown=unknown,
            ranks=ranks,
            stale_tokens=stale_tokens,
        )


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


def _text(
    count: int,
    differing: Mapping[str, tuple[list[int], list[int]]],
    old: Collection[str],
    missing: Sequence[str],
    unknown: Sequence[str],
) -> str:
    parts = []
    others = [name for name in differing if name not in old]
    if old:
        parts.append(f"it holds values from before the update in {len(old)} of {count} tensors ({_some(sorted(old))})")
    if others:
        name = others[0]
        policy, engine = ("/".join(f"{value & (1 << 64) - 1:016x}" for value in side) for side in differing[name])
        parts.append(
            f"other values than the policy in {len(others)} of {count} tensors ({_some(others)}; {name} has the "
            f"fingerprint {engine}, the policy's is {policy})"
        )
    if missing:
        parts.append(f"no rank reports {_some(missing)}")
    if unknown:
        parts.append(f"it reports {_some(unknown)}, which the policy does not have under this name")
    return "; ".join(parts)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
