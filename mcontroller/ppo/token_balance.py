"""Which rows of a batch each data-parallel rank gets: about as many tokens as every other rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mcontroller.data.protocol import DataProto
from mcontroller.group import GroupMethod, WorkerGroup
from mcontroller.ppo.data import MINI_BATCHES, PROMPTS, TOKENS, columns
from mcontroller.ray.class_with_init import RayClassWithInitArgs

__all__ = ["TokenBalance"]


Method = GroupMethod[..., Any, Any]


class TokenBalance:
    """Makes calls split their rows by tokens. Results and mini-batches are the same as without, up to rounding.

    A rank that has more tokens than the others makes them wait in every optimizer step, so the rows of each mini-batch
    are balanced by themselves. Methods that are registered with a ``balance`` of their own keep it.

    Args:
        workers: the worker classes of the run's groups with their arguments, by role.
        groups: the groups by role; those that start later may be added.
        enabled: ``trainer.balance_tokens``.
    """

    def __init__(
        self, workers: Mapping[str, RayClassWithInitArgs[Any]], groups: Mapping[str, WorkerGroup[Any]], enabled: bool
    ) -> None:
        self._workers, self._groups = workers, groups
        self._enabled = enabled

    def of(self, method: Method) -> Method:
        """Return a method that splits its batch, which has the columns ``TOKENS`` and ``PROMPTS``, by tokens."""
        if not self._enabled or method.registration.rows.balance is not None or method.plan().shard_count == 1:
            return method
        config: Any = self._worker(method).kwargs["config"]
        shares = getattr(config, "share_prompts", False) and not getattr(config, "packed", False)
        return method.options(balance=TOKENS, group_by=PROMPTS if shares else None)

    def update(self, method: Method, batch: DataProto, update: int) -> tuple[Method, DataProto]:
        """Return an update that splits each of its mini-batches by tokens, and the batch with these mini-batches.

        Worker classes without a class method ``mini_batches`` have the tokens of the whole batch balanced.

        Args:
            method: of actor or critic.
            batch: with ``TOKENS``, ``PROMPTS`` and ``response_mask``.
            update: number of the update, which the draw of the mini-batches depends on.
        """
        balanced, worker = self.of(method), self._worker(method)
        draw = getattr(worker.cls, "mini_batches", None)
        (mask,) = columns(batch, "response_mask")
        counted = mask.bool().any(1)
        if balanced is method or draw is None or not bool(counted.any()):
            return balanced, batch
        drawn = draw(worker.kwargs["config"], int(counted.sum()), batch.meta_info.get("n", 1), update)
        numbers = torch.full((len(batch), drawn.size(1)), -1)
        numbers[counted] = drawn
        return balanced.options(within=MINI_BATCHES), batch.with_tensors({MINI_BATCHES: numbers})

    def _worker(self, method: Method) -> RayClassWithInitArgs[Any]:
        (role,) = (role for role, group in self._groups.items() if group is method.group)
        return self._workers[role]
