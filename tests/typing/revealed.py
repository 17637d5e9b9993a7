"""Types that mypy with the plugin must find: each line with ``reveal_type`` has the expected text in its comment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, reveal_type

from mcontroller import (
    ClassWithInitArgs,
    DataProto,
    Dispatch,
    Future,
    LocalWorkerGroup,
    MegatronRayWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls_fused,
    register,
)
from mcontroller.testing import mock_worker_group
from mcontroller.testing.pytest_plugin import MockGroup
from parallel_state import ParallelLayout
from tests.typing.roles import STAGES, Critic, Special

reveal_type(Dispatch.MEGATRON_COMPUTE)  # DispatchSpec[Literal['entries'], Literal['list']]
reveal_type(STAGES)  # DispatchSpec[Literal['whole'], Literal['list']]
reveal_type(Critic({}).compute_values)  # def (batch: DataProto, scale: float =) -> DataProto | None

pool = RayResourcePool([2], use_gpu=False)
init = RayClassWithInitArgs(Critic, config={"layers": 2})
batch = DataProto()
reveal_type(init)  # RayClassWithInitArgs[Critic]

critic = MegatronRayWorkerGroup(pool, init, name_prefix="critic")
reveal_type(critic)  # MegatronRayWorkerGroup[Critic]
reveal_type(critic.compute_values(batch))  # DataProto
reveal_type(critic.compute_values(batch=critic.update(batch), scale=2))  # DataProto
reveal_type(critic.compute_values.explain(batch))  # Explanation
reveal_type(critic.compute_values.options(padding="repeat", timeout=3)(batch))  # DataProto
reveal_type(critic.compute_values.options(blocking=False)(batch))  # DataProto
reveal_type(critic.compute_values.options(blocking=False)(batch).get())  # DataProto
reveal_type(critic.update(batch))  # DataProto
reveal_type(critic.update.options(blocking=True)(batch))  # DataProto
reveal_type(critic.save("path", step=3))  # list[int]
reveal_type(critic.save.options(blocking=False)("path"))  # Future[list[int]]
reveal_type(critic.later(3))  # list[str]
reveal_type(critic.where())  # Future[str]
reveal_type(critic.where.options(blocking=True)())  # str
reveal_type(critic.each([1, 2]))  # list[str]
reveal_type(critic.stage(1))  # list[str]
reveal_type(critic.shards([1, 2]))  # list[str]
reveal_type(critic.custom([1, 2]))  # Any
reveal_type(critic.export("path"))  # list[int]
reveal_type(critic.execute_all("helper"))  # Future[list[Any]]
reveal_type(critic.get_megatron_rank_info(0).tp_rank)  # int
reveal_type(critic.name)  # str

special = RayWorkerGroup(pool, RayClassWithInitArgs(Special, {}))
reveal_type(special.compute_values(batch, extra=1))  # DataProto
reveal_type(special.each)  # GroupMethod[[value: typing.Sequence[int]], list[str], Future[list[str]]]
reveal_type(LocalWorkerGroup(ClassWithInitArgs(Critic, {})).workers)  # list[Critic]
reveal_type(LocalWorkerGroup(Special).save("path"))  # list[int]

layout = ParallelLayout(8, tp=2, pp=2)
mocked = mock_worker_group(Critic, layout, {"layers": 2}, role="value", name="critic", timeout=3)
reveal_type(mocked)  # MockWorkerGroup[Critic]
reveal_type(mocked.compute_values(batch))  # DataProto
reveal_type(mock_worker_group(ClassWithInitArgs(Critic, {}), 2, failures={}).later(2))  # list[str]

fused = MegatronRayWorkerGroup(pool, create_colocated_worker_cls_fused({"critic": init}))
reveal_type(fused.critic)  # Any
role: MegatronRayWorkerGroup[Critic] = fused.spawn(["critic"])["critic"]
reveal_type(role.save("path"))  # list[int]


def untyped(group: WorkerGroup, method: Callable[..., Future]) -> Any:
    reveal_type(group.anything)  # GroupMethod[..., Any, Any]


def test_with_the_fixture(mock_group: MockGroup) -> None:
    reveal_type(mock_group(Critic, layout, config={}).save("path"))  # list[int]


def above() -> None:
    reveal_type(mock_worker_group(Below, 2).compute(1))  # list[int]


class Below(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def compute(self, value: int) -> int: ...
