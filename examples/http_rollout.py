"""An engine behind HTTP as the rollout: an OpenAI-compatible server that someone else runs. See docs/rollout.md.

Prompts are sent as token ids to ``/v1/completions`` with ``return_token_ids``, which vLLM's server knows.
``HttpEngine`` takes requests one by one (``workers.generate.engine_protocol.Engine``), and ``HttpRollout`` generates
batches with it. Weights are exported to a folder that the server can read, and the server is asked to load them.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from workers import (
    ActorConfig,
    ActorRolloutRefWorker,
    Generated,
    LogProbBasis,
    PolicyWeights,
    Prompts,
    Rollout,
    RolloutConfig,
    Sampling,
    export_hf,
)
from workers.generate.batch_requests import generate_by_requests
from workers.generate.engine_protocol import EngineLost, RequestFailed, Sampled


@dataclass(frozen=True)
class Server:
    """``logprobs_mode`` is the server's own; ``folder`` is one that the server and all ranks share."""

    url: str
    model: str
    folder: str
    logprobs_mode: str = "raw_logprobs"
    connections: int = 64
    timeout_s: float = 600.0

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=self.timeout_s)

    def post(self, path: str, body: Mapping[str, Any], connection: http.client.HTTPConnection | None = None) -> Any:
        """Return the answer of the server.

        Raises:
            RequestFailed: the server answers with an error.
            EngineLost: it does not answer.
        """
        connection = connection or self.connect()
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise EngineLost(f"{self.url} does not answer: {error!r}", engine=self.url) from error
        finally:
            connection.close()
        if response.status != 200:
            text = f"{self.url}{path} answered {response.status}: {content[:500].decode(errors='replace')}"
            raise RequestFailed(text, engine=self.url, length=len(body.get("prompt", "")))
        return json.loads(content) if content else None


def reload_vllm(server: Server, path: str) -> None:
    """Load weights into ``vllm serve``, which has these paths with VLLM_SERVER_DEV_MODE=1."""
    server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
    server.post("/reset_prefix_cache", {})


class HttpEngine:
    """An engine for ``TrajectoryRollout(group, engines=[HttpEngine(server, config.rollout)])``.

    Attributes:
        version: of the policy that the server has: set it after every update of its weights.
    """

    version = 0

    def __init__(self, server: Server, config: RolloutConfig) -> None:
        self.name, self.server, self.config = server.url, server, config
        self.threads = ThreadPoolExecutor(server.connections)

    async def generate(
        self, prompt: array[int], sampling: Mapping[str, Any], on_part: Callable[[Sampled], None] | None = None
    ) -> Sampled:
        settings = Sampling.of(self.config, {**sampling, "pad_token_id": 0})
        body, connection = self.body(prompt.tolist(), settings), self.server.connect()
        post = asyncio.get_running_loop().run_in_executor(
            self.threads, self.server.post, "/v1/completions", body, connection
        )
        try:
            answer = (await post)["choices"][0]
        finally:
            connection.close()  # a server ends a request whose client is gone
        tokens, log_probs = array("q", answer["token_ids"]), array("d", answer["logprobs"]["token_logprobs"])
        basis = self.basis(settings)
        is_policy = basis == LogProbBasis(settings.temperature, filtered=False)
        versions = [(self.version, len(tokens))]
        return Sampled(tokens, log_probs, versions, basis=None if is_policy else basis._asdict())

    async def close(self) -> None:
        self.threads.shutdown(wait=False)

    def body(self, tokens: list[int], sampling: Sampling) -> dict[str, Any]:
        settings = ("top_k", "top_p", "min_p", "repetition_penalty")
        return {
            "model": self.server.model,
            "prompt": tokens,
            "max_tokens": sampling.response_length,
            "temperature": sampling.temperature if sampling.do_sample else 0.0,
            "seed": sampling.seed & (1 << 63) - 1,
            "stop_token_ids": list(sampling.eos_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            **{name: getattr(sampling, name) for name in settings},
        }

    def basis(self, sampling: Sampling) -> LogProbBasis:
        """Return what vLLM's log-probabilities are of; with other servers, ask their documentation."""
        if self.server.logprobs_mode == "raw_logprobs":
            return LogProbBasis(temperature=1.0, filtered=False)
        penalized = sampling.repetition_penalty != 1.0
        filters = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        drawn = sampling.do_sample
        return LogProbBasis(sampling.temperature if drawn else 1.0, filtered=penalized or (filters and drawn))


class HttpRollout(Rollout):
    """Every data-parallel shard sends its prompts from the rank that returns results."""

    holds_weights = True

    def __init__(
        self, worker: ActorRolloutRefWorker, server: Server, reload: Callable[[Server, str], None] = reload_vllm
    ) -> None:
        self.worker, self.config, self.server, self.reload = worker, worker.config, server, reload
        self.engine = HttpEngine(server, worker.config.rollout)
        self.updates = 0
        pg = worker.context.pg
        self.asks = pg.pp.rank() == pg.pp.size() - 1 and pg.tp.rank() == 0 and pg.cp.rank() == 0

    def generate(self, prompts: Prompts, sampling: Sampling) -> Generated | None:
        if not self.asks:
            return None
        samples, vocab_size = prompts.samples(), self.config.model.vocab_size
        return asyncio.run(generate_by_requests([self.engine] * len(samples.ids), samples, sampling, vocab_size))

    def update_weights(self, weights: PolicyWeights) -> Mapping[str, float]:
        folder = Path(self.server.folder) / f"policy-{self.updates}"
        self.updates += 1
        model = replace(self.config.model, verify_load="off")  # once, when the model was loaded, is enough
        export_hf(self.worker.model, self.worker.context, folder, model)
        if dist.get_rank() == 0:
            self.reload(self.server, str(folder))
            shutil.rmtree(folder)
        dist.barrier()  # no rank generates before the server has the weights
        return {}


class HttpActor(ActorRolloutRefWorker):
    """An actor that generates with ``server``: ``RayClassWithInitArgs(HttpActor, config, server=Server(...))``."""

    def __init__(self, config: ActorConfig, role: str = "actor_rollout", *, server: Server) -> None:
        super().__init__(config, role)
        self.server = server

    def build_rollout(self) -> HttpRollout:
        return HttpRollout(self, self.server)
