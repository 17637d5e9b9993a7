"""``VllmRollout``: a rank's side of the engines of vLLM."""

from __future__ import annotations

import asyncio
import datetime
import math
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcontroller.errors import MControllerError
from parallel_state.agreement import all_gather_values, raise_on_every_rank, wait_for_every_rank
from parallel_state.megatron import MegatronContext
from workers.config import ActorConfig
from workers.generate.batch_requests import generate_by_requests
from workers.generate.engine_protocol import EngineLost
from workers.generate.rollout_protocol import Generated, Prompts, Rollout
from workers.generate.sampling import Sampling
from workers.generate.vllm.buckets import SharedBuckets
from workers.generate.vllm.engine_process import EngineError, EngineProcess
from workers.generate.vllm.placement import EnginePlacement, weight_receivers
from workers.generate.vllm.vllm_engine import VllmAddress
from workers.gpu_ids import node_address
from workers.lora.peft_files import write_adapter
from workers.weights.fingerprints import Fingerprint
from workers.weights.moves import TensorInBucket
from workers.weights.whole_tensors import PolicyWeights

_SHARED = "/dev/shm"


class VllmRollout(Rollout):
    """Generates with engines that lie where ``place_engines`` has put them; each gets an even part of all rows.

    A row is a request. An engine batches its requests by itself, at most ``rollout.max_rows`` at once.

    The first of an engine's ranks on each of its nodes starts its processes there, and puts the weights together for
    them; the first of these calls the engine. The rank of a shard that returns results sends the requests.

    Args:
        config: of the actor and its rollout.
        context: the layout of the ranks.
        process: the engine of this rank, or its part on this node; None on ranks that start none.
        engines: the engines of all ranks.
        on_gpus: whether they run on GPUs.
        beside_policy: whether a policy uses the GPUs of the engines too.

    Attributes:
        engine: the engine that this rank calls; None on ranks that call none.
    """

    holds_weights = True
    takes_requests = True

    def __init__(
        self,
        config: ActorConfig,
        context: MegatronContext,
        process: EngineProcess | None,
        engines: Sequence[EnginePlacement],
        *,
        on_gpus: bool,
        beside_policy: bool,
    ) -> None:
        pg, rank = context.pg, dist.get_rank()
        self._config, self._dp, self._on_gpus, self._beside_policy = config, pg.dp, on_gpus, beside_policy
        self._process, self._receivers = process, weight_receivers(engines)
        self.engine = process if any(rank == engine.caller for engine in engines) else None
        self._token = secrets.token_hex(16)
        self._buckets = SharedBuckets(config.rollout.vllm.bucket_bytes)
        self._arrived: list[Fingerprint] = []
        self._returns = pg.pp.rank() == pg.pp.size() - 1 and pg.tp.rank() == 0 and pg.cp.rank() == 0
        limit = datetime.timedelta(seconds=config.rollout.vllm.silence_timeout_s)
        self._nodes: dist.ProcessGroup | None = None
        for engine in engines:
            if len(engine.parts) > 1:
                nodes = dist.new_group(list(engine.starters), timeout=limit, backend="gloo")
                self._nodes = nodes if rank in engine.starters else self._nodes

    @property
    def sleeps_beside_training(self) -> bool:
        """Whether the engines must sleep while the policy computes: what is free on their GPUs is their cache."""
        return self._on_gpus

    @property
    def receivers(self) -> tuple[int, ...]:
        """The ranks on which whole tensors are put together: those that start an engine's processes."""
        return self._receivers

    def address(self) -> VllmAddress | None:
        """Wake the engine of this rank up, and return where it takes requests; None without one (a collective).

        Raises:
            EngineError: on every rank, if an engine fails.
        """
        if self._config.rollout.vllm.tp > 1:
            all_gather_values(None)  # other ranks have offloaded what they have on an engine's GPUs
        return raise_on_every_rank(self._listening)

    def _listening(self) -> VllmAddress | None:
        if self.engine is None:
            return None
        host, model = node_address(), self._config.model
        code = "b" if (model.num_moe_experts or 0) <= 128 else "h"
        experts = {"expert_layers": model.expert_layers, "expert_code": code}
        port = self.engine.call("listen", host=host, token=self._token, **experts)
        return VllmAddress(host, port, self._token, self._config.rollout)

    def fingerprints(self) -> Sequence[Fingerprint]:
        """Return the fingerprints of the tensors that have arrived in each process of this rank's engine."""
        return self._arrived

    def generate(self, prompts: Prompts, sampling: Sampling) -> Generated | None:
        """Return the responses of this rank's shard; None on ranks that do not return results (a collective).

        Megatron's generation draws other tokens from the same seeds.

        Raises:
            EngineError: on every rank, if an engine fails.
            RequestFailed: on every rank, if an engine rejects a request.
        """
        addresses = [address for address in all_gather_values(self.address()) if address is not None]
        samples = prompts.samples()
        rows = all_gather_values(len(samples.ids), self._dp)
        first = sum(rows[: self._dp.rank()])
        shares = [(first + row) * len(addresses) // sum(rows) for row in range(len(samples.ids))]
        try:
            return raise_on_every_rank(lambda: self._responses(addresses, shares, samples, sampling))
        except EngineLost as lost:
            engine, was_silent = self.engine, lost.was_silent
            raise_on_every_rank(lambda: None if engine is None else engine.check(was_silent=was_silent))
            raise  # unless the rank that has started the engine has reported why

    def _responses(
        self, addresses: Sequence[VllmAddress], shares: Sequence[int], samples: Prompts, sampling: Sampling
    ) -> Generated | None:
        """Return the responses of rows, of which ``shares`` has the engines, if this rank returns results."""

        async def requested() -> Generated:
            engines = [address.connect() for address in addresses]
            try:
                vocab_size = self._config.model.vocab_size
                return await generate_by_requests([engines[share] for share in shares], samples, sampling, vocab_size)
            finally:
                for engine in engines:
                    await engine.close()

        try:
            return asyncio.run(requested()) if self._returns else None
        finally:
            if self._on_gpus:
                wait_for_every_rank("vllm/generate")

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
                self.engine.call("receive_adapter", path=folder, mode=self._config.rollout.vllm.pause)
            return sum(tensor.nbytes for tensor in tensors.values())

        return _timed(send)

    def resume(self, version: int) -> None:
        """Go on with the requests in flight, with the weights of the last update (on the ranks with an engine)."""
        if self.engine is not None:
            self.engine.call("resume", version=version)

    def sleep(self) -> int:
        """Free the memory of the engine's GPUs, and return how many bytes (a collective); on a CPU it frees nothing.

        The next update wakes the engine's weights, and the next generation its cache.
        """
        freed: int = 0 if self.engine is None else self.engine.call("sleep")
        if self._on_gpus and self._config.rollout.vllm.tp > 1:
            all_gather_values(freed)  # other ranks of the engine use its GPUs next
        return freed

    def _sent(self, weights: PolicyWeights) -> int:
        buckets = self._buckets
        arriving = weights.buckets(buckets.memory, self._receivers)
        total, in_flight = 0, False
        if self.engine is None:
            for tensors in arriving:
                total += _nbytes(tensors)
                self._paths()
            return total
        try:
            hashes = self._config.rollout.verify_weights != "never"
            pause = self._config.rollout.vllm.pause
            self.engine.call("begin_update", hashes=hashes, beside_policy=self._beside_policy, mode=pause)
            for tensors in arriving:
                try:
                    if in_flight:
                        self.engine.result()
                finally:
                    paths = self._paths()
                self.engine.send("receive_bucket", paths=paths, tensors=tensors)
                total, in_flight = total + _nbytes(tensors), True
            if in_flight:
                self.engine.result()
            of_processes, in_flight = self.engine.call("finish_update"), False
            self._arrived = [Fingerprint(*fields) for of_process in of_processes for fields in of_process]
        except EngineError:
            for _ in arriving:  # the other ranks send the rest, and wait for this one
                self._paths()
            raise
        except MControllerError:
            if in_flight:
                self.engine.result()  # the next call is not answered with it
            raise
        return total

    def _paths(self) -> list[str]:
        """The bucket that was filled last, by node of the engine (a collective of those that start its processes).

        They fill the next one when all have filled this one, and the engine has read the one before.
        """
        path = self._buckets.path
        return [path] if self._nodes is None else all_gather_values(path, self._nodes)

    def _release_cached_memory(self) -> None:
        """Return what torch has reserved on all GPUs of the engines (a collective)."""
        if self._on_gpus:
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
