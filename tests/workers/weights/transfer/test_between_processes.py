"""Weights between two groups on real Ray processes, over every transport, and a target that hangs or dies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mcontroller import MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool
from mcontroller.errors import CallTimeout, WorkerDied
from tests.workers.roles import MODEL, OPTIM, PROMPT, RESPONSE
from tests.workers.weights.transfer.roles import Policy
from workers.config import ActorConfig, load_config
from workers.weights.transfer import weight_transfer
from workers.weights.transfer.errors import TransferError
from workers.weights.transfer.weight_transfer import WeightTransfer

COMMON = {
    "optim": OPTIM,
    "rollout": {"prompt_length": PROMPT, "response_length": RESPONSE},
    "ppo_mini_batch_size": 8,
    "ppo_micro_batch_size": 2,
    "ppo_epochs": 1,
}


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[RayResourcePool]:
    with RayResourcePool([2], use_gpu=False, name_prefix="weights", max_colocate_count=2) as pool:
        yield pool


def policy(pool: RayResourcePool, role: str, seed: int, parallel: dict[str, int]) -> MegatronRayWorkerGroup:
    config = load_config(ActorConfig, COMMON | {"model": MODEL | {"seed": seed}, "parallel": parallel})
    group = MegatronRayWorkerGroup(pool, RayClassWithInitArgs(Policy, config, role), name_prefix=role)
    group.init_model()
    return group


def test_weights_arrive_over_every_transport_and_a_lost_target_leaves_the_source_usable(
    pool: RayResourcePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_transfer, "TARGET_GRACE", 0.5)
    with policy(pool, "actor", 1, {"tp": 2}) as actor:
        with policy(pool, "rollout", 2, {}) as rollout:
            assert rollout.digest()[0] != actor.digest()[0]
            for transport, message_bytes in (
                ("shared_memory", 1 << 20),
                ("process_group", 1 << 20),
                ("process_group", 256),  # slices travel from weights to weights
                ("object_store", 1 << 20),
            ):
                actor.change_weights()
                for each in (actor, rollout):
                    each.set_message_bytes(message_bytes)
                with WeightTransfer(actor, rollout, transport=transport, bucket_bytes=16_384, timeout=60) as transfer:
                    reports = [transfer.run() for _ in range(2)]
                    assert "by " + transport in transfer.explain()
                assert set(rollout.digest()) == {actor.digest()[0]}
                assert all(report.bytes_sent == report.least_bytes for report in reports)
                assert 0 < reports[0].buffer_bytes <= 2 * 16_384
            hanging = WeightTransfer(actor, rollout, timeout=2)
            assert hanging.transport == "shared_memory"
            rollout.fail_in_the_next_transfer("hang")
            with pytest.raises(TransferError, match="rollout rank 0") as caught:
                hanging.run()
            assert list(caught.value.failures) == [("rollout", 0)]
            assert isinstance(caught.value.__cause__, CallTimeout)
        actor.change_weights()
        with policy(pool, "rollout", 2, {}) as again:
            transfer = WeightTransfer(actor, again, transport="process_group", timeout=60)
            transfer.run()
            assert set(again.digest()) == {actor.digest()[0]}
            again.fail_in_the_next_transfer("die")
            with pytest.raises(TransferError, match="rollout rank 0") as caught:
                transfer.run()
            assert isinstance(caught.value.__cause__, WorkerDied)
            with pytest.raises(TransferError, match="is closed: open a new WeightTransfer"):
                transfer.run()
        actor.change_weights()
        assert len(set(actor.digest())) == 1
