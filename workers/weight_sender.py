"""The weights of a worker that are sent to another group, or received from one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import DataError, before_changes
from workers.config import ActorConfig
from workers.generate.generator import Generator
from workers.generate.rollout_protocol import ReadableRollout
from workers.gpu_ids import gpu_id, node_address, node_id, visible_gpus
from workers.lora.adapters import adapters_of
from workers.same_policy import differing_fields
from workers.train.state import TrainingState
from workers.weights.fingerprints import Fingerprint, shard_fingerprints
from workers.weights.hf.names import bridge_of, hf_shards, model_family
from workers.weights.shards import WeightShard, check_movable, model_shards
from workers.weights.transfer.endpoint import RankSchedule, TransferEndpoint, TransferOutcome
from workers.weights.transfer.plan import RankWeights, ServedEngine
from workers.weights.whole_tensors import receives_all


class WeightSender:
    """Sends the weights of a worker to another group, or receives them; ``WeightTransfer`` calls these methods.

    Args:
        state: the model.
        config: of the actor; whether received weights are verified.
        device: of this rank.
        generator: has the engine that gets the weights if the worker has no model.
    """

    def __init__(self, state: TrainingState, config: ActorConfig, device: torch.device, generator: Generator) -> None:
        self._state, self._config, self._device, self._generator = state, config, device, generator
        self._endpoints: dict[str, TransferEndpoint] = {}
        self._incomplete = ""

    def check_weights_complete(self, method: str) -> None:
        """Raise DataError if a transfer to this worker has begun and was not completed."""
        if self._incomplete:
            with before_changes():
                raise DataError(
                    f"{method}: {self._incomplete}, so the weights are partly old and partly new: run a WeightTransfer "
                    "to this group first",
                    method=method,
                )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def describe_weights(self, receiver: ServedEngine | None = None) -> RankWeights:
        """Return which parts of the model this rank has, and where it runs.

        Args:
            receiver: the engine that gets them, if one does: the parts are tensors of a Hugging Face checkpoint.

        Raises:
            DataError: the engine has another model; a tensor has no counterpart in a Hugging Face checkpoint; or the
                position of a weight in the whole model is unknown.
        """
        hf_names = receiver is not None
        if receiver is not None:
            self._check_model(receiver)
        gpu = gpu_id(self._device) if self._device.type == "cuda" else "cpu"
        verify = self._config.rollout.verify_weights != "never"
        shards, engine = self._shards(hf_names), None
        if self._generator.serves_engine:
            verify = verify and isinstance(self._generator.rollout, ReadableRollout)
            if receives_all(self._generator.rollout.receivers, dist.get_rank()):
                dtype = self._config.model.dtype
                model = self._config.model, self._config.parallel
                bucket_bytes = self._config.rollout.vllm.bucket_bytes
                engine = ServedEngine(dtype, getattr(torch, dtype).itemsize, bucket_bytes, model)
        if not hf_names:
            with before_changes():
                check_movable(shards)
        return RankWeights(
            tensors=tuple(shard.part for shard in shards),
            node=node_id(),
            pid=os.getpid(),
            device=gpu,
            verify=verify,
            visible=visible_gpus(),
            engine=engine,
            nccl_host=os.environ.get("NCCL_HOSTID", ""),
        )

    def _check_model(self, engine: ServedEngine) -> None:
        """Raise DataError if an engine has another model, since it does not report the shapes of its tensors."""
        (theirs, their_axes), config = engine.model, self._config
        with before_changes():
            differing = differing_fields(config.model, theirs, config.parallel, their_axes)
            if differing:
                values = (f"{name} is {one!r}, the engine's is {other!r}" for name, (one, other) in differing.items())
                raise DataError(
                    f"the engine that gets the weights has another model: {'; '.join(values):.500}; configure both "
                    "groups with the same one",
                    differing=differing,
                )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_fingerprints(
        self, dtypes: Mapping[str, Sequence[str]] | None = None, hf_names: bool = False
    ) -> list[Fingerprint]:
        """Return the fingerprints of the parts that this rank has, or that have arrived in its engine.

        Args:
            dtypes: see ``shard_fingerprints``.
            hf_names: whether the parts are tensors of a Hugging Face checkpoint.
        """
        if self._generator.serves_engine:
            engine = self._generator.rollout
            return list(engine.fingerprints()) if isinstance(engine, ReadableRollout) else []
        return shard_fingerprints(self._shards(hf_names), dtypes)

    def _shards(self, hf_names: bool) -> list[WeightShard]:
        if hf_names:
            return hf_shards(self._state.model, self._state.context, model_family(self._state.model))
        return model_shards(self._state.model, self._state.context)

    def has_weights(self) -> bool:
        """Return whether this worker can generate without another transfer: an engine that has slept cannot."""
        return not self._incomplete and (
            not self._generator.serves_engine or self._generator.version == self._state.weights_version
        )

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def listen_for_weights(self, schedule: RankSchedule) -> Any:
        """Open this rank's side of a transfer, and return what other ranks need to reach it.

        Weights arrive with the sender's adapter merged, so adapters of this model are off from now on.
        """
        for adapters in () if schedule.sends else adapters_of(self._state.model):
            adapters.enabled = False
        endpoint = TransferEndpoint(
            schedule, self._shards(schedule.hf_names and schedule.sends), self._device, node_address()
        )
        self._endpoints[schedule.transfer] = endpoint
        return endpoint.listen()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connect_weights(self, transfer: str, addresses: Mapping[int, Any]) -> TransferOutcome:
        """Connect to the ranks of the other group, which do this at the same time."""
        return self._endpoints[transfer].connect(addresses)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, transfer: str, timeout: float) -> TransferOutcome:
        """Send the current weights to the other group, which calls ``receive_weights`` at the same time.

        A failure of the other group is a result, not an error: nothing has changed on this rank, and this group stays
        usable.
        """
        if bridge_of(self._state.model) is not None:
            self._shards(True)  # the endpoint reads copies of the weights, which this brings up to date
        return self._endpoints[transfer].send(timeout, self._state.policy_version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights(self, transfer: str, timeout: float) -> TransferOutcome:
        """Replace the weights by the other group's. They count as complete after ``accept_weights``."""
        self._incomplete = "a transfer of weights was not completed"
        self._state.weights_version += 1
        endpoint, rollout = self._endpoints[transfer], self._generator.rollout
        if not self._generator.serves_engine or rollout is None:
            return endpoint.receive(timeout)
        return endpoint.receive(timeout, lambda: rollout.update_weights(endpoint))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def accept_weights(self, version: int) -> None:
        """Mark the received weights as complete: all ranks have them, at ``version``."""
        self._state.received_version, self._incomplete = version, ""
        if self._generator.serves_engine:
            self._generator.version = self._state.weights_version
            if self._generator.rollout is not None:
                self._generator.rollout.resume(version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close_weights(self, transfer: str) -> None:
        """End this rank's side of a transfer, and free its buffers."""
        endpoint = self._endpoints.pop(transfer, None)
        if endpoint is not None:
            endpoint.close()
