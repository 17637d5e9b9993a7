"""What ``mcontroller check`` prints: layouts, locality, resources and estimated memory."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing

import psutil
import ray
import torch

from mcontroller.locality import locality_lines
from parallel_state.axes import DENSE_AXES
from parallel_state.dry_run.memory import KINDS
from parallel_state.dry_run.outcome import Outcome, gpu_bytes
from parallel_state.topology import Topology
from trainer.roles import CONFIG_KEYS, Role, reads_reference
from trainer.run.config import MAIN_POOL, RunConfig
from trainer.run.dry_run_verb import report_roles
from trainer.run.model_roles import lengths_of, model_roles
from trainer.run.parts import chosen_lines, make_parts, models_without_weights, roles_of
from trainer.run.pools import nodes_of_ranks, pool_names, pool_nodes, pools_of
from trainer.run.shared_gpus import shared_gpus_of_run
from trainer.run.training import check_start, connect_to
from workers.config import RoleConfig
from workers.generate.engines import ROLLOUT_ENGINES
from workers.generate.vllm.placement import EnginePlacement, describe_engines
from workers.layout_search import search_layouts
from workers.memory.nccl import nccl_bytes
from workers.model.gpu_defaults import max_connections
from workers.role_calls import calls_of_roles, estimates, host_memory
from workers.verify.roles import ModelRole

_GB = 2**30


def report(arguments: argparse.Namespace, config: RunConfig) -> int:
    """Print the layouts and the memory table.

    Args:
        arguments: of the verb.
        config: the configuration of a run.

    Returns:
        The exit status: 1 if a dry run fails, or its roles do not fit.

    Raises:
        ConfigError: the workers of a role reject its configuration when they build the model or its optimizer.
    """
    roles, on_gpu = _roles(config), config.pool.use_gpu
    lines = [*_problems(config), *(f"{key}: {_layout(config, key, role)}" for key, role in roles.items())]
    lines += [*_generating_lines(config, roles), *_locality_lines(config), *_resource_lines(config)]
    layers = arguments.layers or ("transformer_engine" if on_gpu else "local")
    lengths = lengths_of(config)
    with_model = {key: _with_layers(role, layers) for key, role in model_roles(config).items()}
    outcomes = estimates(calls_of_roles(with_model, lengths), RunConfig)
    gpu_memory = _gpu_memory(arguments.gpu_memory)
    lines += [*_role_lines(with_model, outcomes, on_gpu), "", *memory_table(outcomes, on_gpu=on_gpu)]
    known = {name: outcome for name, outcome in outcomes.items() if not outcome.failure}
    if on_gpu and known:
        lines += ["", *shared_gpus_of_run(config, known).lines(gpu_memory)]
    if arguments.layouts:
        nodes = [*Counter(nodes_of_ranks(config, "actor_rollout_ref")).values()]
        search = search_layouts(config.actor_rollout_ref, nodes, lengths, gpu_memory, layers=layers)
        lines += ["", *search.lines(gpu_memory)]
    sys.stdout.write("\n".join([*lines, ""]))
    return report_roles(config, gpu_memory) if arguments.dry_run else 0


def _roles(config: RunConfig) -> dict[str, RoleConfig]:
    """Return the configuration of every role that has a group, by key."""
    roles = roles_of(config)
    read = reads_reference(config, roles)
    keys = {CONFIG_KEYS[role] for role in roles if read or role is not Role.RefPolicy}
    return {key: section for key, section in config.sections().items() if key in keys}


def _with_layers(role: ModelRole, layers: str) -> ModelRole:
    config = role.config
    model = dataclasses.replace(config.model, transformer_impl=layers)
    return dataclasses.replace(role, config=dataclasses.replace(config, model=model))


def _gpu_memory(given: float | None) -> int:
    """Return the bytes of a GPU: as given in units of 2**30, or those of a GPU of this machine, or 80 * 2**30."""
    if given is None and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return gpu_bytes(str(80 if given is None else given))


def _generating_lines(config: RunConfig, roles: Mapping[str, RoleConfig]) -> Iterator[str]:
    """Lines for the role that generates: its engines, their GPUs or processes, and the roles beside them."""
    key, engines, nodes = _engines(config)
    unit = "GPUs" if config.pool.use_gpu else "processes"
    if not engines:
        yield f"{key}: {len(nodes)} of {len(nodes)} {unit} generate"
        return
    used, size = sum(len(engine.ranks) for engine in engines), len(engines[0].ranks)
    number = "1 engine" if len(engines) == 1 else f"{len(engines)} engines"
    beside = " and ".join(_roles_beside(config, key, roles)) or "no other role"
    yield f"{key}: {used} of {len(nodes)} {unit} generate: {number} of {size}, beside {beside}"
    yield from (f"{key}: {line}" for line in describe_engines(engines, nodes))


def _engines(config: RunConfig) -> tuple[str, list[EnginePlacement], list[str]]:
    """Return the key of the role that generates, its engines (none: its workers generate), and its ranks' nodes."""
    key = "actor_rollout_ref" if config.rollout is None else "rollout"
    role, nodes = config.rollout or config.actor_rollout_ref, nodes_of_ranks(config, key)
    engine = ROLLOUT_ENGINES.get_or_raise(role.rollout.engine)
    return key, [] if engine.place is None else engine.place(role, nodes), nodes


def _roles_beside(config: RunConfig, key: str, roles: Mapping[str, RoleConfig]) -> list[str]:
    """Return what uses the GPUs of the engines too: the policy of the same workers, and the other roles of the pool."""
    pools = pool_names(config)
    others = [other for other in roles if other != key and pools[other] == pools[key]]
    return others if key == "rollout" else ["the policy", *others]


def _problems(config: RunConfig) -> list[str]:
    """Return lines for the data sets and defaults of a run, after all that it reads has been read and checked."""
    parts = make_parts(config)
    check_start(config, parts)
    absent = [
        f"{key}: {path} has no weights on this machine: not checked"
        for key, path in models_without_weights(config).items()
    ]
    with closing(parts):
        return [*parts.problem_lines(), *absent, *parts.try_rewards(config), *chosen_lines(config)]


def _layout(config: RunConfig, key: str, role: RoleConfig) -> str:
    """Return the number of ranks and the sizes of the axes of a role."""
    ranks = len(nodes_of_ranks(config, key))
    topology = Topology.from_layout(role.parallel.layout(ranks))
    shown = topology.sizes if role.model.num_moe_experts else DENSE_AXES
    axes = [axis for axis in shown if axis in ("tp", "pp", "dp") or topology.sizes[axis] > 1]
    return f"{ranks} ranks, " + " x ".join(f"{axis} {topology.sizes[axis]}" for axis in axes)


def memory_table(outcomes: Mapping[str, Outcome], *, on_gpu: bool = True) -> list[str]:
    """Return the lines of a table with a row for every call, of the stage that needs the most memory.

    Args:
        outcomes: of the calls, by name.
        on_gpu: whether the memory is that of GPUs; otherwise it is that of processes.
    """
    rows: list[tuple[str, ...]] = [("call", "stage", *KINDS, "peak", "needed")]
    for name, outcome in outcomes.items():
        if outcome.failure:
            continue
        stage, rank = max(outcome.stages.items(), key=lambda item: outcome.uses[item[1]].peak)
        use = outcome.uses[rank]
        sizes = [*(use.by_kind.get(kind, 0) for kind in KINDS), use.peak, use.peak - use.unneeded]
        section, _, method = name.partition(".")
        if (f"{section}:",) not in rows:
            rows.append((f"{section}:",))
        rows.append((f"  {method}", str(stage), *(f"{size / _GB:.2f}" for size in sizes)))
    widths = [max(map(len, column)) for column in zip(*(row for row in rows if len(row) > 1), strict=True)]
    lines = [
        " ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False))]
        ).rstrip()
        for row in rows
    ]
    lines += [f"{name}: no memory is known, {one.failure}" for name, one in outcomes.items() if one.failure]
    where = "on a GPU" if on_gpu else "in a process"
    return [
        f"GB (2**30 bytes) {where}, at the stage of the largest peak; needed: less what a host can hold",
        *lines,
    ]


def _role_lines(roles: Mapping[str, ModelRole], outcomes: Mapping[str, Outcome], on_gpu: bool) -> Iterator[str]:
    """Return the lines of all roles.

    Args:
        roles: by key.
        outcomes: of their calls.
        on_gpu: whether the lines are those of GPUs too.
    """
    for key, role in roles.items():
        config, layout = role.config, role.variant.layout
        if config.model.provider == "native":
            pattern = config.model.hybrid_layer_pattern
            ahead = config.model.prediction_layers
            more = f" with {ahead} layers of multi-token prediction" if ahead else ""
            yield f"{key}: builds " + ("a GPTModel" if pattern is None else f"a HybridModel of {pattern}") + more
        yield f"{key}: collectives fail after {key}.timeout_s = {config.timeout_s:g} s"
        if not on_gpu:
            continue
        value, reason = max_connections(config.parallel, None)
        if value is not None:
            yield f"{key}: CUDA_DEVICE_MAX_CONNECTIONS={value} on GPUs before compute capability 10.0: {reason}"
        of_role = (one for name, one in outcomes.items() if name.startswith(f"{key}.") and not one.failure)
        if (outcome := next(of_role, None)) is not None:
            host = host_memory(outcome, role)
            line = f"{key}: host memory of a process: {host.offloaded / _GB:.2f} GB offloaded (pinned)"
            line += f", {host.saved / _GB:.2f} GB to save" if host.saved else ""
            line += f", {host.gathered / _GB:.2f} GB more to save for any layout" if host.gathered else ""
            yield line
        sharded = bool(role.updates) and role.variant.distributed_optimizer
        nccl = nccl_bytes(layout, experts=config.model.num_moe_experts is not None, sharded=sharded)
        if nccl:
            yield f"{key}: NCCL's buffers are not counted: a guess of {nccl / _GB:g} GB"
        if role.updates and config.optim.distributed_optimizer is None:
            chosen = config.optim.resolved(layout.dp * layout.cp, on_gpu=True).distributed_optimizer
            replicas = f"{layout.dp * layout.cp} ranks have the same weights"
            yield f"{key}: optim.distributed_optimizer={str(chosen).lower()} on a GPU: {replicas}"
        if not config.packed and key != "rollout":
            yield f"{key}: packed=true is recommended on a GPU: no padding, and no attention plan for each width"


def _locality_lines(config: RunConfig) -> list[str]:
    """Return a line for each axis of a role, and its engines, that cross nodes of its pool, and one if none does."""
    key, engines, _ = _engines(config)
    lines = []
    if engines and len(engines[0].parts) > 1:
        advice = "reduce rollout.vllm.tp, if it can be"
        lines.append(f"{key}: each engine crosses nodes, and communicates in every layer: {advice}")
    for role, section in config.sections().items():
        nodes = nodes_of_ranks(config, role)
        topology = Topology.from_layout(section.parallel.layout(len(nodes)), nodes=nodes)
        lines += [f"{role}: {line}" for line in locality_lines(topology)]
    counts = ", ".join(f"{len(nodes)} in the {_named(name)}" for name, nodes in pool_nodes(config).items())
    return lines or [f"locality: no axis of a role, and no engine, crosses nodes ({counts})"]


def _resource_lines(config: RunConfig) -> list[str]:
    """Return the resources that the pools reserve, and the resources of the cluster, or of this machine without one."""
    unit = "GPU" if config.pool.use_gpu else "CPU"
    pools = pools_of(config, roles_of(config))
    lines = [
        f"{_named(name)}: {sum(nodes)} bundles of 1 {unit} on {len(nodes)} nodes, "
        f"{sum(nodes) * pools.slots_of(name)} slots for processes"
        for name, nodes in pool_nodes(config).items()
    ]
    needed = {"CPU": pools.get_n_slots(), "GPU": pools.get_n_gpus() if config.pool.use_gpu else 0}
    if config.cluster.address is None:
        memory = psutil.virtual_memory().total / _GB
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        cpus = len(os.sched_getaffinity(0))
        lines.append(f"this machine, on which the run starts Ray: {cpus} CPUs, {gpus} GPUs, {memory:.1f} GB of memory")
        total: dict[str, float] = {"CPU": needed["CPU"], "GPU": gpus}  # Ray is started with the CPUs that are needed
    else:
        connect_to(config.cluster.address)
        total = ray.cluster_resources()
        ray.shutdown()
        line = f"cluster {config.cluster.address}: {total.get('CPU', 0):g} CPUs, {total.get('GPU', 0):g} GPUs, "
        lines.append(line + f"{total.get('memory', 0) / _GB:.1f} GB of memory")
    keys = ", ".join(["pool.process_on_nodes", *(f"pools.{name}.process_on_nodes" for name in config.pools)])
    what = "pools need" if config.pools else "pool needs"
    lacks = [resource for resource in needed if total.get(resource, 0) < needed[resource]]
    return lines + [f"the {what} {needed[resource]} {resource}s: reduce {keys}" for resource in lacks]


def _named(pool: str) -> str:
    return "pool" if pool == MAIN_POOL else f"pool {pool}"
