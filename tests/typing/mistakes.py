# ruff: noqa: F401, B018, I001
"""Mistakes that mypy with the plugin must report: each line has the expected text in its comment."""

from __future__ import annotations

import mcontroller
from mcontroller import create_colocated_worker_clss  # error: has no attribute "create_colocated_worker_clss"
from mcontroller import (
    ClassWithInitArgs,
    DataProto,
    Dispatch,
    MegatronRayWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    Worker,
    register,
)
from mcontroller.testing.pytest_plugin import MockGroup
from mcontroller.testing import mock_worker_group
from workers import CriticConfig, CriticWorker, ParallelConfig
from workers import NoSuchWorker  # error: has no attribute "NoSuchWorker"

mcontroller.DataPorto  # error: Module has no attribute "DataPorto"
pool = RayResourcePool(nonsense=3)  # error: Unexpected keyword argument "nonsense" for "RayResourcePool"
RayResourcePool(4)  # error: Argument 1 to "RayResourcePool" has incompatible type "int"


class Model(Worker):
    def __init__(self, scale: int = 1) -> None: ...

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute(self, batch: DataProto, factor: float = 1.0) -> DataProto: ...

    @register(Dispatch.ONE_TO_ALL, pading="repeat")  # error: Unexpected keyword argument "pading" for "register"
    def misspelled(self) -> None: ...

    @register("ONE_TO_ALL")  # error: Argument 1 to "register" has incompatible type "str"
    def text(self) -> None: ...

    @register(Dispatch.ONE_TO_AL)  # error: "type[Dispatch]" has no attribute "ONE_TO_AL"
    def unknown(self) -> None: ...

    @register()
    def each(self, value: int) -> int: ...

    def helper(self) -> int: ...


RayClassWithInitArgs(Model, scael=2)  # error: Unexpected keyword argument "scael" for "RayClassWithInitArgs"
ClassWithInitArgs(Model, scale="2")  # error: Argument "scale" to "ClassWithInitArgs" has incompatible type "str"
CriticConfig(nonsense=1)  # error: Unexpected keyword argument "nonsense" for "CriticConfig"
ParallelConfig(dpp=2)  # error: Unexpected keyword argument "dpp" for "ParallelConfig"
RayClassWithInitArgs(CriticWorker, confg=1)  # error: Unexpected keyword argument "confg" for "RayClassWithInitArgs"
MegatronRayWorkerGroup(pool, Model)  # error: Argument 2 to "MegatronRayWorkerGroup" has incompatible type "type[Model]"

group = MegatronRayWorkerGroup(pool, RayClassWithInitArgs(Model), name_prefix="model")
batch = DataProto()
group.compute(3)  # error: Argument 1 to "__call__" of "GroupMethod" has incompatible type "int"
group.compute(batch, factr=2)  # error: Unexpected keyword argument "factr"
group.compute.explain()  # error: Missing positional argument "batch"
group.compute.options(paddin="none")  # error: Unexpected keyword argument "paddin"
group.compute.options(blocking=False)(batch).bach  # error: "DataProto" has no attribute "bach"
group.each(3)  # error: has incompatible type "int"; expected "Sequence[int]"
group.compuet(batch)  # error: The group of Model has no method "compuet"; did you mean "compute"?
group.helper()  # error: Model.helper cannot be called through a group: decorate it with @register(...)
number: int = group.compute(batch)  # error: Incompatible types in assignment (expression has type "DataProto"

mock_worker_group(Model, 2, nonsense=3)  # error: Unexpected keyword argument "nonsense" for "mock_worker_group"
mock_worker_group(Model, 2, "3")  # error: Argument 3 to "mock_worker_group" has incompatible type "str"
mock_worker_group(Model, 2, failures={1: ValueError()})  # error: Dict entry 0 has incompatible type "int": "ValueError"
mock_worker_group(ClassWithInitArgs(Model), 2, scale=3)  # error: Unexpected keyword argument "scale"


def test_with_the_fixture(mock_group: MockGroup) -> None:
    mock_group(Model, 2, nonsense=3)  # error: Unexpected keyword argument "nonsense"


mock_worker_group(Model, 2).compuet(batch)  # error: The group of Model has no method "compuet"
