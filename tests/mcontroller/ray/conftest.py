"""Pools and groups of the cluster that the whole test run shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tests.mcontroller.ray.roles import Plain


@pytest.fixture
def pool(ray_cluster: None) -> Iterator[RayResourcePool]:
    """Two bundles of two slots each."""
    with RayResourcePool([2], use_gpu=False, name_prefix="two", max_colocate_count=2) as pool:
        yield pool


@pytest.fixture
def start(pool: RayResourcePool) -> Iterator[Callable[..., RayWorkerGroup]]:
    """Starts a group of ``Plain`` workers on ``pool``, and ends it after the test."""
    groups: list[RayWorkerGroup] = []

    def start(name: str = "plain", worker: type = Plain, *args: object, **kwargs: object) -> RayWorkerGroup:
        groups.append(RayWorkerGroup(pool, RayClassWithInitArgs(worker, *args), name_prefix=name, **kwargs))
        return groups[-1]

    yield start
    for group in groups:
        group.shutdown()


@pytest.fixture(scope="module")
def steady(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    """A group of four ranks that no test may break."""
    with (
        RayResourcePool([4], use_gpu=False, name_prefix="steady") as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(Plain), name_prefix="steady") as group,
    ):
        yield group
