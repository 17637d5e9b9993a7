"""A loss that is registered next to the worker class is registered in its Ray workers too."""

from __future__ import annotations

from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tests.workers.losses.custom_losses import Learner


def test_what_the_module_of_the_worker_class_registers_is_known_in_ray_workers(ray_cluster: None) -> None:
    with (
        RayResourcePool([1], use_gpu=False, name_prefix="losses") as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(Learner), name_prefix="learner") as group,
    ):
        assert group.compute("of_a_module") == [(-3.0, 5.0)]
