"""An engine behind HTTP as the rollout: an OpenAI-compatible server that someone else runs. See docs/engine.md.

Prompts are sent as token ids to ``/v1/completions`` with ``return_token_ids``, which vLLM's server knows. Weights are
exported to a folder that the server can read, and the server is asked to load them.
"""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workers import (
    ActorConfig,
    ActorRolloutRefWorker,
    Generated,
    LogProbBasis,
    PolicyWeights,
    Prompts,
    Rollout,
    Sampling,
    export_hf,
)


@dataclass(frozen=True)
class Server:
    """``logprobs_mode`` is the server's own; ``folder`` is one that the server and all ranks share."""

    url: str
    model: str
    folder: str
    logprobs_mode: str = "raw_logprobs"
    connections: int = 64
    timeout_s: float = 600.0

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
            content = answer.read()
        return json.loads(content) if content else None


def reload_vllm(server: Server, path: str) -> None:
    """Load weights into ``vllm serve``, which has these paths with VLLM_SERVER_DEV_MODE=1."""
    server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
    server.post("/reset_prefix_cache", {})


class HttpRollout(Rollout):
    """Every data-parallel shard sends its prompts from the rank that returns results."""

    holds_weights = True

    def __init__(
        self, worker: ActorRolloutRefWorker, server: Server, reload: Callable[[Server, str], None] = reload_vllm
    ) -> None:
        self.config, self.server, self.reload = worker.config, server, reload
        self.updates = 0
        pg = worker.context.pg
        self.asks = pg.pp.rank() == pg.pp.size() - 1 and pg.tp.rank() == 0 and pg.cp.rank() == 0

    def generate(self, prompts: Prompts, sampling: Sampling) -> Generated | None:
        if not self.asks:
            return None
        samples = prompts.samples()
        rows = zip(samples.ids, samples.attention_mask.bool(), samples.seeds.flatten().tolist(), strict=True)
        bodies = [self.body(ids[attended].tolist(), seed, sampling) for ids, attended, seed in rows]
        with ThreadPoolExecutor(self.server.connections) as threads:
            answers = list(threads.map(lambda body: self.server.post("/v1/completions", body)["choices"][0], bodies))
        shape = len(answers), sampling.response_length
        responses = torch.full(shape, sampling.pad_token_id)
        mask, log_probs = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
        for row, answer in enumerate(answers):
            tokens = answer["token_ids"]
            responses[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
            log_probs[row, : len(tokens)] = torch.tensor(answer["logprobs"]["token_logprobs"])
        return Generated(responses, mask, log_probs, self.basis(sampling))

    def body(self, tokens: list[int], seed: int, sampling: Sampling) -> dict[str, Any]:
        settings = ("top_k", "top_p", "min_p", "repetition_penalty")
        return {
            "model": self.server.model,
            "prompt": tokens,
            "max_tokens": sampling.response_length,
            "temperature": sampling.temperature if sampling.do_sample else 0.0,
            "seed": seed & (1 << 63) - 1,
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

    def update_weights(self, weights: PolicyWeights) -> Mapping[str, float]:
        folder = Path(self.server.folder) / f"policy-{self.updates}"
        self.updates += 1
        model = replace(self.config.model, verify_load="off")  # once, when the model was loaded, is enough
        export_hf(weights.chunks, weights.context, folder, model)
        if dist.get_rank() == 0:
            self.reload(self.server, str(folder))
            shutil.rmtree(folder)
        dist.barrier()  # no rank generates before the server has the weights
        return {}

    def sleep(self) -> int:
        return 0  # the server's memory is not this job's

    def wake_up(self) -> None:
        pass


class HttpActor(ActorRolloutRefWorker):
    """An actor that generates with ``server``: ``RayClassWithInitArgs(HttpActor, config, server=Server(...))``."""

    def __init__(self, config: ActorConfig, role: str = "actor_rollout", *, server: Server) -> None:
        super().__init__(config, role)
        self.server = server

    def build_rollout(self) -> HttpRollout:
        return HttpRollout(self, self.server)
