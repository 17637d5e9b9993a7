"""Generate with the current weights of a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from mcontroller.data.protocol import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from workers.checkpoint.state import TrainingState
from workers.config import ActorConfig
from workers.generate.arrival import ArrivalCheck
from workers.generate.canary_check import CanaryCheck
from workers.generate.generate_batch import generate_batch
from workers.generate.rollout_protocol import PolicyWeights, Rollout
from workers.memory.offloader import Offloader
from workers.router_replay.replay import check_recorded

__all__ = ["Generator"]


class Generator:
    """Generates with the rollout of a worker, after its weights were updated to those of the policy.

    As a part that can be offloaded, it is the rollout: which comes back without its weights.

    Args:
        config: of the actor.
        state: the policy, and the number of batches that were sampled so far, on which the seeds of the next depend.
        offloader: brings back the weights of the policy.
        scores: returns the policy's scores of a batch: see ``CanaryCheck``.

    Attributes:
        rollout: the engine; None until ``use``.
        version: the ``weights_version`` of the weights that it has; None if it has none.
    """

    def __init__(
        self,
        config: ActorConfig,
        state: TrainingState,
        offloader: Offloader,
        scores: Callable[[DataProto, str], Tensor | None],
    ) -> None:
        self._config, self._state, self._offloader, self._scores = config, state, offloader, scores
        self._weights: PolicyWeights | None = None
        self.rollout: Rollout | None = None
        self.version: int | None = None
        state.counters["sampled_batches"] = 0

    def use(self, rollout: Rollout) -> None:
        """Generate with this rollout from now on."""
        self.rollout = rollout
        canaries = CanaryCheck(self._config, self._state.context, self._scores)
        self.arrival = ArrivalCheck(self._config.rollout, rollout, canaries)
        if rollout.holds_weights:
            self._offloader.sleepers["rollout"] = self
        else:
            self._offloader.needs["generate_sequences"] = ("params",)
        if getattr(rollout, "sleeps_beside_training", False):
            self._offloader.alone.add("rollout")

    def generate(self, prompts: DataProto, policy_version: Callable[[DataProto], DataProto]) -> DataProto | None:
        """Generate ``n`` responses to every prompt; see ``ActorRolloutRefWorker.generate_sequences``.

        Args:
            prompts: of this rank.
            policy_version: adds the version of the policy to the batch.
        """
        config, counters = self._config, self._state.counters
        call = counters["sampled_batches"]
        counters["sampled_batches"] += bool(prompts.meta_info.get("do_sample", config.rollout.do_sample))
        rollout, metrics = self.current_rollout()
        generated = generate_batch(
            rollout,
            prompts,
            config.rollout,
            vocab_size=config.model.vocab_size,
            call=call,
            dp_group=self._state.context.pg.dp,
        )
        if generated is None:
            return None
        check_recorded(config.router_replay, generated.tensors(), rollout)
        generated = policy_version(generated)
        generated.meta_info.setdefault("temperature", config.rollout.temperature)
        generated.meta_info.setdefault("n", config.rollout.n)
        if metrics:
            generated.meta_info["metrics"] = {f"rollout/{name}": value for name, value in metrics.items()}
        return generated

    def current_rollout(self) -> tuple[Rollout, Mapping[str, float]]:
        """Return the rollout with the policy's current weights, and the metrics of updating them.

        If the policy was offloaded, it is offloaded again before a rollout with a copy of the weights generates.
        """
        assert self.rollout is not None
        metrics: Mapping[str, float] = {}
        if not self.rollout.holds_weights or self.version != self._state.weights_version:
            was_offloaded = "params" in self._offloader.offloaded.parts
            loaded, weights = self.version is not None, self.rollout_weights()
            metrics = self.arrival.update(self.rollout, weights, self._state.weights_version, loaded=loaded)
            self.version = self._state.weights_version
            if was_offloaded and self.rollout.holds_weights:
                self._offloader.offload(("params",))
        return self.rollout, metrics

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def rollout_weights(self) -> PolicyWeights:
        """Return the policy's current weights, for the engine that generates: a stream of named tensors.

        The engine calls this on the worker, not through a group. Offloaded weights are brought back to the device.
        """
        self._offloader.reload_for("rollout_weights")
        if self._weights is None or self._weights.chunks is not self._state.model:
            self._weights = PolicyWeights(self._state.model, self._state.context)
        return self._weights

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sampling_state(self) -> dict[str, int]:
        """Return the state that the samples of the next ``generate_sequences`` depend on, of values for JSON.

        The checkpoint of an actor that generates has it; the trainer saves that of a group that only generates.
        """
        return {"sampled_batches": self._state.counters["sampled_batches"]}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_sampling(self, state: Mapping[str, int]) -> None:
        """Continue to sample from a ``sampling_state``."""
        self._state.counters["sampled_batches"] = state["sampled_batches"]

    def sleep(self) -> int:
        """Free the device memory of the rollout, and return how many bytes that were."""
        assert self.rollout is not None
        self.version = None
        return self.rollout.sleep()

    def wake_up(self) -> None:
        """Allocate the device memory of the rollout again."""
        assert self.rollout is not None
        self.rollout.wake_up()
