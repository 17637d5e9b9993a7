"""The calls of the roles of a run, and estimates of their memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mcontroller.config.load import CollectedErrors, with_whole_key
from mcontroller.errors import ConfigError
from parallel_state.dry_run.outcome import Outcome
from workers.dry_run import RoleCall
from workers.generate.engines import ROLLOUT_ENGINES
from workers.generate.vllm.placement import weight_receivers
from workers.memory.planned import estimated
from workers.memory.without_gpus import without_gpus
from workers.verify.roles import ModelRole

GENERATION, WEIGHTS = "generate_sequences", "rollout_weights"
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


def calls_of_roles(
    roles: Mapping[str, ModelRole], lengths: Lengths, nodes: Mapping[str, Sequence[str]] | None = None
) -> dict[str, RoleCall]:
    """Return every call of roles, by the role's key and the method with a dot between them.

    An engine outside of the worker generates nothing here; it gets weights if it is beside the worker that is trained.

    Args:
        roles: by their keys: ``actor_rollout_ref``, ``rollout``, ``critic``, ``ref``, ``reward_model``.
        lengths: of the rows.
        nodes: by key, the node of each rank; without an entry, all ranks are on one node.

    Raises:
        ConfigError: there is no such rollout engine, or no engine fits the ranks.
    """
    calls: dict[str, RoleCall] = {}
    for key, role in roles.items():
        if role.roles == "rollout":
            continue
        trained = role.without("rollout")
        for method in (*trained.updates, *trained.scores):
            calls[f"{key}.{method}"] = RoleCall(trained, method, lengths.prompt, lengths.response)
    for key, role in roles.items():
        parts, layout = role.roles.split("_"), role.variant.layout
        if "rollout" not in parts:
            continue
        engine = ROLLOUT_ENGINES.get_or_raise(role.config.rollout.engine)
        if engine.in_worker:
            rows = min(math.ceil(lengths.rows / layout.dp), role.config.rollout.max_rows)
            sizes = {"micro_batches": 1, "row_count": rows}
            calls[f"{key}.{GENERATION}"] = RoleCall(role, GENERATION, lengths.prompt, lengths.response, **sizes)
        elif "actor" in parts:
            places = (nodes or {}).get(key, ["node0"] * layout.world_size)
            engines = [] if engine.place is None else engine.place(role.config, places)
            calls[f"{key}.{WEIGHTS}"] = RoleCall(
                role.without("rollout"),
                WEIGHTS,
                lengths.prompt,
                lengths.response,
                receivers=weight_receivers(engines) or "all",
            )
    return calls


@without_gpus
def estimates(calls: Mapping[str, RoleCall], whole: type | None = None) -> dict[str, Outcome]:
    """Return the memory of calls with weights that stay in the worker: those of few layers are scaled.

    Args:
        calls: by the role's key and the method.
        whole: the dataclass that has the roles' configurations under their keys; errors then have its keys.

    Raises:
        ConfigError: the workers of roles reject their configuration when they build the model or its optimizer.
    """
    errors, outcomes = CollectedErrors(), dict[str, Outcome]()

    def estimate(name: str, call: RoleCall) -> Outcome:
        try:
            return estimated(call)
        except ConfigError as error:
            if whole is None:
                raise
            raise with_whole_key(error, whole, name.split(".")[:1]) from error

    for name, call in calls.items():
        if call.method != WEIGHTS and (outcome := errors.attempt(partial(estimate, name, call))) is not None:
            outcomes[name] = outcome
    errors.raise_any()
    return outcomes


def host_memory(outcome: Outcome, role: ModelRole) -> HostMemory:
    """Return the host memory of the process of a rank.

    Args:
        outcome: of the call of the role that needs the most parts.
        role: the role.
    """
    use = max(outcome.uses.values(), key=lambda use: sum(use.idle.values()))
    parameters, optimizer = use.idle.get("parameters", 0), use.idle.get("optimizer", 0) + use.on_host
    trained, replicas = bool(role.updates), outcome.layout.dp * outcome.layout.cp
    sharded = role.variant.distributed_optimizer
    # a checkpoint has the reference too; of LoRA, the adapters alone
    saved = parameters if role.config.model.lora is None else parameters * use.trained / use.weights
    part = saved / replicas + (optimizer if sharded else optimizer / replicas)
    return HostMemory(
        offloaded=parameters + optimizer,
        saved=round(2 * part) if trained else 0,
        gathered=round(_GATHERED * use.trained) if sharded and trained else 0,
    )
