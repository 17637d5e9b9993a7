"""Memory of every call of the roles of a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mcontroller.errors import MControllerError
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, CriticConfig, RewardConfig, RoleConfig
from workers.critic import CriticWorker
from workers.dry_run import RoleCall
from workers.generate.engines import ROLLOUT_ENGINES
from workers.memory.nccl import nccl_bytes
from workers.memory.planned import Memory, StageUse, stage_uses
from workers.memory.without_gpus import without_gpus
from workers.reward import RewardModelWorker
from workers.verify.roles import ModelRole, variant_of

_WORKERS: dict[type, type] = {CriticConfig: CriticWorker, RewardConfig: RewardModelWorker}
_GATHERED = 20
"""[bytes] For each weight of a rank, at a save for any layout: three values in float32, and one twice on its way."""


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

    def generation(self, role: ModelRole) -> RoleCall:
        """Return the generation of a role with an engine in the worker."""
        rows = min(math.ceil(self.rows / role.variant.layout.dp), role.config.rollout.max_rows)
        return RoleCall(role, "generate_sequences", self.prompt, self.response, micro_batches=1, row_count=rows)


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory of a rank on the stage that needs the most.

    Attributes:
        offloaded: weights and optimizer while other roles use the GPU; page-locked.
        saved: the rank's part of a checkpoint, copied from the GPU and again for the process that writes it.
        gathered: what a save for any layout needs in addition, of a distributed optimizer.
    """

    offloaded: int
    saved: int
    gathered: int


@dataclass(frozen=True)
class CallMemory:
    """The memory of one call on the GPU of each pipeline stage.

    Attributes:
        key: the key of the role whose group makes the call, such as ``actor_rollout_ref``.
        role: the role.
        call: what it does: train, score or generate.
        uses: what the role uses by stage, including parts that the call does not need.
        stages: the memory by stage, without these parts; none if the call fails without data.
        failure: why there is no memory; None if there is.
    """

    key: str
    role: str
    call: str
    uses: tuple[StageUse, ...]
    stages: tuple[Memory, ...]
    failure: MControllerError | None = None

    @property
    def most(self) -> int:
        """The stage that needs the most memory."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].total)


@without_gpus
def calls_of_run(
    configs: Mapping[str, RoleConfig],
    world_sizes: Mapping[str, int],
    lengths: Lengths,
    *,
    layers: str,
    classes: Mapping[str, type] | None = None,
) -> list[CallMemory]:
    """Return the memory of every call of every role.

    Args:
        configs: by key: ``actor_rollout_ref``, ``rollout``, ``critic``, ``ref``, ``reward_model``.
        world_sizes: ranks of each group, by the same keys.
        lengths: of the rows.
        layers: ``transformer_engine`` or ``local``.
        classes: the classes of the workers by key, if they are not those of this package.

    Raises:
        LayoutError: the axes of a role do not divide the world size.
        ConfigError: there is no such rollout engine.
    """
    calls: list[CallMemory] = []
    for key, config in configs.items():
        run = _OfRole(key, config, world_sizes[key], lengths, layers, (classes or {}).get(key))
        if key == "ref":
            calls.append(run.score("reference", "ref", "compute_ref_log_prob"))
        elif key == "rollout":
            calls += run.generate()
        elif isinstance(config, ActorConfig):
            calls += [run.train("actor", "actor", "update_actor"), run.score("actor", "actor", "compute_log_prob")]
            if "rollout" not in configs:
                calls += run.generate()
                if "ref" not in configs:
                    calls.append(run.score("reference", "ref", "compute_ref_log_prob"))
        elif isinstance(config, CriticConfig):
            calls += [run.train("critic", "", "update_critic"), run.score("critic", "", "compute_values")]
        else:
            calls.append(run.score("reward", "", "compute_rm_score"))
    return calls


class _OfRole:
    def __init__(
        self, key: str, config: RoleConfig, world_size: int, lengths: Lengths, layers: str, worker: type | None
    ) -> None:
        self.key, self.lengths = key, lengths
        config = replace(config, model=replace(config.model, transformer_impl=layers))
        variant = variant_of(config, config.parallel.layout(world_size))
        self.model_role = ModelRole(worker or _WORKERS.get(type(config), ActorRolloutRefWorker), config, "", variant)

    def train(self, role: str, parts: str, method: str) -> CallMemory:
        return self._call(role, "train", lambda: stage_uses(self._role_call(parts, method)))

    def score(self, role: str, parts: str, method: str) -> CallMemory:
        """Scoring needs the weights only: gradients and optimizer are in host memory if roles share GPUs."""
        call = self._call(role, "score", lambda: stage_uses(self._role_call(parts, method)))
        return replace(call, stages=tuple(replace(memory, gradients=0, optimizer=0) for memory in call.stages))

    def generate(self) -> Iterator[CallMemory]:
        """An engine outside of the worker is not estimated."""
        config: Any = self.model_role.config
        if not ROLLOUT_ENGINES.get_or_raise(config.rollout.engine).in_worker:
            return
        one = self.lengths.generation(replace(self.model_role, roles="rollout"))
        call = self._call("rollout", "generate", lambda: stage_uses(one))
        if not call.failure:
            # Another column of keys and values: after a prompt of one token, the peak is where all layers have theirs.
            two, three = (stage_uses(replace(one, prompt=1, response=length)) for length in (2, 3))
            columns = [more.activations - use.activations for use, more in zip(two, three, strict=True)]
            caches = [round((one.prompt + one.response) * column) for column in columns]
            stages = [
                replace(memory, cache=cache, activations=memory.activations - cache)
                for memory, cache in zip(call.stages, caches, strict=True)
            ]
            call = replace(call, stages=tuple(stages))
        yield call

    def _role_call(self, parts: str, method: str) -> RoleCall:
        role = replace(self.model_role, roles=parts)
        return RoleCall(role, method, self.lengths.prompt, self.lengths.response)

    def _call(self, role: str, name: str, run: Callable[[], tuple[StageUse, ...]]) -> CallMemory:
        variant = self.model_role.variant
        experts = self.model_role.config.model.num_moe_experts is not None
        nccl = nccl_bytes(variant.layout, experts=experts, sharded=name == "train" and variant.distributed_optimizer)
        try:
            uses = run()
        except MControllerError as error:
            return CallMemory(self.key, role, name, (), (), error)
        stages = tuple(replace(use.memory(), nccl=nccl) for use in uses)
        return CallMemory(self.key, role, name, uses, stages)


def host_memory(call: CallMemory, config: RoleConfig, world_size: int, models: int) -> HostMemory:
    """Return the host memory of the process of a rank.

    Args:
        call: the call of the role that needs the most parts.
        config: of the role.
        world_size: number of ranks.
        models: copies of the weights: 2 for an actor with its reference.
    """
    variant = variant_of(config, config.parallel.layout(world_size))
    use = max(call.uses, key=lambda use: use.parameters + use.gradients + use.optimizer)
    optimizer, replicas = use.optimizer + use.on_host, variant.layout.dp * variant.layout.cp
    sharded = variant.distributed_optimizer
    weights = models * use.parameters
    if config.model.lora is not None:  # a checkpoint has what training changes
        weights = use.parameters * use.trained / use.weights
    part = weights / replicas + (optimizer if sharded else optimizer / replicas)
    return HostMemory(
        offloaded=round(models * use.parameters + optimizer),
        saved=round(2 * part) if call.call == "train" else 0,
        gathered=round(_GATHERED * use.trained) if sharded and call.call == "train" else 0,
    )
