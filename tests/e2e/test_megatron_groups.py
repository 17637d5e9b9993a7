"""Real Ray and real Megatron: two groups of different layouts on one pool, one PPO step, and how the groups end.

The groups are started once; two tests each break one of them, and the last starts a new one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mcontroller import DataProto, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool
from mcontroller.errors import CallTimeout, GroupBroken, WorkerDied
from tests.e2e.roles import Actor, Critic
from tests.workers.roles import MODEL, OPTIM, PROMPT, RESPONSE, SAMPLED, prompts
from workers.config import ActorConfig, CriticConfig, load_config

TRAINING = {"model": MODEL, "optim": OPTIM, "ppo_mini_batch_size": 8, "ppo_micro_batch_size": 2, "ppo_epochs": 1}
ROLLOUT = {"prompt_length": PROMPT, "response_length": RESPONSE, "seed": 3}
SOON = 30
"""[seconds] Far less than the timeout of a collective, 600, after which a rank without peers would fail by itself."""


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[RayResourcePool]:
    with RayResourcePool([4], use_gpu=False, name_prefix="megatron", max_colocate_count=2) as pool:
        yield pool


@pytest.fixture(scope="module")
def actor(pool: RayResourcePool) -> Iterator[MegatronRayWorkerGroup]:
    config = load_config(ActorConfig, TRAINING | {"rollout": ROLLOUT, "parallel": {"tp": 2, "pp": 2}})
    with MegatronRayWorkerGroup(pool, RayClassWithInitArgs(Actor, config), name_prefix="actor") as group:
        group.init_model()
        yield group


@pytest.fixture(scope="module")
def critic(pool: RayResourcePool) -> Iterator[MegatronRayWorkerGroup]:
    config = load_config(CriticConfig, TRAINING | {"parallel": {}})
    with MegatronRayWorkerGroup(pool, RayClassWithInitArgs(Critic, config), name_prefix="critic") as group:
        group.init_model()
        yield group


def test_each_group_has_the_coordinates_that_megatron_reports(
    pool: RayResourcePool, actor: MegatronRayWorkerGroup, critic: MegatronRayWorkerGroup
) -> None:
    assert [actor.topology.size(axis) for axis in ("tp", "pp", "dp")] == [2, 2, 1]
    assert [critic.topology.size(axis) for axis in ("tp", "pp", "dp")] == [1, 1, 4]
    assert [actor.topology.select(pp=stage) for stage in (0, 1)] == [(0, 1), (2, 3)]
    assert [critic.topology.coordinates(rank)["dp"] for rank in range(4)] == [0, 1, 2, 3]
    assert pool.holders == ["actor", "critic"]


def test_rank_zero_listens_on_the_port_reserved_for_it(critic: MegatronRayWorkerGroup) -> None:
    """The store of torch.distributed is bound to this port; without it no rank would find the others."""
    met = critic.rendezvous()
    assert [(process["rank"], process["world_size"]) for process in met] == [(rank, 4) for rank in range(4)]
    assert len({process["pid"] for process in met}) == 4


def test_a_step_runs_through_both_groups(actor: MegatronRayWorkerGroup, critic: MegatronRayWorkerGroup) -> None:
    batch = actor.generate_sequences(prompts(8, SAMPLED))
    assert batch.batch["responses"].shape == (8, RESPONSE)
    mask = batch.batch["response_mask"].bool()
    batch = batch.union(actor.compute_log_prob(batch)).union(critic.compute_values(batch))
    sampled, scored = batch.batch["rollout_log_probs"], batch.batch["old_log_probs"]
    torch.testing.assert_close(sampled[mask], scored[mask], atol=1e-4, rtol=0)
    assert batch.batch["values"].shape == (8, RESPONSE)
    signal = {"advantages": mask.float(), "returns": batch.batch["values"] + mask.float()}
    batch = batch.union(DataProto.from_dict(signal))
    metrics = {**actor.update_actor(batch).meta_info["metrics"], **critic.update_critic(batch).meta_info["metrics"]}
    assert any(name.startswith("actor/") for name in metrics) and any(name.startswith("critic/") for name in metrics)
    assert all(torch.isfinite(torch.as_tensor(value)).all() for value in metrics.values())


def test_a_rank_killed_in_a_collective_is_named_and_nothing_is_left(
    pool: RayResourcePool, actor: MegatronRayWorkerGroup
) -> None:
    pids = [info.pid for info in actor.executor.processes.handles.infos]
    began = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        actor.reduce_until_killed(2)
    assert time.monotonic() - began < SOON
    error = caught.value
    assert (error.role, error.rank, error.coordinates["tp"], error.coordinates["pp"]) == ("actor", 2, 0, 1)
    assert error.method == "reduce_until_killed"
    assert len(pids) == 4 and not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert "actor" not in pool.holders
    with pytest.raises(GroupBroken) as broken:
        actor.compute_log_prob(prompts(8, SAMPLED))
    assert isinstance(broken.value.first_cause, WorkerDied) and broken.value.first_cause.rank == 2


def test_a_timeout_shows_waiting_ranks_and_the_rank_that_they_wait_for(critic: MegatronRayWorkerGroup) -> None:
    with pytest.raises(CallTimeout) as caught:
        critic.reduce_without.options(timeout=3)(1)
    assert caught.value.ranks == (0, 1, 2, 3)
    assert "oversleep" in caught.value.stacks[1]
    assert all("all_reduce" in caught.value.stacks[rank] for rank in (0, 2, 3))


def test_a_checkpoint_in_progress_is_complete_when_the_group_has_ended(pool: RayResourcePool, tmp_path: Path) -> None:
    config = load_config(CriticConfig, TRAINING | {"parallel": {"tp": 2}})
    with MegatronRayWorkerGroup(pool, RayClassWithInitArgs(Critic, config), name_prefix="saves") as group:
        group.init_model()
        group.save_checkpoint(str(tmp_path), 3, asynchronous=True)
        assert not (tmp_path / "global_step_3").exists()
    assert (tmp_path / "global_step_3").is_dir()
