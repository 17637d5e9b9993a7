"""A loss that is registered next to the worker class is registered in its Ray workers too."""

from __future__ import annotations

from pathlib import Path

from mcontroller.config.imports import import_module
from mcontroller.ray import MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tests.training import SMALL_GPT
from tests.workers.losses.custom_losses import Learner
from trainer import AlgorithmConfig, PPOConfig, Role
from trainer.roles import role_workers
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, RolloutConfig


def test_what_the_module_of_the_worker_class_registers_is_known_in_ray_workers(ray_cluster: None) -> None:
    with (
        RayResourcePool([1], use_gpu=False, name_prefix="losses") as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(Learner), name_prefix="learner") as group,
    ):
        assert group.compute("of_a_module") == [(-3.0, 5.0)]


def test_what_imports_of_a_run_register_is_known_in_ray_workers(ray_cluster: None, tmp_path: Path) -> None:
    module = tmp_path / "losses.py"
    module.write_text(
        "from trainer import register_policy_loss\n"
        "from workers.losses.policy import clipped_policy_loss\n"
        "register_policy_loss('of_a_file')(clipped_policy_loss)\n"
    )
    import_module(str(module), "imports")
    config = ActorConfig(
        model=SMALL_GPT, policy_loss="of_a_file", rollout=RolloutConfig(prompt_length=8, response_length=8)
    )
    run = PPOConfig(actor_rollout_ref=config, imports=[str(module)], algorithm=AlgorithmConfig(adv_estimator="grpo"))
    [actor] = role_workers(run, {Role.ActorRolloutRef: ActorRolloutRefWorker})
    with (
        RayResourcePool([1], use_gpu=False, name_prefix="losses") as pool,
        MegatronRayWorkerGroup(pool, actor.init, name_prefix="actor") as group,
    ):
        assert group.world_size == 1
