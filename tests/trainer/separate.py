"""Toy roles for runs in which actor and rollout are separate groups."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any, ClassVar

import torch

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError
from mcontroller.group import WorkerGroup
from tests.trainer.toy import CALLS, ToyActor, ToyCritic
from trainer import Role


@dataclasses.dataclass(frozen=True)
class Copied:
    policy_version: int
    fingerprint: int

    def metrics(self) -> dict[str, float]:
        return {"weights/seconds": 0.5}


class CopiedTable:
    """A transfer of the tables of local groups."""

    def __init__(self, source: WorkerGroup, target: WorkerGroup) -> None:
        self.source, self.target = source, target
        self.is_open = True

    def run(self) -> Copied:
        CALLS.append("transfer")
        ((table, version),) = self.source.send_weights()
        self.target.receive_weights(table, version)
        return Copied(version, zlib.crc32(table.numpy().tobytes()))

    def close(self) -> None:
        self.is_open = False


class SeparateActor(ToyActor):
    """An actor, or a rollout that has the table and version that it received."""

    kept = (*ToyActor.kept, "version")
    transfers: ClassVar[list[CopiedTable]] = []
    version: int = 0

    @classmethod
    def check_transfer(cls, source: float, target: float) -> None:
        if source != target:
            raise ConfigError("rollout differs", key="rollout", value=target)

    @classmethod
    def open_transfer(cls, source: WorkerGroup, target: WorkerGroup, **options: Any) -> CopiedTable:
        assert options == {"timeout": 600.0}
        cls.transfers.append(CopiedTable(source, target))
        return cls.transfers[-1]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self) -> tuple[torch.Tensor, int]:
        return self.table.clone(), self.version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights(self, table: torch.Tensor, version: int) -> None:
        self.table, self.version = table, version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sampling_state(self) -> dict[str, int]:
        return {"samples": self.samples}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_sampling(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        assert self.role == "rollout"
        generated = super().generate_sequences(prompts)
        log_probs = self._log_probs(self.table, generated)
        versions = torch.full((len(generated),), self.version)
        return generated.with_tensors({"rollout_log_probs": log_probs, "policy_version": versions})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        self.version += 1
        return super().update_actor(data)


SEPARATE = {
    Role.Actor: SeparateActor,
    Role.Rollout: SeparateActor,
    Role.RefPolicy: SeparateActor,
    Role.Critic: ToyCritic,
}
