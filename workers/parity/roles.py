"""A role in this process: configured without omegaconf, and called without Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, ModelConfig, OptimConfig, ParallelConfig, RolloutConfig

_Config = TypeVar("_Config")
TOKENS = {"eos_token_id": 1, "pad_token_id": 0}
"""The ids that sampling needs."""


def actor_config(settings: Mapping[str, Any]) -> ActorConfig:
    """Return the configuration of an actor without clipping, from nested fields, without omegaconf.

    Args:
        settings: fields of ActorConfig, such as ``Case.settings`` returns, with ``rollout``.
    """
    rollout = RolloutConfig(**settings.get("rollout", {}))
    return role_config(ActorConfig, {"clip_ratio": 100.0, **settings, "rollout": rollout})


def role_config(kind: type[_Config], settings: Mapping[str, Any]) -> _Config:
    """Return a configuration of this kind from nested fields, without omegaconf."""
    types = {"model": ModelConfig, "parallel": ParallelConfig, "optim": OptimConfig}
    return kind(**{**settings, **{name: made(**settings.get(name, {})) for name, made in types.items()}})


@contextlib.contextmanager
def policy(config: ActorConfig, role: str = "actor") -> Iterator[ActorRolloutRefWorker]:
    """Start an actor on one rank, in this process, and destroy its process groups at exit."""
    worker = ActorRolloutRefWorker(config, role)
    call(worker, "init_model")
    try:
        yield worker
    finally:
        worker.context.destroy()


def call(worker: Any, method: str, *arguments: Any) -> Any:
    """Call a method of a worker as a group does."""
    with worker.call_context(method):
        return getattr(worker, method)(*arguments)
