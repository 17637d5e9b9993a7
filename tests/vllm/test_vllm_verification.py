"""After one update at a learning rate of 1e-6, weights that did not all arrive in vLLM are reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mcontroller import MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool
from tests.vllm.policies import POLICIES, Actor, actor_config, prompts
from tests.vllm.test_vllm_rollout import GREEDY, update
from workers.weights.fingerprints import WeightsNotArrived

TINY_STEPS = {"lr": 1e-6, "eps": 1e-8, "weight_decay": 0.0, "warmup_steps": 0}
ENGINE_OF_TWO = {  # an engine with two ranks that have the same head of keys, and half of each expert
    "model": POLICIES["moe-ep2"]["model"] | {"num_query_groups": 1, "tie_embeddings": True},
    "parallel": {"tp": 1, "ep": 1, "pp": 2},
    "rollout": {"vllm": {"tp": 2}},
}


@contextmanager
def updating(policy: str, **changes: Any) -> Iterator[tuple[MegatronRayWorkerGroup, Any]]:
    """An actor whose engine has its first weights, and a batch to train on."""
    changes["model"] = {**changes.get("model", {}), "dtype": "bfloat16"}
    changes["rollout"] = {**changes.get("rollout", {}), "verify_weights": "fingerprints"}
    config = actor_config(policy, **{**changes, "optim": TINY_STEPS, "ppo_epochs": 1})
    name = f"verification-{policy}"
    with (
        RayResourcePool([2], use_gpu=False, name_prefix=name, max_colocate_count=1) as pool,
        MegatronRayWorkerGroup(
            pool, RayClassWithInitArgs(Actor, config, role="actor_rollout"), name_prefix=name
        ) as group,
    ):
        group.init_model()
        group.update_engine()
        yield group, group.generate_sequences(prompts(**GREEDY))


def of_fault(group: MegatronRayWorkerGroup, batch: Any, fault: str) -> Any:
    """What the first rank reports after an update with a fault; the next update, without, is accepted."""
    update(group, batch)
    first, second = group.update_engine(fault)
    assert type(first) is type(second)
    assert all(not isinstance(each, WeightsNotArrived) for each in group.update_engine())
    return first


@pytest.mark.parametrize(
    ("policy", "changes"),
    [("dense-tp2", {}), ("tied-tp2", {}), ("moe-ep2", {}), ("moe-ep2", ENGINE_OF_TWO)],
    ids=["dense", "tied", "experts", "tied-experts-engine-of-two-ranks"],
)
def test_fingerprints_separate_new_old_and_half_old_weights_after_one_update(
    ray_cluster: None, policy: str, changes: dict[str, Any]
) -> None:
    with updating(policy, **changes) as (group, batch):
        for _ in range(3):
            update(group, batch)
            assert all(metrics["verify_seconds"] > 0 for metrics in group.update_engine())
        old, half = (of_fault(group, batch, fault) for fault in ("old", "half"))
        assert set(old.old) == set(old.tensors) and len(old.old) > 15 and old.ranks
        assert set(half.old) == set(half.tensors) and 0 < len(half.old) < len(old.old)
