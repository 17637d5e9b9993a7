"""The example of an engine behind HTTP, on a small server of the test that answers as vLLM's does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.http_rollout import HttpActor, HttpEngine, Server, reload_vllm
from mcontroller.data.batch import DataProto
from mcontroller.errors import MControllerError
from tests.ranks import run_ranks
from tests.trainer.rollout.engine import a_rollout
from tests.workers.roles import GREEDY, SAMPLED, actor, experience, own_shard, prompts
from trainer.rollout.requests import NoEngineLeft
from workers import LogProbBasis, RolloutConfig, Sampling
from workers.generate.engine_protocol import RequestFailed

transformers = pytest.importorskip("transformers")

MODEL = {"num_query_groups": 2, "num_layers": 2}
ROWS = 4


class Engine(BaseHTTPRequestHandler):
    """Greedy decoding with transformers, of the weights that were loaded last; log-probabilities at temperature 1."""

    model: Any = None
    lock = threading.Lock()
    requests: list[tuple[str, dict[str, Any]]]

    def do_POST(self) -> None:  # the name is http.server's
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            self.requests.append((self.path, body))
            has_model = self.model is not None or self.path != "/v1/completions"
            answer = json.dumps(self.answer(body) if has_model else {"error": "no model"}).encode()
        self.send_response(200 if has_model else 400)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            path = body["kwargs"]["weights_path"]
            type(self).model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            return {}
        if self.path == "/reset_prefix_cache":
            return {}
        assert self.path == "/v1/completions" and body["model"] == "policy" and body["return_token_ids"]
        tokens, log_probs = self.generate(body["prompt"], body["max_tokens"], body["stop_token_ids"])
        return {"choices": [{"token_ids": tokens, "logprobs": {"token_logprobs": log_probs}}]}

    @torch.no_grad()
    def generate(self, prompt: list[int], most: int, stops: list[int]) -> tuple[list[int], list[float]]:
        made: list[int] = []
        log_probs: list[float] = []
        while len(made) < most and not (made and made[-1] in stops):
            scores = self.model(torch.tensor([prompt + made])).logits[0, -1].log_softmax(-1)
            made.append(int(scores.argmax()))
            log_probs.append(float(scores[made[-1]]))
        return made, log_probs

    def log_message(self, *parts: Any) -> None:
        """Write nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Server, list[tuple[str, dict[str, Any]]]]]:
    handler = type("OwnEngine", (Engine,), {"requests": []})
    listening = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    yield Server(f"http://127.0.0.1:{listening.server_port}", "policy", str(tmp_path), timeout_s=60), handler.requests
    listening.shutdown()
    listening.server_close()
    thread.join()


def generations(parallel: dict[str, Any], server: Server) -> Any:
    """Generate at temperature 1, update, and generate at temperature 1 and 0.5; on the rank that returns results."""
    worker = actor(
        parallel,
        "actor_rollout",
        lambda config, role: HttpActor(config, role, server=server),
        model=MODEL,
    )
    found: list[DataProto | None] = [worker.generate_sequences(own_shard(prompts(ROWS, GREEDY), worker))]
    worker.update_actor(own_shard(experience(16), worker))
    found.append(worker.generate_sequences(own_shard(prompts(ROWS, GREEDY), worker)))
    scored = worker.compute_log_prob(found[1]) if found[1] is not None else None
    found.append(worker.generate_sequences(own_shard(prompts(ROWS, GREEDY | {"temperature": 0.5}), worker)))
    return [output and (dict(output.batch), output.meta_info) for output in (*found, scored)]


@pytest.mark.simulated
def test_the_server_generates_with_the_policy_before_and_after_an_update(
    server: tuple[Server, list[tuple[str, dict[str, Any]]]],
) -> None:
    settings, requests = server
    [results] = run_ranks(generations, 1, {}, settings)
    (first, _), (second, _), (cooler, meta_info), (scored, _) = results
    assert not torch.equal(first["rollout_log_probs"], second["rollout_log_probs"])
    assert (second["rollout_log_probs"] - scored["old_log_probs"]).abs().max() < 1e-5
    # At another temperature the server reports other log-probabilities than compute_log_prob.
    assert torch.equal(cooler["engine_log_probs"], second["rollout_log_probs"])
    assert "rollout_log_probs" not in cooler
    assert meta_info["engine_log_probs"] == {"temperature": 1.0, "filtered": False}
    assert [path for path, _ in requests].count("/collective_rpc") == 2  # for 3 generations: as often as it changed
    assert list(Path(settings.folder).iterdir()) == []


@pytest.mark.simulated
def test_one_rank_of_a_shard_sends_the_requests(server: tuple[Server, list[tuple[str, dict[str, Any]]]]) -> None:
    settings, requests = server
    of_ranks = run_ranks(ranks_that_generate, 2, {"tp": 2}, settings)
    assert of_ranks == [True, False]
    assert [path for path, _ in requests].count("/v1/completions") == ROWS
    assert all(body["seed"] >= 0 for path, body in requests if path == "/v1/completions")


def ranks_that_generate(parallel: dict[str, Any], server: Server) -> bool:
    worker = actor(
        parallel,
        "actor_rollout",
        lambda config, role: HttpActor(config, role, server=server),
        model=MODEL,
    )
    return worker.generate_sequences(own_shard(prompts(ROWS, SAMPLED), worker)) is not None


@pytest.mark.parametrize(
    ("mode", "settings", "expected"),
    [
        ("raw_logprobs", {"temperature": 0.7, "top_p": 0.5}, LogProbBasis(1.0, False)),
        ("processed_logprobs", {"temperature": 0.7}, LogProbBasis(0.7, False)),
        ("processed_logprobs", {"temperature": 0.7, "top_p": 0.5}, LogProbBasis(0.7, True)),
        ("processed_logprobs", {"do_sample": False, "temperature": 0.7, "top_p": 0.5}, LogProbBasis(1.0, False)),
        ("processed_logprobs", {"do_sample": False, "repetition_penalty": 1.2}, LogProbBasis(1.0, True)),
    ],
)
def test_the_basis_of_the_log_probs_is_that_of_the_server(
    mode: str, settings: dict[str, Any], expected: LogProbBasis
) -> None:
    engine = HttpEngine(Server("http://nowhere", "policy", "/nowhere", logprobs_mode=mode), RolloutConfig())
    assert engine.basis(Sampling.of(RolloutConfig(), {"eos_token_id": 1, "pad_token_id": 0, **settings})) == expected


def test_trajectories_are_requests_to_the_server(
    server: tuple[Server, list[tuple[str, dict[str, Any]]]], tmp_path: Path
) -> None:
    settings, requests = server
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=60, **sizes)).eval()
    model.save_pretrained(tmp_path / "model")
    reload_vllm(settings, str(tmp_path / "model"))
    engine = HttpEngine(settings, RolloutConfig(prompt_length=6, response_length=24))
    engine.version = 4
    rollout = a_rollout(engines=[engine], driven=False)
    made = rollout.submit([3, 4], max_tokens=3, stop_token_ids=range(60)).result(60)
    assert (made.ended, made.versions.tolist()) == ("turn", [4])
    made.replied([5, 6])
    rollout.submit(made, max_tokens=2).result(60)
    assert [body["prompt"] for path, body in requests if path == "/v1/completions"] == [
        [3, 4],
        [3, 4, *made.tokens[:3]],
    ]
    with torch.no_grad():
        scores = model(torch.tensor([[3, 4, *made.tokens]])).logits[0, 1:-1].log_softmax(-1)
    expected = scores.gather(1, torch.tensor(made.tokens)[:, None])[:, 0]
    mask = torch.tensor(made.mask)
    assert mask.tolist()[:3] == [1, 0, 0]
    assert ((torch.tensor(made.log_probs) - expected) * mask).abs().max() < 1e-5


@pytest.mark.parametrize("answers", [True, False])
def test_a_server_that_rejects_a_request_or_is_not_there_is_reported(
    server: tuple[Server, list[tuple[str, dict[str, Any]]]], answers: bool
) -> None:
    settings = server[0] if answers else Server("http://127.0.0.1:9", "policy", "/nowhere")
    rollout = a_rollout(engines=[HttpEngine(settings, RolloutConfig(response_length=24))], driven=False)
    with pytest.raises(MControllerError) as caught:
        rollout.submit([3, 4]).result(60)  # the server has no model
    assert isinstance(caught.value, RequestFailed if answers else NoEngineLeft)
