"""Workers for the tests of types."""

from __future__ import annotations

from mcontroller import DataProto, Dispatch, Execute, Worker, register
from mcontroller.worker import delegate

STAGES = Dispatch.over(collect={"tp": 0, "dp": 0}, by="pp")


class Exporter:
    @register(Dispatch.ONE_TO_ALL)
    def export(self, path: str) -> int:
        return len(path)


class Critic(Worker):
    export = delegate("exporter", Exporter.export)

    def __init__(self, config: dict[str, int], role: str = "critic") -> None: ...

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, padding="zero_loss")
    def compute_values(self, batch: DataProto, scale: float = 1.0) -> DataProto | None: ...

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, blocking=False)
    def update(self, batch: DataProto) -> DataProto: ...

    @register(Dispatch.ONE_TO_ALL)
    def save(self, path: str, *, step: int = 0) -> int: ...

    @register(Dispatch.ONE_TO_ALL)
    async def later(self, value: int) -> str: ...

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO, False)
    def where(self) -> str: ...

    @register()
    def each(self, value: int) -> str: ...

    @register(STAGES)
    def stage(self, value: int) -> str: ...

    @register(Dispatch.over("dp", result="list", arguments="entries"))
    def shards(self, value: int) -> str: ...

    @register({"dispatch_fn": print, "collect_fn": print})
    def custom(self, value: int) -> str: ...

    def helper(self) -> int: ...
