"""``VllmRollout``: a rank's side of the engines of vLLM."""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mcontroller.errors import ConfigError
from parallel_state.agreement import all_gather_values
from parallel_state.megatron import MegatronContext
from workers.config import ActorConfig
from workers.generate.rollout_protocol import Generated, HeldWeights, PolicyWeights, Prompts
from workers.generate.sampling import Sampling
from workers.generate.vllm.buckets import BucketContent, send_in_buckets
from workers.generate.vllm.checks import KNOWN_FAMILIES
from workers.generate.vllm.engine_process import EngineProcess
from workers.generate.vllm.requests import prompt_tokens, responses_of, sampling_parameters
from workers.weights.fingerprints import Fingerprint
from workers.weights.hf.config import family_of, hf_config_of

__all__ = ["ReadableVllmRollout", "VllmRollout", "engine_arguments", "engine_environment", "vllm_rollout"]

logger = logging.getLogger(__name__)

_DEFAULT_ROWS = 256

# Of the worker: its own process group, and devices that are not the engine's.
_OF_A_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "TORCHELASTIC_RUN_ID",
)


class VllmRollout:
    """Generates with one engine for each data-parallel shard, which the shard's rank that returns results has.

    On the other ranks it takes part in collecting the weights, and generates nothing.

    Args:
        config: of the actor and its rollout.
        engine: that of this rank; None on ranks without one.
    """

    holds_weights = True

    def __init__(self, config: ActorConfig, engine: EngineProcess | None) -> None:
        self._config = config
        self.engine = engine

    def generate(self, prompts: Prompts, sampling: Sampling) -> Generated | None:
        """Return this rank's responses; None on ranks without an engine.

        The tokens are not those that Megatron's generation draws from the same seeds.
        """
        if self.engine is None:
            return None
        samples = prompts.samples()
        answers = self.engine.call(
            "generate",
            prompts=prompt_tokens(samples),
            parameters=sampling_parameters(samples.seeds.flatten().tolist(), sampling),
            temperature=sampling.temperature,
        )
        return responses_of(answers, sampling)

    def update_weights(self, weights: PolicyWeights) -> Mapping[str, float]:
        """Send all weights to the engine through shared memory, and drop its cache of prefixes.

        Returns:
            ``update_seconds``, of the slowest rank, and ``update_bytes``, to one engine.
        """
        start, size = time.perf_counter(), self._config.rollout.vllm.bucket_bytes
        if self.engine is None:
            total = sum(tensor.nbytes for _, tensor in weights)
        else:
            self.engine.call("begin_update")
            total = send_in_buckets(weights, size, self._send_bucket, self._wait_for_bucket)
            self.engine.call("finish_update")
            self.engine.call("drop_prefixes")
        seconds = max(all_gather_values(time.perf_counter() - start))
        return {"update_seconds": seconds, "update_bytes": float(total)}

    def sleep(self) -> int:
        """Free the memory of the engine's GPUs, and return how many bytes; on a CPU it frees nothing."""
        freed: int = 0 if self.engine is None else self.engine.call("sleep")
        return freed

    def wake_up(self) -> None:
        """Allocate the memory of the engine's GPUs again."""
        if self.engine is not None:
            self.engine.call("wake_up")

    def _send_bucket(self, bucket: BucketContent) -> None:
        assert self.engine is not None
        self.engine.send("receive_bucket", path=bucket.path, tensors=bucket.tensors)

    def _wait_for_bucket(self) -> None:
        assert self.engine is not None
        self.engine.result()


class ReadableVllmRollout(VllmRollout):
    """A rollout whose engines report the fingerprints of the weights that they compute with."""

    def fingerprints(self) -> HeldWeights:
        """Return the fingerprints of this rank's engine, and what its prefix cache has of the old weights."""
        if self.engine is None:
            return HeldWeights("hugging_face", [])
        sums, stale_tokens = self.engine.call("held_weights")
        return HeldWeights("hugging_face", [Fingerprint(*each) for each in sums], stale_tokens)


def vllm_rollout(config: ActorConfig, context: MegatronContext) -> VllmRollout:
    """Start the engine of this rank's shard, on the rank that returns results, and return the rollout (a collective).

    It is readable if the engines of all ranks can read their weights.

    Args:
        config: of the actor and its rollout.
        context: the layout of training.

    Raises:
        EngineError: an engine does not start.
    """
    pg, engine = context.pg, None
    devices = _devices_of_shard(pg.dp.rank(), config.rollout.vllm.tp)
    if pg.pp.rank() == pg.pp.size() - 1 and pg.tp.rank() == 0 and pg.cp.rank() == 0:
        engine = _started(config, devices)
    family = family_of(config.model).model_type
    reason = "" if family in KNOWN_FAMILIES else f"the names of the layers of {family} are not known"
    if not reason and engine is not None:
        reason = engine.facts["unreadable"]
    reasons = sorted({found for found in all_gather_values(reason) if found})
    if not reasons:
        return ReadableVllmRollout(config, engine)
    logger.warning("vLLM's weights cannot be read, so that fingerprints cannot be compared: %s", "; ".join(reasons))
    return VllmRollout(config, engine)


def _started(config: ActorConfig, devices: list[str]) -> EngineProcess:
    """The engine, built from a ``config.json`` of the policy that it reads while it starts; without its weights."""
    settings = config.rollout.vllm
    with tempfile.TemporaryDirectory(prefix="policy-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf_config_of(config.model)), encoding="utf-8")
        engine = EngineProcess(
            engine_arguments(config, folder, on_gpu=bool(devices)),
            engine_environment(devices),
            start_timeout_s=settings.start_timeout_s,
            silence_timeout_s=settings.silence_timeout_s,
        )
    if engine.facts["vocab_size"] != config.model.vocab_size:
        engine.close()
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size}, but vLLM's engine has {engine.facts['vocab_size']} tokens",
            key="model.vocab_size",
            value=config.model.vocab_size,
        )
    return engine


def engine_arguments(config: ActorConfig, folder: str, *, on_gpu: bool) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``.

    Args:
        config: of the actor and its rollout.
        folder: has the ``config.json`` of the policy.
        on_gpu: whether the engine runs on GPUs.
    """
    rollout = config.rollout
    return {
        "seed": 0,
        "enforce_eager": not on_gpu,  # compilation for a CPU takes minutes
        "enable_chunked_prefill": on_gpu,  # vLLM's CPU build cannot sample with seeds if it reads prompts in chunks
        **rollout.vllm.options,
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": config.model.dtype,
        "max_model_len": rollout.prompt_length + rollout.response_length,
        "max_num_seqs": rollout.max_rows or _DEFAULT_ROWS,
        "tensor_parallel_size": rollout.vllm.tp,
        "kv_cache_memory_bytes": rollout.vllm.kv_cache_bytes,
        "logprobs_mode": "raw_logprobs",
        "enable_sleep_mode": on_gpu,
    }


def engine_environment(devices: list[str]) -> dict[str, str | None]:
    """Return the variables of an engine's process that differ from those of the worker; None removes one.

    Args:
        devices: the GPUs of the engine, as ``CUDA_VISIBLE_DEVICES`` names them; none on a CPU.
    """
    common: dict[str, str | None] = {
        **dict.fromkeys(_OF_A_RANK),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the process is the engine's own already
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if devices:
        return common | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
    return common | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


def _devices_of_shard(shard: int, count: int) -> list[str]:
    """The first ``count`` GPUs of the ranks of this shard (a collective); none on a CPU.

    Raises:
        ConfigError: they are not on the node of this rank.
    """
    if not torch.cuda.is_available():
        return []
    node, index = socket.gethostname(), torch.cuda.current_device()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    own = visible.split(",")[index] if visible else str(index)
    of_ranks = all_gather_values((shard, node, own))
    devices = [device for theirs, where, device in of_ranks if theirs == shard and where == node]
    if len(devices) < count:
        text = f"rollout.vllm.tp is {count}, but {len(devices)} GPUs of data-parallel shard {shard} are on node {node}"
        raise ConfigError(text, key="rollout.vllm.tp", value=count)
    return devices[:count]
