"""Start the engines of vLLM of all data-parallel shards: their GPUs, their memory, arguments and environment."""

from __future__ import annotations

import hashlib
import json
import logging
import os
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
from workers.generate.vllm.checks import CPU_CACHE_BYTES, LORA_RANKS, check_installed
from workers.generate.vllm.engine_process import EngineProcess
from workers.generate.vllm.gpu_memory import GpuMemory, measured_memory, utilization
from workers.generate.vllm.interpreter import interpreter_of
from workers.generate.vllm.placement import engines_of_shards
from workers.generate.vllm.rollout import EngineMap, VllmRollout
from workers.gpu_ids import node_id
from workers.weights.hf.config import hf_config_of

logger = logging.getLogger(__name__)

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


class _Place(NamedTuple):
    """The node of a rank and the state of its GPU; ``device`` and ``memory`` are empty on a CPU."""

    shard: int
    node: str
    device: str
    memory: GpuMemory | None


def vllm_rollout(
    config: ActorConfig, context: MegatronContext, *, trained: bool, models: int, resident: bool = True
) -> VllmRollout:
    """Start the engines of all shards, each on the first of its ranks, and return the rollout (a collective).

    Args:
        config: of the actor and its rollout.
        context: the layout of the ranks.
        trained: whether the policy has an optimizer.
        models: models with the policy's parameters in this process.
        resident: whether they are on the GPU while the engine generates.

    Raises:
        ConfigError: on every rank: a shard has no node with room for an engine, or an engine does not fit its GPUs.
        EngineError: on every rank: an engine does not start.
    """

    def measured() -> GpuMemory:
        world_size, pp_rank = dist.get_world_size(), context.pg.pp.rank()
        return measured_memory(config, world_size, pp_rank, trained=trained, models=models, resident=resident)

    places = all_gather_values(_place(context, measured))
    tp, rank = config.rollout.vllm.tp, dist.get_rank()
    shards = engines_of_shards([place.shard for place in places], [place.node for place in places], tp)
    engines = [ranks for engines_of_shard in shards for ranks in engines_of_shard]
    number = next((number for number, ranks in enumerate(engines) if ranks[0] == rank), None)
    used = [] if number is None else [places[rank] for rank in engines[number]]
    engine = raise_on_every_rank(lambda: _started_everywhere(config, used, number, beside_policy=models > 0))
    engine_map = EngineMap(list(map(len, shards)), number, places[rank].memory is not None)
    return VllmRollout(config, context, engine, engine_map, beside_policy=models > 0)


def _place(context: MegatronContext, measured: Callable[[], GpuMemory]) -> _Place:
    shard, node = context.pg.dp.rank(), node_id()
    if not torch.cuda.is_available():
        return _Place(shard, node, "", None)
    visible, index = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.current_device()
    device = visible.split(",")[index] if visible else str(index)
    return _Place(shard, node, device, measured())


def _started_everywhere(
    config: ActorConfig, places: Sequence[_Place], number: int | None, *, beside_policy: bool
) -> EngineProcess | None:
    """The engine of this rank, if it has one, when the engines of all ranks have started or failed."""
    try:
        if number is None:
            return None
        engine = _started(config, places, number=number)
        if beside_policy:
            engine.call("sleep")
        return engine
    finally:
        if torch.cuda.is_available():
            wait_for_every_rank("vllm/start")


def _started(config: ActorConfig, places: Sequence[_Place], *, number: int) -> EngineProcess:
    """An engine without weights, built from a ``config.json`` of the policy."""
    check_installed(config)
    settings = config.rollout.vllm
    share = None
    gpus = [place.memory for place in places if place.memory is not None]
    if gpus:
        chosen = settings.options.get("gpu_memory_utilization")
        share = utilization(config, gpus) if chosen is None else chosen
        logger.info("vLLM's engine %d gets gpu_memory_utilization=%s of %s", number, share, gpus)
    engine = EngineProcess(
        engine_arguments(config, str(policy_folder(config)), share, number=number),
        engine_environment([place.device for place in places if place.memory is not None]),
        start_timeout_s=settings.start_timeout_s,
        silence_timeout_s=settings.silence_timeout_s,
        python=interpreter_of(config),
    )
    if engine.facts["vocab_size"] != config.model.vocab_size:
        engine.close()
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size}, but vLLM's engine has {engine.facts['vocab_size']} tokens",
            key="model.vocab_size",
            value=config.model.vocab_size,
        )
    return engine


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
        except OSError:  # vLLM's cache cannot be written either, which is beside it
            file = Path(tempfile.mkdtemp(prefix="policy-"), "config.json")
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as partial:
            partial.write(text)
        os.replace(partial.name, file)  # other engines read it
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
    cache = rollout.vllm.kv_cache_bytes or (None if on_gpu else CPU_CACHE_BYTES)
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
        devices: the GPUs of the engine, as ``CUDA_VISIBLE_DEVICES`` names them; none on a CPU.
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
