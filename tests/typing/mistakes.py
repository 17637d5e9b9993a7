# ruff: noqa: F401, B018, I001
"""Mistakes that type checkers must report: each line with an error has a part of its text in its comment."""

from __future__ import annotations

import mcontroller
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

    @register(Dispatch.ONE_TO_AL)  # error: "DispatchModes" has no attribute "ONE_TO_AL"
    def unknown(self) -> None: ...


Model(scael=2)  # error: Unexpected keyword argument "scael" for "Model"
Model().compute(3)  # error: Argument 1 to "compute" of "Model" has incompatible type "int"
RayClassWithInitArgs(Model, scael=2)  # error: Unexpected keyword argument "scael" for "RayClassWithInitArgs"
ClassWithInitArgs(Model, scale="2")  # error: Argument "scale" to "ClassWithInitArgs" has incompatible type "str"
CriticConfig(nonsense=1)  # error: Unexpected keyword argument "nonsense" for "CriticConfig"
ParallelConfig(dpp=2)  # error: Unexpected keyword argument "dpp" for "ParallelConfig"
RayClassWithInitArgs(CriticWorker, confg=1)  # error: Unexpected keyword argument "confg" for "RayClassWithInitArgs"
MegatronRayWorkerGroup(pool, Model)  # error: Argument 2 to "MegatronRayWorkerGroup" has incompatible type "type[Model]"
mock_worker_group(Model, 2, failures={1: ValueError()})  # error: Dict entry 0 has incompatible type "int": "ValueError"
