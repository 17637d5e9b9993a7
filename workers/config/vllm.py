"""VllmConfig: the settings of the rollout engine vllm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcontroller.config.checks import check_above, check_at_least, check_one_of
from mcontroller.config.fields import strict_fields
from mcontroller.errors import ConfigError

# Arguments of vLLM's engine that follow from other fields, and the field to set instead.
_SET_ELSEWHERE = {
    "model": "model",
    "hf_overrides": "model",
    "dtype": "model.dtype",
    "seed": "rollout.seed, from which every engine has another one",
    "generation_config": "the fields of rollout",
    "max_model_len": "rollout.prompt_length and rollout.response_length",
    "max_num_seqs": "rollout.max_rows",
    "tensor_parallel_size": "rollout.vllm.tp",
    "kv_cache_memory_bytes": "rollout.vllm.kv_cache_bytes",
    "load_format": "model.hf_path",
    "logprobs_mode": "nothing: log-probabilities are always the policy's",
    "enable_batch_sharded_sampling": "nothing: it changes the distribution that log-probabilities are of",
    "skip_tokenizer_init": "nothing: prompts are token ids",
    "worker_extension_cls": "nothing: it receives the weights",
    "enable_sleep_mode": "nothing: it is on with a GPU",
    "pipeline_parallel_size": "rollout.vllm.tp",
    "data_parallel_size": "nothing: as many engines start as the GPUs have room for",
    **dict.fromkeys(
        ("distributed_executor_backend", "nnodes", "node_rank", "master_addr", "master_port"),
        "nothing: it follows from where engines lie",
    ),
}


@strict_fields
@dataclass(frozen=True, slots=True)
class VllmConfig:
    """Engines of vLLM, as many as fit the ranks of the group; read if ``rollout.engine`` is vllm."""

    python: str | None = None
    """Python interpreter that engines run with, such as that of an environment for vLLM alone; None: the worker's.

    It needs vLLM and nothing of this package, and is a path on the workers' nodes, or a name in their PATH.
    """
    tp: int = 1
    """[ranks] GPUs of an engine, in any layout of the group: on one node, or as many on each of several nodes.

    ``mcontroller check`` prints where engines lie.
    """
    kv_cache_bytes: int = 0
    """[bytes] Memory of the cached keys and values, on each rank of an engine. 0: on a GPU the rest, on a CPU 2**30.

    The rest is what is free beside the policy and the engine's weights when the engine starts.
    """
    reserved_bytes: int = 0
    """[bytes] Memory of each GPU that other processes will have while the engine generates. 0: what they have at first.

    ``RayPPOTrainer`` sets it with ``trainer.offload=never``, if other roles have the same GPUs.
    """
    seeds: bool = False
    """Draw every sample with a separate seed, so that a run can be repeated; vLLM then draws row by row."""
    bucket_bytes: int = 64 << 20
    """[bytes] Weights that are sent at once. Two buckets exist at a time, each at least as large as one tensor."""
    start_timeout_s: float = 600.0
    """[seconds] Time for an engine to start."""
    silence_timeout_s: float = 300.0
    """[seconds] An engine that has not finished a step, or part of an update, for this long is reported as hung."""
    pause: str = "keep"
    """Requests in flight when the weights move: keep (they go on with the new weights), wait (they end first), or abort
    (what they have so far is their response, and a trajectory's rest is a new request).

    ``RayPPOTrainer`` sets it from ``trainer.asynchronous.partial``, and rejects another value.
    """
    adapter_alone: bool = False
    """Send only the adapter of ``model.lora`` once the engine has the base, and let the engine compute it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Other arguments of ``vllm.AsyncEngineArgs``, under vLLM's names, such as ``enable_prefix_caching``.

    ``gpu_memory_utilization`` [fraction of a GPU] is the free share when the engine starts, unless it is set.
    """

    def __post_init__(self) -> None:
        check_at_least("rollout.vllm.tp", self.tp, 1)
        check_at_least("rollout.vllm.kv_cache_bytes", self.kv_cache_bytes, 0)
        check_at_least("rollout.vllm.reserved_bytes", self.reserved_bytes, 0)
        check_at_least("rollout.vllm.bucket_bytes", self.bucket_bytes, 1)
        check_one_of("rollout.vllm.pause", self.pause, ("keep", "wait", "abort"))
        check_above("rollout.vllm.start_timeout_s", self.start_timeout_s, 0.0)
        check_above("rollout.vllm.silence_timeout_s", self.silence_timeout_s, 0.0)
        for name, instead in _SET_ELSEWHERE.items():
            if name in self.options:
                key = f"rollout.vllm.options.{name}"
                raise ConfigError(
                    f"{key} is set by this package: remove it, and set {instead}", key=key, value=self.options[name]
                )
