"""Weights between two groups on real Ray processes, and a target that hangs, dies or loses its connections."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mcontroller import RayResourcePool
from tests.workers.weights.transfer.between import check_death, check_hang, check_lost_source, check_weights, policy
from workers.weights.transfer import weight_transfer


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[RayResourcePool]:
    with RayResourcePool([2], use_gpu=False, name_prefix="weights", max_colocate_count=2) as pool:
        yield pool


def test_weights_arrive_and_the_source_survives_a_target(
    pool: RayResourcePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_transfer, "TARGET_GRACE", 0.5)
    with policy(pool, "actor", 1, {"tp": 2}) as actor:
        with policy(pool, "rollout", 2, {}) as rollout:
            assert rollout.digest()[0] != actor.digest()[0]
            check_weights(actor, rollout, "process_group")
            check_hang(actor, rollout, "process_group")
        for fault in ("die", "die after the answer", "lose the connection"):
            with policy(pool, "rollout", 2, {}) as rollout:
                check_death(actor, rollout, "process_group", fault)
        with policy(pool, "rollout", 2, {}) as rollout:
            check_lost_source(actor, rollout, "process_group")
