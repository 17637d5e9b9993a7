"""What must hold for weights between two groups of ``Policy`` on processes, over any transport."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mcontroller import MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool
from mcontroller.errors import CallTimeout, ConnectionLost, WorkerDied
from tests.workers.roles import MODEL, OPTIM, PROMPT, RESPONSE
from tests.workers.weights.transfer.roles import Policy
from workers.config import ActorConfig, load_config
from workers.weights.transfer.weight_transfer import TransferError, WeightTransfer

BUCKET = 16_384
COMMON = {
    "optim": OPTIM,
    "rollout": {"prompt_length": PROMPT, "response_length": RESPONSE},
    "ppo_mini_batch_size": 8,
    "ppo_micro_batch_size": 2,
    "ppo_epochs": 1,
}


def policy(
    pool: RayResourcePool,
    role: str,
    seed: int,
    parallel: dict[str, int],
    worker: type[Policy] = Policy,
    options: dict[str, Any] | None = None,
) -> MegatronRayWorkerGroup:
    """Start a policy; ``options`` are options of its processes on Ray."""
    config = load_config(ActorConfig, COMMON | {"model": MODEL | {"seed": seed}, "parallel": parallel})
    init = RayClassWithInitArgs(worker, config, role).update_options(options or {})
    group = MegatronRayWorkerGroup(pool, init, name_prefix=role)
    group.init_model()
    return group


def bytes_of(group: Any) -> int:
    """Return the bytes of the weights of all ranks of a group, without padding."""
    total = 0
    for tensor in (tensor for rank in group.describe_weights() for tensor in rank.tensors):
        dim = tensor.dim or 0
        length = sum(span.stop - span.start for span in tensor.along(dim))
        total += tensor.itemsize * length * math.prod(tensor.shape[:dim] + tensor.shape[dim + 1 :])
    return total


def check_weights(actor: Any, rollout: Any, transport: str) -> None:
    """Check that changed weights arrive, twice by one transfer, with the least bytes and in two buckets at most."""
    actor.change_weights()
    with WeightTransfer(actor, rollout, transport=transport, bucket_bytes=BUCKET, timeout=60) as transfer:
        reports = [transfer.run()]
        actor.change_weights()
        reports.append(transfer.run())
        assert f"by {transport}: " in transfer.explain()
    assert set(rollout.digest()) == {actor.digest()[0]}
    assert all(report.bytes_sent == bytes_of(rollout) for report in reports)
    assert 0 < reports[0].buffer_bytes <= 2 * BUCKET


def check_hang(actor: Any, rollout: Any, transport: str) -> None:
    """Check that a rank of the target that hangs is named."""
    transfer = WeightTransfer(actor, rollout, transport=transport, timeout=2)
    rollout.fail_in_the_next_transfer("hang")
    with pytest.raises(TransferError) as caught:
        transfer.run()
    assert list(caught.value.failures) == [("rollout", 0)]
    assert isinstance(caught.value.__cause__, CallTimeout)


def check_death(actor: Any, rollout: Any, transport: str, fault: str = "die") -> None:
    """Check that a rank of the target that dies is named, after weights have arrived there; and the actor is usable."""
    actor.change_weights()
    transfer = WeightTransfer(actor, rollout, transport=transport, timeout=60)
    transfer.run()
    assert set(rollout.digest()) == {actor.digest()[0]}
    rollout.fail_in_the_next_transfer(fault)
    with pytest.raises(TransferError) as caught:
        transfer.run()
    assert ("rollout", 0) in caught.value.failures
    assert type(caught.value.__cause__) is (ConnectionLost if fault == "lose the connection" else WorkerDied)
    assert rollout.broken is caught.value.__cause__ and actor.broken is None
    with pytest.raises(TransferError) as closed:
        transfer.run()
    assert closed.value.failures == {}
    actor.change_weights()
    assert len(set(actor.digest())) == 1


def check_lost_source(actor: Any, rollout: Any, transport: str) -> None:
    """Check that the target is broken, at a rank that noticed it, if the source loses its connections and lives."""
    transfer = WeightTransfer(actor, rollout, transport=transport, timeout=60)
    actor.fail_in_the_next_transfer("lose the connection")
    with pytest.raises(TransferError) as caught:
        transfer.run()
    assert {group for group, _ in caught.value.failures} == {"actor"}
    lost = caught.value.__cause__
    assert isinstance(lost, ConnectionLost) and (lost.role, lost.method) == ("rollout", "receive_weights")
    assert rollout.broken is lost and actor.broken is None
