"""RoleWorker: what ``RayPPOTrainer`` reads from a worker class and calls on its workers, with defaults.

A worker of any role derives from it, and overrides what it supports. It loads neither Megatron nor a model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError
from mcontroller.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor

    from mcontroller.group import WorkerGroup
    from workers.config import ParallelConfig


@dataclass(frozen=True)
class PolicySettings:
    """The settings of a policy's configuration that ``RayPPOTrainer`` compares with those of the algorithm.

    Attributes:
        n: responses to each prompt; None if the configuration does not say.
        response_length: the most tokens of a response; None if the configuration does not say.
        use_kl_loss: whether the loss reads the reference; None: the trainer sets the field of the configuration.
        has_adapter: whether an adapter is trained beside the weights.
        router_replay: ``none``, ``rollout`` or ``old_log_probs``.
    """

    n: int | None = None
    response_length: int | None = None
    use_kl_loss: bool | None = False
    has_adapter: bool = False
    router_replay: str = "none"


class RoleWorker(Worker):
    """The base class of the workers of ``RayPPOTrainer``.

    A role also has ``init_model``, the methods that compute, such as ``generate_sequences`` and ``update_actor``, and,
    if it is trained, ``save_checkpoint`` and ``load_checkpoint`` with the arguments of ``ModelWorker``.
    """

    # ---- read from the class, before any process starts -------------------------------------------------------------

    @classmethod
    def check_run(cls, config: Any) -> None:
        """Raise ConfigError if a run cannot train with the configuration of the actor."""

    @classmethod
    def policy_settings(cls, config: Any) -> PolicySettings:
        """Return the settings of a policy that the algorithm depends on."""
        return PolicySettings()

    @classmethod
    def layouts(cls, config: Any) -> Sequence[ParallelConfig]:
        """Return the layouts that must divide the ranks of the group, if its pool changes its size."""
        return ()

    @classmethod
    def check_transfer(cls, source: Any, target: Any) -> None:
        """Check that weights of ``Role.Actor`` can be sent to ``Role.Rollout``.

        Args:
            source: the configuration of the actor.
            target: the configuration of the rollout.

        Raises:
            ConfigError: they cannot be sent; by default always.
        """
        raise ConfigError(
            f"{cls.__name__} cannot send its weights to a separate group, which Role.Actor and Role.Rollout need: "
            "override check_transfer and open_transfer, derive it from workers.ActorRolloutRefWorker, or map "
            "Role.ActorRollout",
            key="role_worker_mapping",
            value=cls.__name__,
        )

    @classmethod
    def open_transfer(cls, source: WorkerGroup[Any], target: WorkerGroup[Any], *, timeout: float) -> Any:
        """Return a transfer of weights with the methods ``run`` and ``close`` of ``WeightTransfer``: by default that.

        Args:
            source: the actor's group.
            target: the group that generates.
            timeout: seconds after which a transfer fails.
        """
        from workers.weights.transfer.weight_transfer import WeightTransfer  # loads torch

        return WeightTransfer(source, target, timeout=timeout)

    # ---- read from the class, before each update --------------------------------------------------------------------

    @classmethod
    def columns_read(cls, config: Any) -> Collection[str] | None:
        """Return which columns of the stages of a step an update reads, so that others are not sent; None: all."""
        return None

    @classmethod
    def updates_once(cls, config: Any, rows: int, n: int) -> bool:
        """Return whether an update makes one optimizer step, and can do without ``old_log_probs``.

        Args:
            config: the configuration of the worker.
            rows: responses of the batch.
            n: responses to each prompt.
        """
        return False

    @classmethod
    def mini_batches(cls, config: Any, rows: int, n: int, update: int) -> Tensor | None:
        """Return the mini-batch of each row in each epoch of an update, int64 ``[rows, epochs]``.

        The trainer balances the tokens of each of them, and passes them as the column ``mini_batches``. None: it
        balances the rows of the whole batch.

        Args:
            config: the configuration of the worker.
            rows: rows of the batch that have a valid token.
            n: responses to each prompt.
            update: number of the update, from 0.
        """
        return None

    @classmethod
    def shares_prompts(cls, config: Any) -> bool:
        """Return whether a pass computes a prompt once for the rows that begin with it, which then stay together."""
        return False

    # ---- called through the group -----------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload(
        self, parts: Sequence[str] | None = None, keep_for: str | None = None, communicators: bool = False
    ) -> int:
        """Free device memory for other groups, and return the bytes; by default nothing. See ``Offloader.offload``."""
        return 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_memory_use(self) -> dict[str, dict[str, float]]:
        """Return the memory of this process by method since the last call; see ``Offloader.take_memory_use``."""
        return {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, directory: str, at: Mapping[str, int] | None = None, nsys: bool = False) -> None:
        """Profile this rank until ``stop_profile``; by default not at all. See ``Profiler.start_profile``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> None:
        """End what ``start_profile`` began, and write its file."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def record_memory(self, directory: str) -> None:
        """Record the allocations of device memory; by default nothing. See ``Profiler.record_memory``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_for_checkpoint(self) -> None:
        """Wait until the last asynchronous save is complete; by default no save is asynchronous."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def verify_checkpoint(self, path: str) -> str:
        """Return how the checkpoint at ``path`` is damaged; "" if it is whole, or cannot be verified."""
        return ""

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def save_to_memory(self, path: str) -> int:
        """Write the state of this rank to a file in memory, and return its bytes; see ``Checkpointer``."""
        raise NotImplementedError(f"{type(self).__name__} must override save_to_memory for trainer.memory_save_freq")

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def load_from_memory(self, path: str) -> None:
        """Go on from a file that ``save_to_memory`` has written; see ``Checkpointer``."""
        raise NotImplementedError(f"{type(self).__name__} must override load_from_memory for trainer.memory_save_freq")

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def has_weights(self) -> bool:
        """Return whether this worker can generate without another transfer of weights."""
        return True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sampling_state(self) -> dict[str, int]:
        """Return the state that the samples of the next batch depend on, of values for JSON; by default none."""
        return {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_sampling(self, state: Mapping[str, int]) -> None:
        """Continue to sample from a ``sampling_state``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generation_limits(self) -> dict[str, Any]:
        """Return what ``generate_sequences`` accepts, for generation by trajectory; see ``Generator``."""
        raise NotImplementedError(f"{type(self).__name__} must override generation_limits to generate by trajectory")
