"""Lines of ``check`` about single roles: host memory, and settings that matter on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from workers.config import ActorConfig, CriticConfig, RewardConfig
from workers.memory.host import host_memory
from workers.model.gpu_defaults import max_connections
from workers.run.role_calls import RoleConfig

__all__ = ["role_lines"]

_GB = 2**30


def role_lines(roles: Mapping[str, RoleConfig], sizes: Mapping[str, int], reference: bool) -> Iterator[str]:
    """Return the lines of all roles.

    Args:
        roles: configurations by key.
        sizes: ranks of each group, by the same keys.
        reference: whether the run has a reference policy.
    """
    for key, config in roles.items():
        yield f"{key}: collectives fail after {key}.timeout_s = {config.timeout_s:g} s"
        value, reason = max_connections(config.parallel, None)
        if value is not None:
            yield f"{key}: CUDA_DEVICE_MAX_CONNECTIONS={value} on GPUs before compute capability 10.0: {reason}"
        trained = isinstance(config, ActorConfig | CriticConfig) and key not in ("ref", "rollout")
        models = 2 if key == "actor_rollout_ref" and reference and "ref" not in roles else 1
        host = host_memory(config, sizes[key], trained=trained, models=models)
        line = f"{key}: host memory of a process: {host.offloaded / _GB:.2f} GB offloaded (pinned)"
        line += f", {host.saved / _GB:.2f} GB to save" if host.saved else ""
        line += f", {host.gathered / _GB:.2f} GB more to save for any layout" if host.gathered else ""
        yield line
        if trained and not isinstance(config, RewardConfig) and config.optim.distributed_optimizer is None:
            layout = config.parallel.layout(sizes[key])
            chosen = config.optim.resolved(layout.dp * layout.cp, on_gpu=True).distributed_optimizer
            replicas = f"{layout.dp * layout.cp} ranks have the same weights"
            yield f"{key}: optim.distributed_optimizer={str(chosen).lower()} on a GPU: {replicas}"
        if not config.packed and key != "rollout":
            yield f"{key}: packed=true is recommended on a GPU: no padding, and no attention plan for each width"
