"""The fingerprints of two groups are compared tensor by tensor, over all ranks that have one."""

from __future__ import annotations

from workers.weights.fingerprints import Fingerprint
from workers.weights.transfer.verification import differing_tensors


def test_tensors_that_only_one_group_has_are_reported() -> None:
    one, other = (Fingerprint(name, "float32", 1) for name in ("one", "other"))
    assert differing_tensors([[one], [one, other]], [[other], [one]], 3, "rollout") is None
    error = differing_tensors([[one]], [[other], [other]], 3, "rollout")
    assert error is not None and (error.missing, error.unknown, error.update) == (["one"], ["other"], 3)
    wrong = differing_tensors([[one]], [[one], [one._replace(value=2)]], 3, "rollout")
    assert wrong is not None and wrong.tensors == {"one": ([1], [1, 2])} and wrong.ranks == [1]
