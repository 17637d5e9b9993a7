"""Engines share the rows of all shards, and the ranks that return results get theirs in order."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_state import simulated
from parallel_state.agreement import all_gather_values
from parallel_state.megatron import MegatronContext
from tests.ranks import run_ranks
from tests.workers.generate.vllm.stand_in import StandInExecutor, StandInLLM, standing_in
from tests.workers.generate.vllm.test_checks import config
from tests.workers.roles import MODEL, PROMPT, SAMPLED, VOCAB, actor, experience, own_shard, weights
from tests.workers.roles import prompts as random_prompts
from tests.workers.router_replay.setup import EXPERTS, LAYERS, NO_BALANCE, TOPK, policy
from trainer import TrajectoryRollout
from workers import ActorRolloutRefWorker, Generated, Prompts, Sampling
from workers.generate.vllm import start
from workers.generate.vllm.engine_process import EngineError, EngineHung
from workers.generate.vllm.start import vllm_rollout

pytestmark = pytest.mark.simulated

EOS, PAD, RESPONSE = 2, 0, 4
LARGER = {"num_layers": 4, "num_attention_heads": 8, "num_query_groups": 8}


def prompts_of(shard: int, rows: int, n: int) -> Prompts:
    ids = 1000 * (shard + 1) + torch.arange(rows)[:, None] * 10 + torch.arange(3)
    return Prompts(ids, torch.ones_like(ids), torch.arange(rows * n).view(rows, n))


def sampling(n: int, **changes: Any) -> Sampling:
    values: dict[str, Any] = {
        **{"response_length": RESPONSE, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        **{
            "repetition_penalty": 1.0,
            "do_sample": True,
            "n": n,
            "seed": 0,
            "eos_token_ids": (EOS,),
            "pad_token_id": PAD,
        },
    }
    return Sampling(**values | changes)


def generated(parallel: dict[str, int], tp: int, rows: int, n: int) -> dict[str, Any]:
    """What this rank returns for its shard's prompts, and the prompts that its engine got."""
    settings = config(model=LARGER, parallel=parallel, rollout={"vllm": {"tp": tp}})
    ranks = torch.distributed.get_world_size()
    context = MegatronContext(settings.parallel.layout(ranks), 0)
    with context.activate():
        rollout = vllm_rollout(settings, context, 0, beside_policy=True)
        prompts = prompts_of(context.pg.dp.rank(), rows, n)
        result = rollout.generate(prompts, sampling(n))
    of_engine = None if rollout.engine is None else list(rollout.engine.llm.prompts)  # type: ignore[attr-defined]
    return {"shard": context.pg.dp.rank(), "result": result, "prompts": of_engine}


def expected(shard: int, rows: int, n: int) -> Generated:
    samples = prompts_of(shard, rows, n).samples()
    first = samples.ids.sum(1) % 61
    responses = torch.stack([first, torch.full_like(first, EOS), *[torch.full_like(first, PAD)] * 2], 1)
    mask = torch.tensor([[1, 1, 0, 0]]).expand_as(responses)
    return Generated(responses, mask, -responses.float() * mask)


@pytest.mark.parametrize(
    ("ranks", "parallel", "tp", "rows", "n", "engines", "of_node"),
    [
        (8, {"tp": 4, "pp": 2}, 1, 5, 4, 8, 8),
        (8, {"tp": 2, "pp": 2}, 1, 5, 3, 8, 8),
        (8, {"tp": 2, "cp": 2}, 2, 5, 1, 4, 8),
        (4, {"tp": 2, "pp": 2}, 4, 3, 2, 1, 8),
        (4, {"tp": 2, "pp": 2}, 1, 1, 2, 4, 8),
        (8, {}, 4, 3, 2, 2, 8),
        (8, {"tp": 2}, 8, 3, 1, 1, 4),
        (8, {"pp": 2}, 4, 2, 2, 2, 2),
        (6, {}, 4, 2, 1, 1, 3),
    ],
    ids=[
        *("tp4-pp2", "tp2-pp2-dp2", "tp2-cp2-dp2-engine-tp2", "one-engine", "fewer-rows-than-engines"),
        *("four-shards-an-engine", "two-nodes-an-engine", "two-engines-of-two-nodes", "idle-ranks-on-two-nodes"),
    ],
)
def test_every_engine_generates_a_part_and_the_rows_return_in_order(
    ranks: int,
    parallel: dict[str, int],
    tp: int,
    rows: int,
    n: int,
    engines: int,
    of_node: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "node_id", lambda: f"node{torch.distributed.get_rank() // of_node}")
    with standing_in():
        found = simulated.run_ranks(ranks, generated, parallel, tp, rows, n)
        check_nodes_of_engines(of_node, tp)
        assert len(StandInLLM.started) == engines
        seeds = [llm.arguments["seed"] for llm in StandInLLM.started]
        assert len(set(seeds)) == engines  # no two engines draw the same numbers
    returned = [rank for rank in found if rank["result"] is not None]
    assert [rank["shard"] for rank in returned] == list(range(len(returned)))  # one rank of each shard
    for rank in returned:
        whole = expected(rank["shard"], rows, n)
        for column, wanted in zip(rank["result"].columns(), whole.columns(), strict=True):
            assert torch.equal(column, wanted)
    shares = [len(rank["prompts"]) for rank in found if rank["prompts"] is not None]
    assert sum(shares) == rows * n * len(returned) and max(shares) - min(shares) <= 1


def check_nodes_of_engines(of_node: int, tp: int) -> None:
    """Check that the parts of every engine meet at one address, and have the same arguments."""
    for llm in StandInLLM.started:
        nodes = -(-tp // of_node)
        assert llm.arguments.get("nnodes", 1) == nodes and llm.arguments["tensor_parallel_size"] == tp
        parts = [part for part in StandInExecutor.started if part["master_port"] == llm.arguments.get("master_port")]
        assert sorted(part["node_rank"] for part in parts) == list(range(1, nodes))
        for part in parts:
            assert {**part, "node_rank": 0} == {**llm.arguments, "node_rank": 0}


def failing(parallel: dict[str, int]) -> str:
    settings = config(parallel=parallel)
    context = MegatronContext(settings.parallel.layout(torch.distributed.get_world_size()), 0)
    with context.activate():
        rollout = vllm_rollout(settings, context, 0, beside_policy=True)
        if rollout.engine is not None and torch.distributed.get_rank() == 1:

            def fail(method: str, **arguments: Any) -> Any:
                raise EngineError("engine 1 failed", method=method, pid=0, log_tail="")

            rollout.engine.call = fail  # type: ignore[method-assign]
        with pytest.raises(EngineError) as caught:
            rollout.generate(prompts_of(0, 4, 1), sampling(1))
    return str(caught.value)


def test_the_failure_of_one_engine_is_raised_on_every_rank() -> None:
    with standing_in():
        assert run_ranks(failing, 2, {"tp": 2}) == ["engine 1 failed"] * 2


def hanging() -> str:
    settings = config(rollout={"vllm": {"silence_timeout_s": 0.2}})
    context = MegatronContext(settings.parallel.layout(2), 0)
    with context.activate():
        rollout = vllm_rollout(settings, context, 0, beside_policy=True)
        if torch.distributed.get_rank() == 1:
            rollout.engine.llm.running.clear()  # type: ignore[union-attr]
            rollout.engine.llm.is_hanging = True  # type: ignore[union-attr]
        with pytest.raises(EngineHung) as caught:
            rollout.generate(prompts_of(context.pg.dp.rank(), 4, 1), sampling(1))
    return caught.value.method


def test_the_rank_of_an_engine_that_is_lost_reports_why_on_every_rank() -> None:
    with standing_in():
        assert run_ranks(hanging, 2) == ["check"] * 2


def seeded(vllm: dict[str, Any]) -> list[bool]:
    settings = config(rollout={"vllm": vllm})
    context = MegatronContext(settings.parallel.layout(1), 0)
    with context.activate():
        rollout = vllm_rollout(settings, context, 0, beside_policy=True)
        rollout.generate(prompts_of(0, 2, 2), sampling(2))
    return ["seed" in parameters for parameters in StandInLLM.started[-1].parameters]


@pytest.mark.parametrize(("vllm", "wanted"), [({}, False), ({"seeds": True}, True)], ids=["default", "seeds"])
def test_samples_have_seeds_only_if_they_are_asked_for(vllm: dict[str, Any], wanted: bool) -> None:
    with standing_in():
        assert run_ranks(seeded, 1, vllm) == [[wanted] * 4]


MIXTURE = {
    "family": "qwen3_moe",
    "qk_layernorm": True,
    "num_layers": 2,
    "num_query_groups": 4,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "transformer": {"moe_router_load_balancing_type": "none", "moe_router_pre_softmax": False},
}


def trained(
    parallel: dict[str, int], tp: int, model: dict[str, Any]
) -> tuple[int, float, list[str], list[dict[str, torch.Tensor]]]:
    """Generate, train and generate again; the engines report what they hold after each update, by node."""
    rollout = {"engine": "vllm", "verify_weights": "fingerprints", "vllm": {"tp": tp, "bucket_bytes": 8192}}
    worker = actor(parallel, "actor_rollout", model=model, rollout=rollout)
    batch = own_shard(random_prompts(8, SAMPLED), worker)
    engine, metrics = worker.rollout.engine, []
    for _ in range(2):
        generated = worker.generate_sequences(batch)
        metrics.append({} if generated is None else generated.meta_info["metrics"])
        weights = [] if engine is None else [dict(held) for held in engine.llm.weights_by_node]  # a sleep drops them
        worker.update_actor(own_shard(experience(8), worker))
    rows = 0 if generated is None else len(generated)
    return rows, metrics[-1].get("rollout/update_bytes", 0.0), [] if engine is None else engine.llm.events, weights


@pytest.mark.parametrize(
    ("parallel", "tp", "model", "of_node", "rows"),
    [({"tp": 2, "pp": 2}, 1, {}, 4, [0, 0, 8, 0]), ({"ep": 4}, 4, MIXTURE, 2, [2, 2, 2, 2])],
    ids=["four-engines", "one-engine-of-four-shards-on-two-nodes"],
)
def test_all_engines_of_an_actor_hold_its_weights_after_every_update(
    parallel: dict[str, int],
    tp: int,
    model: dict[str, Any],
    of_node: int,
    rows: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "node_id", lambda: f"node{torch.distributed.get_rank() // of_node}")
    with standing_in():
        found = run_ranks(trained, 4, parallel, tp, model)
    assert [generated for generated, *_ in found] == rows
    assert max(nbytes for _, nbytes, *_ in found) > 10_000
    calling = [events for _, _, events, _ in found if events]
    weights = [held for *_, of_rank in found for held in of_rank]
    assert len(calling) == 4 // tp and len(weights) == 4 // min(tp, of_node)
    for events in calling:
        assert events.count("finish_policy_update") == events.count("generate") == 2
    for held in weights[1:]:
        assert held.keys() == weights[0].keys()
        assert all(torch.equal(tensor, weights[0][name]) for name, tensor in held.items())


def submitted(parallel: dict[str, int]) -> tuple[list[list[int]], list[list[int]], list[str]]:
    """Submit trajectories before and after an update: their tokens and versions, and what the engine did."""
    worker = actor(parallel, "actor_rollout", rollout={"engine": "vllm"})
    calls = {name: lambda name=name: [getattr(worker, name)()] for name in ("generation_limits", "engine_addresses")}
    rollout = TrajectoryRollout(SimpleNamespace(**calls), eos_token_id=EOS, pad_token_id=PAD)
    made = []
    for seed in range(2):
        made += [rollout.submit([3 + index, 4], seed=seed) for index in range(3)]
        made[-1].result(60)
        worker.update_actor(own_shard(experience(8), worker))
    trajectories = [each.result(60) for each in made]
    tokens, versions = ([list(getattr(each, name)) for each in trajectories] for name in ("tokens", "versions"))
    return tokens, versions, [event for event in worker.rollout.engine.llm.events if event != "generate"]


def test_trajectories_are_requests_to_the_engines_with_the_weights_of_their_versions() -> None:
    with standing_in():
        [(tokens, versions, events)] = run_ranks(submitted, 1, {})
    assert tokens == [[(7 + index) % 61, EOS] for index in range(3)] * 2
    assert versions == [[0, 0]] * 3 + [[1, 1]] * 3
    assert events.count("finish_policy_update") == 2


def updated_in_flight(pause: str) -> tuple[list[set[int]], int]:
    """Update the weights under long requests: the versions of their tokens, and how many requests the engine got."""
    rollout_config = {"engine": "vllm", "vllm": {"pause": pause}, "response_length": 400, "prompt_length": 10}
    worker = actor({}, "actor_rollout", model={"max_sequence_length": 410}, rollout=rollout_config)
    calls = {name: lambda name=name: [getattr(worker, name)()] for name in ("generation_limits", "engine_addresses")}
    rollout = TrajectoryRollout(SimpleNamespace(**calls), eos_token_id=EOS, pad_token_id=PAD)
    made = [rollout.submit([3 + index, 4], seed=index) for index in range(3)]
    llm = worker.rollout.engine.llm
    while llm.tokens_made < 30:
        time.sleep(0.001)
    worker.update_actor(own_shard(experience(8), worker))
    worker.engine_addresses()
    versions = [{*trajectory.result(60).versions} for trajectory in made]
    return versions, len(llm.prompts)


@pytest.mark.parametrize(
    ("pause", "versions", "requests"), [("keep", {0, 1}, 3), ("wait", {0}, 3), ("abort", {0, 1}, 6)]
)
def test_requests_in_flight_go_on_end_or_are_sent_again_when_the_weights_move(
    pause: str, versions: set[int], requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInLLM, "token_s", 0.01)
    monkeypatch.setattr(StandInLLM, "answer", staticmethod(lambda prompt: [*[7] * (300 - len(prompt)), EOS]))
    with standing_in():
        assert run_ranks(updated_in_flight, 1, pause) == [([versions] * 3, requests)]


WORKERS: list[ActorRolloutRefWorker] = []


class TakesTurns(ActorRolloutRefWorker):
    """An actor whose GPU other groups use in turns, as ``SharedDevices`` tells it before every call."""

    def init_model(self) -> None:
        self.offloader.offload(keep_for="init_model")
        super().init_model()
        self.parts_at_start = self.offloader.offloaded.parts
        WORKERS.append(self)


def started_in_turns(parallel: dict[str, int]) -> dict[str, Any]:
    worker = actor(parallel, "actor_rollout_ref", TakesTurns, rollout={"engine": "vllm"})
    generated = worker.generate_sequences(own_shard(random_prompts(4, SAMPLED), worker))
    generating = set(worker.offloader.offloaded.parts)
    worker.reload()
    held, base = worker.rollout.engine.llm.weights["model.norm.weight"], weights(worker)
    return {
        "at_start": set(worker.parts_at_start),
        "generating": generating,
        "equal": torch.equal(held, base["decoder.final_layernorm.weight"]),
        "rows": len(generated),
    }


def test_an_engine_starts_beside_what_is_on_the_device_when_it_generates() -> None:
    with standing_in():
        [found] = run_ranks(started_in_turns, 1, {})
    moved = {"params", "reference", "grads", "optimizer"}
    assert found == {"at_start": moved, "generating": moved, "equal": True, "rows": 4}


def generated_in_turns(parallel: dict[str, int]) -> None:
    sizes = {"num_attention_heads": 4, "num_query_groups": 4}
    worker = actor(parallel, "actor_rollout", TakesTurns, model=sizes, rollout={"engine": "vllm", "vllm": {"tp": 2}})
    worker.generate_sequences(own_shard(random_prompts(4, SAMPLED), worker))


def test_an_engine_generates_when_all_its_ranks_have_left_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    left = []

    def answer(prompt: Any) -> list[int]:
        left.append(["params" in worker.offloader.offloaded.parts for worker in WORKERS])
        return [7, EOS]

    WORKERS.clear()
    monkeypatch.setattr(StandInLLM, "answer", staticmethod(answer))
    with standing_in():
        simulated.run_ranks(2, generated_in_turns, {"tp": 2}, seed=1)
    assert left == [[True, True]] * 4


def adapted(parallel: dict[str, int]) -> dict[str, Any]:
    """Train an adapter between three generations of an engine that computes it; offload the engine before the last."""
    alone = {"engine": "vllm", "vllm": {"adapter_alone": True}}
    lora = MODEL | {"lora": {"rank": 4, "alpha": 8.0}}
    worker = actor(parallel, "actor_rollout", model=lora, rollout=alone)
    batch, base = own_shard(random_prompts(8, SAMPLED), worker), weights(worker)
    for step in range(3):
        if step == 2:
            worker.offload(["rollout"])
        worker.generate_sequences(batch)
        worker.update_actor(own_shard(experience(8), worker))
    llm = worker.rollout.engine.llm
    updates = [event for event in llm.events if event in ("add_lora", "generate", "finish_policy_update")]
    changed = [not torch.equal(*pair) for pair in zip(llm.adapters[0].values(), llm.adapters[1].values(), strict=True)]
    same = torch.equal(llm.weights["model.norm.weight"], base["decoder.final_layernorm.weight"])
    return {"updates": updates, "changed": any(changed), "sent": len(llm.adapters), "base": same}


def test_an_engine_that_computes_adapters_gets_the_base_once() -> None:
    with standing_in():
        found = run_ranks(adapted, 2, {"tp": 2})
    base, alone = "finish_policy_update", ["add_lora", "generate"]
    for rank in found:
        assert rank["updates"] == [base, *alone, *alone, base, *alone]  # again after its weights were freed
        assert rank["sent"] == 3 and rank["changed"] and rank["base"]


def recorded(parallel: dict[str, int]) -> dict[str, torch.Tensor] | None:
    """Return responses with the experts of the engines, which then compute their log-probabilities."""
    mixture = {"qk_layernorm": True, "transformer": NO_BALANCE | {"moe_router_pre_softmax": False}}
    worker = policy(parallel, "rollout", "actor_rollout", model=mixture, rollout={"engine": "vllm"})
    generated = worker.generate_sequences(own_shard(random_prompts(6, SAMPLED), worker))
    generated = all_gather_values(generated, worker.context.pg.pp)[-1]
    scored = worker.compute_log_prob(generated)
    return None if scored is None else {**generated.batch, **scored.batch}


def test_the_experts_of_vllm_are_those_of_each_token_and_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandInLLM, "answer", staticmethod(lambda prompt: [sum(prompt) % VOCAB, 7, 1]))
    with standing_in():
        found = run_ranks(recorded, 2, {"pp": 2})
    (batch,) = filter(None, found)
    fed = batch["attention_mask"].clone()
    fed[:, PROMPT:-1], fed[:, -1] = batch["response_mask"][:, 1:], 0  # the last token of a response is not fed
    layers, chosen = torch.arange(LAYERS)[:, None], torch.arange(TOPK)
    wanted = (batch["input_ids"][:, :, None, None] + layers + chosen) % EXPERTS
    assert torch.equal(batch["routed_experts"], torch.where(fed[:, :, None, None] == 1, wanted, -1).to(torch.int8))
    assert batch["old_log_probs"][batch["response_mask"] == 1].max() < 0


def folders(parallel: dict[str, int], **model: Any) -> list[str]:
    settings = config(parallel=parallel, model=model)
    context = MegatronContext(settings.parallel.layout(1), 0)
    with context.activate():
        for _ in range(2):
            vllm_rollout(settings, context, 0, beside_policy=True)
    return [llm.arguments["model"] for llm in StandInLLM.started]


def test_engines_with_one_policy_read_it_from_one_folder_at_every_start() -> None:
    with standing_in():  # the compilation cache of vLLM is keyed by the folder
        [(first, second)] = simulated.run_ranks(1, folders, {})
        [(*_, other, _)] = simulated.run_ranks(1, lambda parallel: folders(parallel, num_layers=1), {})
    assert first == second != other
