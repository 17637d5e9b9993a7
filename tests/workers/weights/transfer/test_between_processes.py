"""Weights between two groups on real Ray processes, over every transport, and a target that hangs or dies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mcontroller import RayResourcePool
from tests.workers.weights.transfer.between import check_death, check_hang, check_lost_source, check_weights, policy
from workers.weights.transfer import plan, weight_transfer


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[RayResourcePool]:
    with RayResourcePool([2], use_gpu=False, name_prefix="weights", max_colocate_count=2) as pool:
        yield pool


def test_weights_arrive_over_every_transport_and_the_source_survives_a_target(
    pool: RayResourcePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_transfer, "TARGET_GRACE", 0.5)

    def set_direct_bytes(nbytes: int, *groups: Any) -> None:
        monkeypatch.setattr(plan, "DIRECT_BYTES", nbytes)
        for each in groups:
            each.set_direct_bytes(nbytes)

    with policy(pool, "actor", 1, {"tp": 2}) as actor:
        with policy(pool, "rollout", 2, {}) as rollout:
            assert rollout.digest()[0] != actor.digest()[0]
            for transport in ("shared_memory", "process_group"):
                check_weights(actor, rollout, transport)
            set_direct_bytes(256, actor, rollout)  # slices travel from weights to weights
            check_weights(actor, rollout, "process_group")
            check_hang(actor, rollout, "process_group")
        with policy(pool, "rollout", 2, {}) as rollout:
            check_hang(actor, rollout, "shared_memory")
        with policy(pool, "rollout", 2, {}) as rollout:
            set_direct_bytes(256, actor, rollout)
            check_death(actor, rollout, "process_group")
        for fault in ("die after the answer", "lose the connection"):
            with policy(pool, "rollout", 2, {}) as rollout:
                check_death(actor, rollout, "process_group", fault)
        with policy(pool, "rollout", 2, {}) as rollout:
            check_lost_source(actor, rollout, "process_group")
