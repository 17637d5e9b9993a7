"""The names that ported drivers use on Ray groups and pools."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ray

from mcontroller import (
    ConfigError,
    Dispatch,
    GroupError,
    MegatronRayWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_raw_cls,
    register,
)
from mcontroller.porting import parallel_put
from parallel_state import DistRankInfo, ParallelLayout
from tests.mcontroller.ray.roles import Neighbour, Plain, Reporting


class Ported(Reporting):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kinds(self, *values: Any) -> list[str]:
        return [type(value).__name__ for value in values]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def variables(self) -> tuple[str, str, str, str]:
        address, port = self.get_availale_master_addr_port()
        return os.environ["WG_PREFIX"], os.environ["WG_BACKEND"], address, port


def test_a_group_has_the_names_that_ported_drivers_use(pool: RayResourcePool) -> None:
    init = RayClassWithInitArgs(Ported, ParallelLayout(2, cp=2))
    with MegatronRayWorkerGroup(pool, init, name_prefix="actor", bin_pack=True) as group:
        assert (group.name_prefix, group.ray_cls_with_init, len(group.workers)) == ("actor", init, 2)
        assert (group.cp_size, group.tp_size) == (2, 1)
        assert group.get_megatron_rank_info(rank=1) == DistRankInfo(0, 0, 0, cp_rank=1)
        assert group.get_megatron_global_info().cp_size == 2
        assert group.master_address == group.executor.nodes[0] and group.master_port.isdigit()
        prefix, backend, address, port = group.variables()[1]
        assert (prefix, backend, address) == ("actor", "ray", group.master_address) and port.isdigit()
        assert group.execute_all_sync("get_cuda_visible_devices") == ["", ""]
        numbers, text = parallel_put([[1, 2], "text"])
        assert group.kinds(numbers, text, 3) == [["list", "str", "int"]] * 2
        assert group.echo([ray.put("value")]) == ["value"]
        with pytest.raises(ValueError, match=r"\.get\(\)"):
            ray.get(group.execute_all_async("variables"))
        with pytest.raises(TypeError, match=r"\.get\(\)"):
            ray.wait([group.execute_rank_zero_async("variables")])
        group.start_worker_aliveness_check(every_n_seconds=1)
    with pytest.raises(GroupError, match="has been shut down"):
        group.start_worker_aliveness_check()


def test_one_raw_class_runs_several_roles(pool: RayResourcePool) -> None:
    raw = create_colocated_worker_raw_cls(
        {"plain": RayClassWithInitArgs(Plain, "x"), "neighbour": RayClassWithInitArgs(Neighbour)}
    )
    assert raw.__name__ == "FusedWorker_plain_neighbour"
    with RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(raw))) as group:
        assert group.neighbour.get() == ["neighbour"] * 2
        assert group.spawn(["plain"])["plain"].first("y") == (0, "y")


def test_pools_are_keys_of_the_classes_of_their_roles(pool: RayResourcePool) -> None:
    classes: dict[RayResourcePool, dict[str, Any]] = {pool: {}}
    classes[pool]["actor"] = RayClassWithInitArgs(Plain)
    classes[pool]["actor"].set_additional_resource({"resources": {"fast": 1}})
    assert classes[pool]["actor"].options == {"resources": {"fast": 1}}


def test_spreading_the_bundles_of_a_node_is_rejected(pool: RayResourcePool) -> None:
    with pytest.raises(ConfigError, match="bin_pack is False"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Plain), bin_pack=False)
