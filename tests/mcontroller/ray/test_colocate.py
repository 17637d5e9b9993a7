from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mcontroller.errors import ConfigError, GroupBroken, WorkerError
from mcontroller.ray import (
    MegatronRayWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
)
from parallel_state import ParallelLayout
from tests.mcontroller.ray.roles import Neighbour, Plain, Reporting

CLASSES = {
    "actor": RayClassWithInitArgs(Plain, "of the actor"),
    "actor_x": RayClassWithInitArgs(Plain, "of the other"),
    "critic": RayClassWithInitArgs(Neighbour),
}


@pytest.fixture(scope="module")
def together(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    with (
        RayResourcePool([2], use_gpu=False) as pool,
        RayWorkerGroup(pool, create_colocated_worker_cls_fused(CLASSES)) as group,
    ):
        yield group


def test_roles_of_one_process_have_one_pid_and_an_object_each(together: RayWorkerGroup) -> None:
    roles = together.spawn(CLASSES)
    assert len({tuple(group.pid()) for group in roles.values()}) == 1
    assert roles["actor"].get() == ["of the actor"] * 2


def test_methods_of_one_name_belong_to_their_own_role(together: RayWorkerGroup) -> None:
    roles = together.spawn({"actor", "actor_x", "critic"})
    assert {role: group.get()[0] for role, group in roles.items()} == {
        "actor": "of the actor",
        "actor_x": "of the other",
        "critic": "neighbour",
    }


def test_a_fused_group_shows_its_roles_as_attributes(together: RayWorkerGroup) -> None:
    assert together.actor_x.get() == ["of the other"] * 2
    assert together.critic.name == "critic"


def test_a_role_reaches_its_siblings_object_also_from_an_async_method(together: RayWorkerGroup) -> None:
    assert together.critic.through_the_wall("actor") == ["of the actor"] * 2


def test_a_sibling_that_is_not_there_is_an_error_that_lists_those_that_are(together: RayWorkerGroup) -> None:
    with pytest.raises(ConfigError) as caught:
        together.spawn({"reward"})
    with pytest.raises(AttributeError, match="spawn"):  # the group itself has no method
        together.get()
    assert (caught.value.key, caught.value.value) == ("reward", ("actor", "actor_x", "critic"))


def test_roles_that_are_not_fused_are_no_attributes(pool: RayResourcePool) -> None:
    classes = {"actor": CLASSES["actor"], "critic": CLASSES["critic"]}
    with RayWorkerGroup(pool, create_colocated_worker_cls(classes)) as group:
        assert group.name == "actor+critic"
        assert pool.holders == ["actor+critic"]
        assert not hasattr(group, "actor")
        assert group.spawn({"critic"})["critic"].get() == ["neighbour"] * 2
        group.fuse({"actor"})
        with pytest.raises(WorkerError) as caught:
            group.spawn({"critic"})["critic"].through_the_wall("reward")
        assert caught.value.role == "critic" and caught.value.cause.startswith("ConfigError")
        with pytest.raises(GroupBroken):
            group.actor.get()


def test_roles_of_one_process_may_have_different_layouts(pool: RayResourcePool) -> None:
    classes = {
        "actor": RayClassWithInitArgs(Reporting, ParallelLayout(2, tp=2)),
        "critic": RayClassWithInitArgs(Reporting, ParallelLayout(2)),
    }
    with MegatronRayWorkerGroup(pool, create_colocated_worker_cls_fused(classes)) as group:
        sizes = [(role.topology.size("tp"), role.topology.size("dp")) for role in (group.actor, group.critic)]
        assert sizes == [(2, 1), (1, 2)]
        assert group.actor.echo(["a"]) == ["a"]
        assert group.critic.echo(["a", "b"]) == ["a", "b"]


def test_roles_with_different_options_for_one_process_are_rejected() -> None:
    actor = RayClassWithInitArgs(Plain).update_options({"memory": 1})
    critic = RayClassWithInitArgs(Plain).update_options({"memory": 2})
    with pytest.raises(ConfigError) as caught:
        create_colocated_worker_cls({"actor": actor, "critic": critic})
    assert (caught.value.key, caught.value.value) == ("memory", 2)


@pytest.mark.parametrize(("classes", "key"), [({}, "class_dict"), (Plain, "class_dict"), ({"actor": Plain}, "actor")])
def test_what_is_no_dict_of_classes_with_their_arguments_is_rejected(classes: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create_colocated_worker_cls(classes)
    assert caught.value.key == key
