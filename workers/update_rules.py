"""What ``RayPPOTrainer`` asks about the updates of actor and critic before it sends them a batch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from workers.columns import ROUTED_EXPERTS
from workers.config.roles import ActorConfig, CriticConfig
from workers.train.losses import columns_of_update
from workers.train.mini_batches import draw_mini_batches, shuffle_generator


class UpdateRules:
    """What ``RayPPOTrainer`` asks about the updates of a worker class; these answers fit every class.

    A worker class declares others with the attribute ``update_rules``, a class that derives from this one.

    Args:
        worker_cls: the worker class.
        config: its configuration.
    """

    def __init__(self, worker_cls: type, config: Any) -> None:
        self.worker_cls, self.config = worker_cls, config

    @staticmethod
    def of(worker_cls: type, config: Any) -> UpdateRules:
        """Return the rules that a worker class declares."""
        rules: type[UpdateRules] = getattr(worker_cls, "update_rules", UpdateRules)
        return rules(worker_cls, config)

    def check(self) -> None:
        """Raise ConfigError if a run cannot train with the configuration; called before any process starts."""

    def columns_read(self) -> Collection[str] | None:
        """Return which of ``STAGE_COLUMNS`` an update reads, so that the others are not sent; None: all."""
        return None

    def updates_once(self, rows: int, n: int) -> bool:
        """Return whether an update makes one optimizer step, and can do without ``old_log_probs``.

        Args:
            rows: responses of the batch.
            n: responses to each prompt.
        """
        return False

    def mini_batches(self, rows: int, n: int, update: int) -> Tensor | None:
        """Return the mini-batch of each row in each epoch of an update, int64 ``[rows, epochs]``.

        The trainer balances the tokens of each of them, and passes them as the column ``MINI_BATCHES``. None: it
        balances the rows of the whole batch.

        Args:
            rows: rows of the batch that have a valid token.
            n: responses to each prompt.
            update: number of the update, from 0.
        """
        return None

    def shares_prompts(self) -> bool:
        """Return whether a pass computes a prompt once for the rows that begin with it, which then stay together."""
        return False


class _ModelUpdateRules(UpdateRules):
    """The rules that actor and critic have in common."""

    config: ActorConfig | CriticConfig

    def mini_batches(self, rows: int, n: int, update: int) -> Tensor:
        """Return the mini-batch of each row in each epoch of an update; see ``UpdateRules``.

        A program that passes them as the column ``mini_batches`` of the update can order the rows as it likes, such as
        ``RayPPOTrainer``, which balances the tokens of every mini-batch over the data-parallel ranks.
        """
        config = self.config
        size = config.ppo_mini_batch_prompts * n or config.ppo_mini_batch_size
        generator = shuffle_generator(config.seed if config.shuffle else None, update)
        return draw_mini_batches(rows, size, config.ppo_epochs, generator)

    def shares_prompts(self) -> bool:
        """Return whether a pass computes a prompt once for the rows that begin with it."""
        return self.config.share_prompts and not self.config.packed

    def overrides(self, method: str) -> bool:
        """Return whether a subclass of the worker class has its own method of this name."""
        declared = next(cls for cls in reversed(self.worker_cls.__mro__) if "update_rules" in vars(cls))
        return getattr(self.worker_cls, method) is not getattr(declared, method)


class ActorUpdateRules(_ModelUpdateRules):
    """The rules of ``update_actor``."""

    config: ActorConfig

    def check(self) -> None:
        """Raise ConfigError if a prompt and its response can be longer than the model's sequences."""
        self.config.check_lengths()

    def updates_once(self, rows: int, n: int) -> bool:
        """Return whether ``update_actor`` can do without ``old_log_probs``: it makes one optimizer step of a batch.

        The log-probabilities before such a step are computed in the step. A class with a custom loss always needs them.
        """
        mini_batch = self.config.ppo_mini_batch_prompts * n or self.config.ppo_mini_batch_size
        return not self.overrides("loss") and self.config.ppo_epochs == 1 and rows <= mini_batch

    def columns_read(self) -> Collection[str] | None:
        """Return which columns that the stages of a step add ``update_actor`` reads; None if it is overridden."""
        if self.overrides("update_actor"):
            return None
        read = columns_of_update(self.config, {"old_log_probs", "importance_weights", "rollout_log_probs"})
        return read + [ROUTED_EXPERTS] * (self.config.router_replay != "none")


class CriticUpdateRules(_ModelUpdateRules):
    """The rules of ``update_critic``."""

    config: CriticConfig

    def columns_read(self) -> Collection[str] | None:
        """Return which columns that the stages of a step add ``update_critic`` reads; None if it is overridden."""
        return None if self.overrides("update_critic") else ("values", "returns")
