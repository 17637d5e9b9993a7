"""Memory of every call of the roles of a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from workers.config import ActorConfig, CriticConfig, RewardConfig
from workers.config.roles import MicroBatchSize
from workers.generate.engines import ROLLOUT_ENGINES
from workers.memory.estimate import Batch, Memory, PlannedRole

RoleConfig = ActorConfig | CriticConfig | RewardConfig


@dataclass(frozen=True)
class Lengths:
    """Tokens of the rows of a run, and how many of them are generated at once.

    Attributes:
        prompt: tokens of the longest prompt.
        response: tokens of the longest response.
        rows: responses of one step, of all ranks.
    """

    prompt: int
    response: int
    rows: int


@dataclass(frozen=True)
class CallMemory:
    """The memory of one call on the GPU of each pipeline stage.

    Attributes:
        key: the key of the role whose group makes the call, such as ``actor_rollout_ref``.
        role: the role.
        call: what it does: train, score or generate.
        stages: the memory by stage.
    """

    key: str
    role: str
    call: str
    stages: tuple[Memory, ...]

    @property
    def most(self) -> int:
        """The stage that needs the most memory."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].total)


def calls_of_run(
    configs: Mapping[str, RoleConfig], world_sizes: Mapping[str, int], lengths: Lengths, *, fused: bool
) -> list[CallMemory]:
    """Return the memory of every call of every role.

    Args:
        configs: by key: ``actor_rollout_ref``, ``rollout``, ``critic``, ``ref``, ``reward_model``.
        world_sizes: ranks of each group, by the same keys.
        lengths: of the rows.
        fused: whether layers are Transformer Engine's.

    Raises:
        LayoutError: the axes of a role do not divide the world size.
        ConfigError: the memory of a model or an optimizer cannot be estimated, or there is no such rollout engine.
    """
    calls: list[CallMemory] = []
    for key, config in configs.items():
        run = _OfRole(key, config, world_sizes[key], lengths, fused)
        if key == "ref":
            calls.append(run.score("reference"))
        elif key == "rollout":
            calls += run.generate()
        elif isinstance(config, ActorConfig):
            calls += run.trained("actor")
            if "rollout" not in configs:
                calls += run.generate()
                if "ref" not in configs:
                    calls.append(run.score("reference"))
        elif isinstance(config, CriticConfig):
            calls += run.trained("critic")
        else:
            calls.append(run.score("reward"))
    return calls


class _OfRole:
    def __init__(self, key: str, config: RoleConfig, world_size: int, lengths: Lengths, fused: bool) -> None:
        self.key, self.config, self.world_size, self.lengths, self.fused = key, config, world_size, lengths, fused
        self.value_head = not isinstance(config, ActorConfig)

    def trained(self, role: str) -> Iterator[CallMemory]:
        config = self.config
        assert not isinstance(config, RewardConfig)
        built = self._role(trained=True)
        rows = self._rows(config.update_size)
        count = math.ceil(config.ppo_mini_batch_size / built.layout.dp / rows)
        yield self._call(role, "train", lambda stage: built.train(stage, self._batch(rows, count)))
        yield self.score(role)

    def score(self, role: str) -> CallMemory:
        """Scoring needs the weights only: gradients and optimizer are in host memory if roles share GPUs."""
        built, rows = self._role(trained=False), self._rows(self.config.scoring_size)
        return self._call(role, "score", lambda stage: built.score(stage, self._batch(rows, 1)))

    def generate(self) -> Iterator[CallMemory]:
        """An engine outside of the worker is not estimated."""
        config = self.config
        assert isinstance(config, ActorConfig)
        if not ROLLOUT_ENGINES.get_or_raise(config.rollout.engine).in_worker:
            return
        built = PlannedRole(config.model, config.parallel, self.world_size, fused=self.fused)
        rows = math.ceil(self.lengths.rows / built.layout.dp)
        at_once = min(rows, config.rollout.max_rows)
        prompt, response = self.lengths.prompt, self.lengths.response
        stages = range(built.parallel.pp)
        memories = tuple(built.generate(stage, at_once, prompt, response) for stage in stages)
        yield CallMemory(self.key, "rollout", "generate", memories)

    def _role(self, *, trained: bool) -> PlannedRole:
        config = self.config
        optim = None if isinstance(config, RewardConfig) or not trained else config.optim
        ddp = None if isinstance(config, RewardConfig) else config.ddp
        arguments = (config.model, config.parallel, self.world_size, optim)
        return PlannedRole(*arguments, ddp=ddp, value_head=self.value_head, fused=self.fused)

    def _rows(self, size: MicroBatchSize) -> int:
        longest = self.lengths.prompt + self.lengths.response
        return max(1, size.tokens // longest) if size.tokens else size.rows

    def _batch(self, rows: int, count: int) -> Batch:
        chunk = self.config.log_prob_chunk_tokens if isinstance(self.config, ActorConfig) else 0
        lengths = self.lengths
        return Batch(rows, lengths.prompt + lengths.response, lengths.response, count, chunk)

    def _call(self, role: str, call: str, of_stage: Callable[[int], Memory]) -> CallMemory:
        return CallMemory(self.key, role, call, tuple(of_stage(stage) for stage in range(self.config.parallel.pp)))
