"""Compare the fingerprints of two groups of ranks; pure, without tensors or processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from workers.weights.fingerprints import Fingerprint
from workers.weights.not_arrived import WeightsNotArrived
from workers.weights.transfer.plan import Holdings

__all__ = ["differing_tensors", "dtypes_of"]


def dtypes_of(holdings: Sequence[Holdings]) -> dict[str, list[str]]:
    """Return by name the dtypes in which these ranks have the tensor."""
    dtypes: dict[str, set[str]] = defaultdict(set)
    for each in holdings:
        for tensor in each.tensors:
            dtypes[tensor.name].add(tensor.dtype)
    return {name: sorted(found) for name, found in dtypes.items()}


def differing_tensors(
    expected: Sequence[Sequence[Fingerprint]], found: Sequence[Sequence[Fingerprint]], version: int, target: str
) -> WeightsNotArrived | None:
    """Return the error of the tensors that are not those of the source; None if all are.

    Args:
        expected: by rank of the source, the fingerprints of its tensors in the dtypes of the target.
        found: by rank of the target, those of its tensors.
        version: of the policy that was sent.
        target: the name of the group that weights were sent to.
    """
    policy: dict[tuple[str, str], set[int]] = defaultdict(set)
    for of_rank in expected:
        for name, dtype, value in of_rank:
            policy[name, dtype].add(value)
    held: dict[tuple[str, str], set[int]] = defaultdict(set)
    ranks = set()
    for rank, fingerprints in enumerate(found):
        for name, dtype, value in fingerprints:
            held[name, dtype].add(value)
            if value not in policy.get((name, dtype), {value}):
                ranks.add(rank)
    tensors = {
        key[0]: (sorted(policy[key]), sorted(values))
        for key, values in held.items()
        if key in policy and not values <= policy[key]
    }
    missing = sorted({name for name, _ in policy.keys() - held.keys()})
    unknown = sorted({name for name, _ in held.keys() - policy.keys()})
    if not (tensors or missing or unknown):
        return None
    return WeightsNotArrived.of_tensors(
        version,
        len(policy),
        tensors=tensors,
        old=[],
        missing=missing,
        unknown=unknown,
        ranks=sorted(ranks),
        target=f"group {target}",
    )
