"""``VllmRollout``: a rank's side of the engines of vLLM."""

from __future__ import annotations

import math
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcontroller.errors import MControllerError
from parallel_state.agreement import all_gather_values, raise_on_every_rank, wait_for_every_rank
from parallel_state.megatron import MegatronContext
from workers.config import ActorConfig
from workers.generate.rollout_protocol import Generated, HeldWeights, PolicyWeights, Prompts, Rollout
from workers.generate.sampling import Sampling
from workers.generate.vllm.buckets import SharedBuckets
from workers.generate.vllm.engine_process import EngineError, EngineProcess
from workers.generate.vllm.requests import EngineAddress, sampling_parameters
from workers.generate.vllm.response_exchange import RankRole, ResponseExchange, consecutive, even_shares
from workers.generate.vllm.responses import expert_dtype, expert_layers, experts_of, prompt_tokens, responses_of
from workers.lora.peft_files import write_adapter
from workers.weights.fingerprints import Fingerprint
from workers.weights.moves import TensorInBucket

_SHARED = "/dev/shm"


class EngineMap(NamedTuple):
    """The engines of all data-parallel shards.

    Attributes:
        of_shard: how many engines each shard has.
        number: of this rank's engine among the engines of all shards; None on a rank without one.
        on_gpus: whether they run on GPUs.
    """

    of_shard: list[int]
    number: int | None
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
    takes_requests = True

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
        self._token = secrets.token_hex(16)
        self._buckets = SharedBuckets(config.rollout.vllm.bucket_bytes)
        self._arrived: list[Fingerprint] = []
        self._exchange = ResponseExchange(
            RankRole(
                requests_shard=pg.dp.rank(),
                receives=pg.pp.rank() == pg.pp.size() - 1 and pg.tp.rank() == 0 and pg.cp.rank() == 0,
                generates_share=engines.number or 0,
                sends=engines.number is not None,
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

    def address(self, host: str) -> EngineAddress | None:
        """Wake the engine of this rank up, and return where it takes requests; None without one (a collective).

        Args:
            host: the address of this node to listen at.

        Raises:
            EngineError: on every rank, if an engine fails.
        """
        return raise_on_every_rank(lambda: self._listening(host))

    def _listening(self, host: str) -> EngineAddress | None:
        if self.engine is None:
            return None
        self.engine.call("wake_up")
        config, records = self._config, self._config.router_replay == "rollout"
        layers = expert_layers(config.model) if records else []
        port = self.engine.call("listen", host=host, token=self._token, expert_layers=layers)
        dtype = expert_dtype(config.model) if records else None
        return EngineAddress(host, port, self._token, config.rollout, config.model.vocab_size, dtype)

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
        share = range(first, first) if self._engines.number is None else shares[self._engines.number]
        prompts_of_engine = Prompts(*(column[share.start - first : share.stop - first] for column in samples))
        generated = raise_on_every_rank(lambda: self._responses(prompts_of_engine, sampling))
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

    def resume(self, version: int) -> None:
        """Go on with the requests in flight, with the weights of the last update (on the ranks with an engine)."""
        if self.engine is not None:
            self.engine.call("resume", version=version)

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
                    "generate_sequences",
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
