"""The transports by name, and the choice of one for two groups."""

from __future__ import annotations

from collections.abc import Sequence

from mcontroller.config.registry import Registry
from mcontroller.errors import ConfigError
from workers.weights.transfer.cuda_ipc import CudaIpc
from workers.weights.transfer.in_process import InProcess
from workers.weights.transfer.mapped import SharedMemory
from workers.weights.transfer.plan import RankWeights
from workers.weights.transfer.process_group import ProcessGroup
from workers.weights.transfer.transport import Transport

TRANSPORTS: Registry[type[Transport]] = Registry("transport of weights", key="transport")
"""In the order in which ``auto`` tries them: on GPUs a process group, or CUDA IPC if ranks share a GPU."""


def choose_transport(name: str, sources: Sequence[RankWeights], targets: Sequence[RankWeights]) -> str:
    """Return the transport to use between the ranks of two groups.

    Args:
        name: one of ``TRANSPORTS``, or ``auto`` for the first one that can be used.
        sources: the ranks that send.
        targets: the ranks that receive.

    Raises:
        ConfigError: there is no such transport, or it cannot be used between these ranks.
    """
    if name != "auto":
        reason = TRANSPORTS.get_or_raise(name).why_not(sources, targets)
        if reason:
            raise ConfigError(f"transport is {name!r}, but {reason}", key="transport", value=name)
        return name
    reasons = {each: transport.why_not(sources, targets) for each, transport in TRANSPORTS.items()}
    usable = [each for each, reason in reasons.items() if not reason]
    if not usable:
        text = "; ".join(f"{each}: {reason}" for each, reason in reasons.items())
        raise ConfigError(f"no transport can be used between the groups: {text}", key="transport", value=name)
    return usable[0]


TRANSPORTS.add("in_process", InProcess)
TRANSPORTS.add("shared_memory", SharedMemory)
TRANSPORTS.add("process_group", ProcessGroup)
TRANSPORTS.add("cuda_ipc", CudaIpc)
