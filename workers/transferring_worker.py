"""The base class of workers whose weights are sent to another group, or received from one."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from mcontroller.data.protocol import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError, DataError, before_changes
from mcontroller.group import WorkerGroup
from workers.config import ActorConfig
from workers.generate.rollout_protocol import PolicyWeights, ReadableRollout, Rollout
from workers.gpu_ids import gpu_id, visible_gpus
from workers.trained_worker import TrainedWorker
from workers.weights.fingerprints import Fingerprint, shard_fingerprints
from workers.weights.hf.model import CheckpointTensors
from workers.weights.hf.names import hf_shards, model_family
from workers.weights.shards import WeightShard, model_shards, unknown_positions
from workers.weights.transfer.endpoint import RankPlan, TransferEndpoint, TransferOutcome
from workers.weights.transfer.plan import RankWeights, ServedEngine
from workers.weights.transfer.transports import TRANSPORTS
from workers.weights.transfer.weight_transfer import WeightTransfer

__all__ = ["TransferringWorker"]

MAY_DIFFER = (
    *("attention_dropout", "hidden_dropout", "init_method_std", "max_sequence_length"),
    *("dtype", "transformer_impl", "seed", "hf_path", "family", "transformer"),
)
"""Fields of ModelConfig that two groups with the same weights may differ in."""

OF_AN_ENGINE = (
    "parallel",
    "max_rows",
    "memory_fraction",
    "engine",
    "vllm",
    "verify_weights",
    "unverified_reason",
)
"""Fields of RolloutConfig that only the group that generates reads."""


class TransferringWorker(TrainedWorker):
    """A worker that sends its weights to another group, or receives them; ``WeightTransfer`` calls these methods.

    Attributes:
        policy_version: the version of the policy that this worker has: the number of calls that trained it, at the
            actor or, for weights that were received, at the group that sent them.
        sampled_batches: number of batches that were sampled so far, on which the seeds of the next samples depend.
        serves_engine: whether this worker has an engine with the weights, and no model.
        rollout: what generates; None if this worker does not.
        rollout_version: the ``weights_version`` that the engine has; None if it has no weights.
    """

    parts_needed: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **TrainedWorker.parts_needed,
        "describe_weights": (),
        "listen_for_weights": (),
        "connect_weights": (),
        "send_weights": ("params",),
        "receive_weights": ("params",),
        "weight_fingerprints": ("params",),
        "accept_weights": (),
        "close_weights": (),
        "has_weights": (),
        "sampling_state": (),
        "restore_sampling": (),
    }

    config: ActorConfig
    serves_engine: bool = False
    rollout: Rollout | None = None
    rollout_version: int | None = None
    sampled_batches: int = 0
    _received_version: int | None = None
    _incomplete: str = ""

    @classmethod
    def transfer_weights(
        cls, source: WorkerGroup[Any], target: WorkerGroup[Any], *, transport: str = "auto", timeout: float = 600.0
    ) -> WeightTransfer:
        """Return a transfer of weights between two groups of such workers; see ``WeightTransfer``."""
        return WeightTransfer(source, target, transport=transport, timeout=timeout)

    @classmethod
    def check_transfer(cls, source: ActorConfig, target: ActorConfig, transport: str) -> None:
        """Check that weights can go from groups of one configuration to groups of another, before any process starts.

        Raises:
            ConfigError: the models differ in more than dtype, seed and training; the settings of generation differ;
                only one of them has ``router_replay=rollout``; or there is no such transport.
        """
        if transport != "auto":
            TRANSPORTS.get_or_raise(transport, key="trainer.weight_transport")
        _check_equal("model", source.model, target.model, MAY_DIFFER)
        _check_equal("rollout", source.rollout, target.rollout, OF_AN_ENGINE)
        modes = source.router_replay, target.router_replay
        if "rollout" in modes and modes[0] != modes[1]:
            raise ConfigError(
                f"actor_rollout_ref.router_replay is {modes[0]!r}, and rollout.router_replay {modes[1]!r}: the actor "
                "replays what the rollout records; set both to the same value",
                key="rollout.router_replay",
                value=target.router_replay,
            )

    @property
    def policy_version(self) -> int:
        """The version of the policy that this worker has."""
        return self.updates if self._received_version is None else self._received_version

    @property
    def _endpoints(self) -> dict[str, TransferEndpoint]:
        return self.__dict__.setdefault("_weight_endpoints", {})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sampling_state(self) -> dict[str, int]:
        """Return the state that the samples of the next ``generate_sequences`` depend on, of values for JSON.

        The checkpoint of an actor that generates has it; the trainer saves that of a group that only generates.
        """
        return {"sampled_batches": self.sampled_batches}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_sampling(self, state: Mapping[str, int]) -> None:
        """Continue to sample from a ``sampling_state``."""
        self.sampled_batches = state["sampled_batches"]

    def parts_for(self, method: str) -> tuple[str, ...] | None:
        """Return the parts that ``method`` needs.

        Raises:
            ConfigError: it needs a model, and this worker only serves an engine.
        """
        needed = super().parts_for(method)
        if not self.serves_engine or not needed or "rollout" in needed:
            return needed
        if method in ("receive_weights", "weight_fingerprints"):
            return ("rollout",)
        with before_changes():
            text = f"{method} needs a model, and a worker that only serves an engine has none"
            raise ConfigError(text, key="role", value="rollout")

    def check_weights_complete(self, method: str) -> None:
        """Raise DataError if a transfer to this worker has begun and was not completed."""
        if self._incomplete:
            with before_changes():
                raise DataError(
                    f"{method}: {self._incomplete}, so the weights are partly old and partly new: run a WeightTransfer "
                    "to this group first",
                    method=method,
                )

    def with_policy_version(self, generated: DataProto) -> DataProto:
        """Return the batch with ``policy_version``, int64 ``[rows]``."""
        column = torch.full((len(generated),), self.policy_version, dtype=torch.long)
        return generated.with_tensors({"policy_version": column})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def describe_weights(self, hf_names: bool = False) -> RankWeights:
        """Return which parts of the model this rank has, and where it runs.

        Args:
            hf_names: whether the parts are those of a Hugging Face checkpoint.

        Raises:
            DataError: ``hf_names``, and a tensor has no counterpart in a Hugging Face checkpoint.
        """
        gpu = gpu_id(self.device) if self.device.type == "cuda" else "cpu"
        verify = self.config.rollout.verify_weights != "never"
        shards, engine = self._shards(hf_names), None
        if self.serves_engine:
            verify = verify and isinstance(self.rollout, ReadableRollout)
            if getattr(self.rollout, "receives_weights", True):
                dtype = self.config.model.dtype
                engine = ServedEngine(dtype, getattr(torch, dtype).itemsize, self.config.rollout.vllm.bucket_bytes)
        described = tuple(shard.described() for shard in shards)
        unknown = () if hf_names else tuple(unknown_positions(shards))
        return RankWeights(described, unknown, _node()[0], os.getpid(), gpu, verify, visible_gpus(), engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_fingerprints(
        self, dtypes: Mapping[str, Sequence[str]] | None = None, hf_names: bool = False
    ) -> list[Fingerprint]:
        """Return the fingerprints of the parts that this rank has, or that have arrived in its engine.

        Args:
            dtypes: see ``shard_fingerprints``.
            hf_names: see ``describe_weights``.
        """
        if self.serves_engine:
            return list(self.rollout.fingerprints().fingerprints) if isinstance(self.rollout, ReadableRollout) else []
        return shard_fingerprints(self._shards(hf_names), dtypes)

    def _shards(self, hf_names: bool) -> list[WeightShard]:
        if hf_names:
            return hf_shards(self.model, self.context, model_family(self.model))
        return model_shards(self.model, self.context)

    def weights_of_checkpoint(self) -> PolicyWeights:
        """Return the weights of ``model.hf_path`` for an engine that has got none from another group.

        Raises:
            DataError: there is no such path, or the engine had other weights, which it has lost.
        """
        path = self.config.model.hf_path
        if path is None or self._received_version is not None:
            with before_changes():
                raise DataError(
                    "the engine has no weights"
                    + (" any more, since it has slept" if self._received_version is not None else "")
                    + ": run a WeightTransfer to this group first"
                    + ("" if path is not None else ", or set model.hf_path")
                )
        whole = CheckpointTensors(path, self.config.rollout.vllm.bucket_bytes)
        return PolicyWeights([], self.context, whole, self.device)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def has_weights(self) -> bool:
        """Return whether this worker can generate without another transfer: an engine that has slept cannot."""
        return not self._incomplete and (not self.serves_engine or self.rollout_version == self.weights_version)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def listen_for_weights(self, plan: RankPlan) -> Any:
        """Open this rank's side of a transfer, and return what other ranks need to reach it."""
        endpoint = TransferEndpoint(plan, self._shards(plan.hf_names and plan.sends), self.device, _node()[1])
        self._endpoints[plan.transfer] = endpoint
        return endpoint.listen()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connect_weights(self, transfer: str, addresses: Mapping[int, Any]) -> TransferOutcome:
        """Connect to the ranks of the other group, which do this at the same time."""
        return self._endpoints[transfer].connect(addresses)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, transfer: str, timeout: float) -> TransferOutcome:
        """Send the current weights to the other group, which calls ``receive_weights`` at the same time.

        A failure of the other group is a result, not an error: nothing has changed here, and this group stays usable.
        """
        return self._endpoints[transfer].send(timeout, self.policy_version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights(self, transfer: str, timeout: float) -> TransferOutcome:
        """Replace the weights by those of the other group. They count as complete after ``accept_weights``."""
        self._incomplete = "a transfer of weights was not completed"
        self.weights_version += 1
        endpoint, rollout = self._endpoints[transfer], self.rollout
        if not self.serves_engine or rollout is None:
            return endpoint.receive(timeout)
        weights = PolicyWeights([], self.context, endpoint, self.device)
        return endpoint.receive_whole(timeout, lambda: rollout.update_weights(weights))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def accept_weights(self, version: int) -> None:
        """Mark the received weights as complete: all ranks have them, and they are those of ``version``."""
        self._received_version, self._incomplete = version, ""
        if self.serves_engine:
            self.rollout_version = self.weights_version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close_weights(self, transfer: str) -> None:
        """End this rank's side of a transfer, and free its buffers."""
        endpoint = self._endpoints.pop(transfer, None)
        if endpoint is not None:
            endpoint.close()


def _node() -> tuple[str, str]:
    """Return the id of this node, and its address for other nodes."""
    ray = sys.modules.get("ray")  # not imported here: parts a to c of gpucheck run without it
    if ray is None or not ray.is_initialized():
        return socket.gethostname(), "127.0.0.1"
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


def _check_equal(section: str, of_actor: Any, of_rollout: Any, may_differ: tuple[str, ...]) -> None:
    for field in dataclasses.fields(of_actor):
        ours, theirs = getattr(of_actor, field.name), getattr(of_rollout, field.name)
        if field.name not in may_differ and ours != theirs:
            raise ConfigError(
                f"rollout.{section}.{field.name} is {theirs!r}, and actor_rollout_ref.{section}.{field.name} is "
                f"{ours!r}: both groups have the same policy, so set them to the same value",
                key=f"rollout.{section}.{field.name}",
                value=theirs,
            )
