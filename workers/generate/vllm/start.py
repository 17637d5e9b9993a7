"""Start the engines of vLLM: their GPUs, their memory, arguments and environment."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mcontroller.errors import ConfigError
from parallel_state.agreement import all_gather_values, raise_on_every_rank, wait_for_every_rank
from parallel_state.megatron import MegatronContext
from workers.config import ActorConfig
from workers.generate.vllm.checks import LORA_RANKS, check_installed
from workers.generate.vllm.engine_process import EngineProcess
from workers.generate.vllm.gpu_memory import GpuMemory, measured_memory, utilization
from workers.generate.vllm.interpreter import interpreter_of
from workers.generate.vllm.placement import EnginePlacement, place_engines
from workers.generate.vllm.rollout import VllmRollout
from workers.gpu_ids import node_address, node_id
from workers.weights.hf.config import hf_config_of

logger = logging.getLogger(__name__)

_CPU_CACHE_BYTES = 1 << 30
"""Keys and values of an engine on a CPU if ``rollout.vllm.kv_cache_bytes`` is 0: vLLM would take 92% of the host."""

# The worker's process group, and its one hardware queue, which would serialize the streams of an engine.
_NOT_INHERITED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "TORCHELASTIC_RUN_ID",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)


class _RankGpu(NamedTuple):
    """Where a rank is, and the state of its GPU.

    Attributes:
        node: its id.
        address: of the node.
        port: a free one, at which the ranks of an engine on several nodes meet.
        device: as ``CUDA_VISIBLE_DEVICES`` names it; empty on a CPU.
        memory: of the GPU; None on a CPU.
    """

    node: str
    address: str
    port: int
    device: str
    memory: GpuMemory | None


def vllm_rollout(config: ActorConfig, context: MegatronContext, due: int, *, beside_policy: bool) -> VllmRollout:
    """Start the engines, each on the first of its ranks on each of its nodes, and return the rollout (a collective).

    Args:
        config: of the actor and its rollout.
        context: the layout of the ranks.
        due: bytes of a GPU that this process will allocate later, and keep while the engine generates.
        beside_policy: whether this process has a model with the policy's parameters.

    Raises:
        ConfigError: on every rank: no engine fits the ranks (see ``place_engines``), or one does not fit its GPUs.
        EngineError: on every rank: an engine does not start.
    """
    gpus = all_gather_values(_gpu_of_rank(lambda: measured_memory(config, due)))
    engines = place_engines([gpu.node for gpu in gpus], config.rollout.vllm.tp)
    nodes = len(engines[0].parts)
    if config.rollout.vllm.adapter_alone and nodes > 1:
        raise ConfigError(
            f"rollout.vllm.adapter_alone is true, and an engine of {config.rollout.vllm.tp} ranks is on "
            f"{nodes} nodes, which cannot read an adapter from one folder in memory: set it to false",
            key="rollout.vllm.adapter_alone",
            value=True,
        )
    process = raise_on_every_rank(lambda: _started_everywhere(config, engines, gpus, beside_policy=beside_policy))
    on_gpus = gpus[0].memory is not None
    return VllmRollout(config, context, process, engines, on_gpus=on_gpus, beside_policy=beside_policy)


def _gpu_of_rank(measured: Callable[[], GpuMemory]) -> _RankGpu:
    address = node_address()
    with socket.create_server((address, 0)) as free:
        place = node_id(), address, free.getsockname()[1]
    if not torch.cuda.is_available():
        return _RankGpu(*place, "", None)
    visible, index = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.current_device()
    device = visible.split(",")[index] if visible else str(index)
    return _RankGpu(*place, device, measured())


def _started_everywhere(
    config: ActorConfig, engines: Sequence[EnginePlacement], gpus: Sequence[_RankGpu], *, beside_policy: bool
) -> EngineProcess | None:
    """The process of this rank, if it starts one, when the engines of all ranks have started or failed."""
    rank = dist.get_rank()
    number = next((number for number, engine in enumerate(engines) if rank in engine.starters), None)
    try:
        if number is None:
            return None
        process = _started(config, number, engines[number], gpus)
        if beside_policy and rank == engines[number].caller:
            process.call("sleep")
        return process
    finally:
        if torch.cuda.is_available():
            wait_for_every_rank("vllm/start")


def _started(config: ActorConfig, number: int, engine: EnginePlacement, gpus: Sequence[_RankGpu]) -> EngineProcess:
    """The part of an engine on this rank's node, without weights, built from a ``config.json`` of the policy."""
    check_installed(config)
    settings, share = config.rollout.vllm, None
    if memory := [used for rank in engine.ranks if (used := gpus[rank].memory) is not None]:
        chosen = settings.options.get("gpu_memory_utilization")
        share = utilization(config, memory) if chosen is None else chosen
        logger.info("vLLM's engine %d gets gpu_memory_utilization=%s of %s", number, share, memory)
    node_rank, starters = engine.starters.index(dist.get_rank()), [gpus[rank] for rank in engine.starters]
    arguments = engine_arguments(config, str(policy_folder(config)), share, number=number)
    environment = engine_environment([gpus[rank].device for rank in engine.parts[node_rank] if gpus[rank].device])
    if len(starters) > 1:
        arguments |= {"nnodes": len(starters), "node_rank": node_rank, "distributed_executor_backend": "mp"}
        arguments |= {"master_addr": starters[0].address, "master_port": starters[0].port}
        environment["VLLM_HOST_IP"] = starters[node_rank].address
    return EngineProcess(
        arguments,
        environment,
        start_timeout_s=settings.start_timeout_s,
        silence_timeout_s=settings.silence_timeout_s,
        python=interpreter_of(config),
    )


def policy_folder(config: ActorConfig) -> Path:
    """Return a folder with the ``config.json`` of the policy, the same one for all engines with this policy.

    Its path is part of the key of vLLM's compilation cache: engines in another folder would compile again.
    """
    text = json.dumps(hf_config_of(config.model), sort_keys=True)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    file = caches / "mcontroller" / hashlib.sha256(text.encode()).hexdigest()[:16] / "config.json"
    if not file.exists():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as partial:
                partial.write(text)
            os.replace(partial.name, file)  # other engines read it
        except OSError:  # vLLM's cache cannot be written either, which is beside it
            file = Path(tempfile.mkdtemp(prefix="policy-"), "config.json")
            file.write_text(text)
    return file.parent


def engine_arguments(config: ActorConfig, folder: str, share: float | None, *, number: int = 0) -> dict[str, Any]:
    """Return the arguments of ``vllm.AsyncEngineArgs``.

    Args:
        config: of the actor and its rollout.
        folder: has the ``config.json`` of the policy.
        share: ``gpu_memory_utilization`` on a GPU; None on a CPU.
        number: of the engine, so that no two engines draw the same random numbers.
    """
    rollout, on_gpu = config.rollout, share is not None
    of_gpu = {"gpu_memory_utilization": share} if on_gpu else {}
    cache = rollout.vllm.kv_cache_bytes or (None if on_gpu else _CPU_CACHE_BYTES)
    lora, adapter = config.model.lora, dict[str, Any]()
    if rollout.vllm.adapter_alone and lora is not None:
        rank = next(size for size in LORA_RANKS if size >= lora.rank)
        adapter = {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    experts = {"enable_return_routed_experts": True} if config.router_replay == "rollout" else {}
    return {
        "seed": (rollout.seed + number) % (1 << 31),
        "enforce_eager": not on_gpu,  # compilation for a CPU takes minutes
        "enable_chunked_prefill": on_gpu,  # vLLM's CPU build cannot sample with seeds if it reads prompts in chunks
        **rollout.vllm.options,
        **of_gpu,
        **adapter,
        **experts,
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": config.model.dtype,
        "max_model_len": rollout.prompt_length + rollout.response_length,
        "max_num_seqs": rollout.max_rows,
        "tensor_parallel_size": rollout.vllm.tp,
        "kv_cache_memory_bytes": cache,
        "logprobs_mode": "raw_logprobs",
        "enable_sleep_mode": on_gpu,
    }


def engine_environment(devices: list[str]) -> dict[str, str | None]:
    """Return the variables of an engine's process that differ from the worker's; None removes one.

    Args:
        devices: its GPUs, as ``CUDA_VISIBLE_DEVICES`` names them; none on a CPU.
    """
    common: dict[str, str | None] = {
        **dict.fromkeys(_NOT_INHERITED),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if devices:
        return common | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
    return common | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
