from __future__ import annotations

import pytest

from mcontroller.errors import ConfigError, ResourceError
from mcontroller.ray import ResourcePoolManager
from trainer import Role


def test_a_pool_has_a_slot_for_every_role_in_it(ray_cluster: None) -> None:
    mapping = {Role.ActorRollout: "main", Role.Critic: "main", Role.RewardModel: "aside"}
    manager = ResourcePoolManager({"main": [2], "aside": [1]}, mapping, use_gpu=False)
    manager.create_resource_pool()
    assert manager.get_resource_pool(Role.Critic) is manager.get_resource_pool(Role.ActorRollout)
    assert {name: pool.max_colocate_count for name, pool in manager.resource_pool_dict.items()} == {
        "main": 2,
        "aside": 1,
    }
    assert manager.get_n_gpus() == 3


def test_slots_can_be_chosen_for_one_pool() -> None:
    mapping = {Role.Actor: "main", Role.Critic: "main", Role.Rollout: "aside"}
    manager = ResourcePoolManager({"main": [2, 1], "aside": [1]}, mapping, max_colocate_count={"main": 4})
    assert [manager.slots_of(name) for name in ("main", "aside")] == [4, 1]
    assert manager.get_n_slots() == 3 * 4 + 1


def test_pools_that_do_not_fit_together_are_rejected_before_launch(ray_cluster: None) -> None:
    mapping = {Role.Actor: "left", Role.Critic: "right"}
    manager = ResourcePoolManager({"left": [10], "right": [10]}, mapping, use_gpu=False)
    with pytest.raises(ResourceError) as caught:
        manager.create_resource_pool()
    assert caught.value.fields["requested"] == [{"CPU": 10}, {"CPU": 10}]


def test_a_role_on_an_unknown_pool_is_rejected() -> None:
    with pytest.raises(ConfigError):
        ResourcePoolManager({"main": [2]}, {Role.Critic: "other"})


def test_a_role_without_a_pool_and_pools_not_created_raise() -> None:
    manager = ResourcePoolManager({"main": [2]}, {Role.Critic: "main"})
    with pytest.raises(ConfigError):
        manager.get_resource_pool(Role.Actor)
    with pytest.raises(ResourceError):
        manager.get_resource_pool(Role.Critic)


def test_pools_isolate_gpus_if_the_manager_says_so(ray_cluster: None) -> None:
    for isolated in (False, True):
        manager = ResourcePoolManager({"main": [1]}, {Role.Critic: "main"}, use_gpu=False, isolate_gpus=isolated)
        manager.create_resource_pool()
        assert manager.get_resource_pool(Role.Critic).isolate_gpus is isolated
