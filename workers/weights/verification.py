"""Compare the received weights with the sent ones, by their fingerprints; without tensors.

A tolerance on log-probabilities cannot do this. One update in bfloat16 at a learning rate of 1e-6 changes them by less
than engine and policy differ anyway. Fingerprints of the tensors are equal or not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mcontroller.errors import MControllerError
from workers.weights.fingerprints import Fingerprint, whole_fingerprints
from workers.weights.same_tensors import some_of

logger = logging.getLogger(__name__)


class WeightsNotArrived(MControllerError):
    """After an update, the receiver does not hold the weights of the policy; it gets them again before it generates.

    Attributes:
        update: the number of the update, ``weights_version`` of the worker; the version of the policy if the weights
            were sent from another group.
        tensors: by name, the fingerprints of the policy and of the receiver; several if copies differ.
        old: names of the ``tensors`` of which the receiver holds the values of the update before.
        missing: names of tensors of the policy that no rank of the receiver holds.
        unknown: names of tensors that the receiver holds and the policy does not have.
        ranks: ranks of the receiver that hold a value of ``tensors`` that is not the policy's.
    """

    update: int
    tensors: dict[str, tuple[list[int], list[int]]]
    old: list[str]
    missing: list[str]
    unknown: list[str]
    ranks: list[int]


class Verification:
    """Compares a receiver with the policy after every update, and remembers the values of the update before.

    Args:
        receiver: what weights are sent to, for errors.
    """

    def __init__(self, receiver: str) -> None:
        self._receiver = receiver
        self._before: dict[tuple[str, str], set[int]] = {}

    def check(
        self, policy: Sequence[Sequence[Fingerprint]], held: Sequence[Sequence[Fingerprint]], update: int
    ) -> None:
        """Raise unless the receiver holds the weights of the policy.

        Args:
            policy: by rank of the policy, the fingerprints of its parts in the dtypes of the receiver.
            held: by rank of the receiver, the fingerprints of what it holds.
            update: the number of the update.

        Raises:
            WeightsNotArrived: with the ranks and the tensors.
        """
        expected, held_values = whole_fingerprints(policy), whole_fingerprints(held)
        tensors: dict[str, tuple[list[int], list[int]]] = {}
        old, ranks = set[str](), set[int]()
        for key in expected.keys() & held_values.keys():
            right, values = expected[key].keys(), held_values[key].keys()
            if not values <= right:
                tensors[key[0]] = sorted(right), sorted(values)
                ranks |= {rank for value in values - right for rank in held_values[key][value]}
                if values <= right | self._before.get(key, set()):
                    old.add(key[0])
            elif len(right) > 1:
                logger.warning("update %d: ranks of the policy hold different values of %s", update, key[0])
        missing = sorted({name for name, _ in expected.keys() - held_values.keys()})
        unknown = sorted({name for name, _ in held_values.keys() - expected.keys()})
        if tensors or missing or unknown:
            differing = {
                f"values from before the update in {len(old)} of {len(expected)} tensors": sorted(old),
                "other values than the policy in": sorted(tensors.keys() - old),
                "nothing under the names": missing,
                "tensors that the policy does not have:": unknown,
            }
            held_text = "; ".join(f"{what} {some_of(names)}" for what, names in differing.items() if names)
            on = f" (ranks {some_of(sorted(ranks), 16)})" if ranks else ""
            raise WeightsNotArrived(
                f"update {update} of the weights did not arrive in {self._receiver}{on}, which has {held_text}",
                update=update,
                tensors=dict(sorted(tensors.items())),
                old=sorted(old),
                missing=missing,
                unknown=unknown,
                ranks=sorted(ranks),
            )
        self._before = {key: set(values) for key, values in expected.items()}
