"""``VllmRollout``: a rank's side of the engines of vLLM."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcontroller.errors import ConfigError, MControllerError
from parallel_state.agreement import all_gather_values, raise_on_every_rank, wait_for_every_rank
from parallel_state.megatron import MegatronContext
from workers.config import ActorConfig
from workers.generate.rollout_protocol import Generated, HeldWeights, PolicyWeights, Prompts, Rollout
from workers.generate.sampling import Sampling
from workers.generate.vllm.buckets import SharedBuckets
from workers.generate.vllm.checks import CPU_CACHE_BYTES, LORA_RANKS, check_installed
from workers.generate.vllm.engine_process import EngineError, EngineProcess
from workers.generate.vllm.gpu_memory import GpuMemory, measured_memory, utilization
from workers.generate.vllm.interpreter import interpreter_of
from workers.generate.vllm.placement import engines_of_shards
from workers.generate.vllm.requests import experts_of, prompt_tokens, responses_of, sampling_parameters
from workers.generate.vllm.response_exchange import RankRole, ResponseExchange, consecutive, even_shares
from workers.gpu_ids import node_id
from workers.lora.peft_files import write_adapter
from workers.weights.fingerprints import Fingerprint
from workers.weights.hf.config import hf_config_of
from workers.weights.moves import TensorInBucket

logger = logging.getLogger(__name__)

_SHARED = "/dev/shm"

# The worker's process group, and its one hardware queue, which would serialize the streams of an engine.
_OF_A_RANK = (
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


class EngineMap(NamedTuple):
    """The engines of all data-parallel shards.

    Attributes:
        of_shard: how many engines each shard has.
        own: the number of this rank's engine among the engines of all shards; None on a rank without one.
        on_gpus: whether they run on GPUs.
    """

    of_shard: list[int]
    own: int | None
    on_gpus: bool

    def shares(self, shards: Sequence[range]) -> list[range]:
        """Return the rows of every engine, from the rows of the shards; the engines of a shard get even parts."""
        return [
            range(rows.start + part.start, rows.start + part.stop)
            for rows, count in zip(shards, self.of_shard, strict=True)
            for part in even_shares(len(rows), count)
        ]


class VllmRollout(Rollout):
    """Generates with as many engines as fit the ranks of a data-parallel shard, each with a part of the shard's rows.

    The first of an engine's ranks starts and calls it, and puts the weights together for it.

    Args:
        config: of the actor and its rollout.
        context: the layout of the ranks.
        engine: the engine of this rank; None on ranks without one.
        engines: the engines of all ranks.
        beside_policy: whether a policy uses the GPUs of the engines too.
    """

    holds_weights = True

    def __init__(
        self,
        config: ActorConfig,
        context: MegatronContext,
        engine: EngineProcess | None,
        engines: EngineMap,
        *,
        beside_policy: bool,
    ) -> None:
        pg = context.pg
        self._config, self._pg, self._engines = config, pg, engines
        self.engine = engine
        self._beside_policy = beside_policy
        self._buckets = SharedBuckets(config.rollout.vllm.bucket_bytes)
        self._arrived: list[Fingerprint] = []
        self._exchange = ResponseExchange(
            RankRole(
                requests_shard=pg.dp.rank(),
                receives=pg.pp.rank() == pg.pp.size() - 1 and pg.tp.rank() == 0 and pg.cp.rank() == 0,
                generates_share=engines.own or 0,
                sends=engines.own is not None,
            )
        )

    @property
    def sleeps_beside_training(self) -> bool:
        """Whether the engines must sleep while the policy computes: what is free on their GPUs is their cache."""
        return self._engines.on_gpus

    @property
    def receives_weights(self) -> bool:
        """Whether whole tensors are put together on this rank."""
        return self.engine is not None

    def fingerprints(self) -> HeldWeights:
        """Return the fingerprints of the tensors that have arrived in each process of this rank's engine."""
        return HeldWeights("hugging_face", self._arrived)

    def generate(self, prompts: Prompts, sampling: Sampling) -> Generated | None:
        """Return the responses of this rank's shard; None on ranks that do not return results (a collective).

        Megatron's generation draws other tokens from the same seeds.

        Raises:
            EngineError: on every rank, if an engine fails.
        """
        if self._config.rollout.vllm.tp > 1:
            all_gather_values(None)  # what other ranks of the engine offload has left its GPUs
        samples = prompts.samples()
        shards = consecutive(all_gather_values(len(samples.ids), self._pg.dp))
        shares, first = self._engines.shares(shards), shards[self._pg.dp.rank()].start
        own = range(first, first) if self._engines.own is None else shares[self._engines.own]
        mine = Prompts(*(column[own.start - first : own.stop - first] for column in samples))
        generated = raise_on_every_rank(lambda: self._responses(mine, sampling))
        device = torch.device("cuda" if self._engines.on_gpus else "cpu")
        columns = Generated.of_columns([column.to(device) for column in generated.columns()])
        returned = self._exchange.return_responses(columns, shares, shards)
        return None if returned is None else returned._replace(basis=generated.basis)

    def update_weights(self, weights: PolicyWeights) -> Mapping[str, float]:
        """Put all weights together in shared memory for the engines (a collective).

        On GPUs that a policy uses too, an engine has memory for the weights only: that of its cache follows with the
        next generation, when this has freed what it took. The engine's cache of prefixes is dropped.

        Returns:
            ``update_seconds``, of the slowest rank, and ``update_bytes``, to one engine.

        Raises:
            EngineError: on every rank, if an engine fails.
        """
        self._release_cached_memory()
        metrics = _timed(lambda: self._sent(weights))
        self._release_cached_memory()
        return metrics

    def update_adapter(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Mapping[str, float]:
        """Generate with this adapter of the base from now on (a collective); the engine reads it from shared memory.

        Args:
            tensors: the whole adapter under PEFT's names, on ranks with an engine.
            config: the content of its ``adapter_config.json``.

        Returns:
            ``update_seconds``, of the slowest rank, and ``update_bytes``, to one engine.

        Raises:
            EngineError: on every rank, if an engine fails.
        """

        def send() -> int:
            if self.engine is None:
                return 0
            with tempfile.TemporaryDirectory(
                prefix="adapter-", dir=_SHARED if os.path.isdir(_SHARED) else None
            ) as folder:
                write_adapter(Path(folder), tensors, config)
                self.engine.call("receive_adapter", path=folder)
            return sum(tensor.nbytes for tensor in tensors.values())

        return _timed(send)

    def sleep(self) -> int:
        """Free the memory of the engine's GPUs, and return how many bytes (a collective); on a CPU it frees nothing."""
        freed: int = 0 if self.engine is None else self.engine.call("sleep")
        if self._engines.on_gpus and self._config.rollout.vllm.tp > 1:
            all_gather_values(freed)  # other ranks of the engine use its GPUs next
        return freed

    def wake_up(self) -> None:
        """Leave the engine asleep: the next update wakes its weights, and the next generation its cache."""

    def _responses(self, samples: Prompts, sampling: Sampling) -> Generated:
        answers = []
        try:
            if self.engine is not None and len(samples.ids):
                seeded = self._config.rollout.vllm.seeds
                answers = self.engine.call(
                    "generate",
                    prompts=prompt_tokens(samples),
                    parameters=sampling_parameters(samples.seeds.flatten().tolist(), sampling, seeded=seeded),
                    temperature=sampling.temperature,
                )
        finally:
            if self._engines.on_gpus:
                wait_for_every_rank("vllm/generate")
        experts = None
        if self._config.router_replay == "rollout":
            experts = experts_of(answers, samples, sampling.response_length, self._config.model)
        return responses_of(answers, sampling, experts)

    def _sent(self, weights: PolicyWeights) -> int:
        buckets = self._buckets
        arriving = weights.buckets(buckets.memory, "none" if self.engine is None else "all")
        total, in_flight = 0, False
        try:
            if self.engine is None:
                return sum(map(_nbytes, arriving))
            hashes = self._config.rollout.verify_weights != "never"
            self.engine.call("begin_update", hashes=hashes, beside_policy=self._beside_policy)
            for tensors in arriving:
                if in_flight:
                    self.engine.result()
                self.engine.send("receive_bucket", path=buckets.path, tensors=tensors)
                total, in_flight = total + _nbytes(tensors), True
            if in_flight:
                self.engine.result()
            of_processes, in_flight = self.engine.call("finish_update"), False
            self._arrived = [Fingerprint(*fields) for of_process in of_processes for fields in of_process]
            self.engine.call("drop_prefixes")
        except EngineError:
            for _ in arriving:  # the other ranks send the rest, and wait for this one
                pass
            raise
        except MControllerError:
            if self.engine is not None and in_flight:
                self.engine.result()  # the next call is not answered with it
            raise
        return total

    def _release_cached_memory(self) -> None:
        """Return what torch has reserved on all GPUs of the engines (a collective)."""
        if self._engines.on_gpus:
            torch.cuda.empty_cache()
            all_gather_values(None)


def _timed(send: Callable[[], int]) -> Mapping[str, float]:
    """Send to the engines (a collective), and return the seconds of the slowest rank and the most bytes of one."""
    start = time.perf_counter()
    sent = raise_on_every_rank(send)
    of_ranks = all_gather_values((time.perf_counter() - start, sent))
    seconds, nbytes = map(max, zip(*of_ranks, strict=True))
    return {"update_seconds": seconds, "update_bytes": float(nbytes)}


def _nbytes(tensors: Sequence[TensorInBucket]) -> int:
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape, _ in tensors)


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
    engines = [ranks for of_shard in shards for ranks in of_shard]
    own = next((number for number, ranks in enumerate(engines) if ranks[0] == rank), None)
    mine = [] if own is None else [places[rank] for rank in engines[own]]
    engine = raise_on_every_rank(lambda: _started_everywhere(config, mine, own, beside_policy=models > 0))
    engine_map = EngineMap(list(map(len, shards)), own, places[rank].memory is not None)
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
    """Return the arguments of ``vllm.LLM``.

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
