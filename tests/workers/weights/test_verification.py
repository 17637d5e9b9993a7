"""The fingerprints of a policy and of a receiver are compared tensor by tensor, over all ranks that have a part."""

from __future__ import annotations

import logging

import pytest

from workers.weights.fingerprints import Fingerprint
from workers.weights.verification import Verification, WeightsNotArrived

ONE, OTHER = (Fingerprint(name, "float32", 1) for name in ("one", "other"))


def difference(
    verification: Verification, policy: list[list[Fingerprint]], held: list[list[Fingerprint]]
) -> WeightsNotArrived:
    with pytest.raises(WeightsNotArrived) as caught:
        verification.check(policy, held, 3)
    return caught.value


def test_tensors_that_only_one_side_has_are_reported() -> None:
    verification = Verification("group rollout")
    verification.check([[ONE], [ONE, OTHER]], [[OTHER], [ONE]], 3)
    error = difference(verification, [[ONE]], [[OTHER], [OTHER]])
    assert (error.missing, error.unknown, error.update) == (["one"], ["other"], 3)


def test_a_wrong_copy_is_reported_with_its_rank_and_the_tensor() -> None:
    error = difference(Verification("group rollout"), [[ONE]], [[ONE], [ONE._replace(value=2)]])
    assert error.tensors == {"one": ([1], [1, 2])} and error.ranks == [1] and not error.old
    assert error.update == 3


def test_parts_in_another_layout_add_up_and_old_values_are_named() -> None:
    verification = Verification("the engine")
    halves = [[ONE._replace(value=1)], [ONE._replace(value=4, first=8)]]
    verification.check(halves, [[ONE._replace(value=5)]], 2)
    error = difference(verification, [[ONE._replace(value=7)]], halves)
    assert error.old == ["one"] and error.ranks == [0, 1]


def test_ranks_of_the_policy_that_differ_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Verification("the engine").check([[ONE], [ONE._replace(value=2)]], [[ONE]], 3)
    assert "ranks of the policy hold different values of one" in caplog.text
