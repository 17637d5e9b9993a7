"""Generation in a separate layout has the samples of one process and the weights of the policy."""

from __future__ import annotations

import functools
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from mcontroller.data.batch import DataProto
from mcontroller.errors import ConfigError, DataError, LayoutError
from parallel_state.megatron import MegatronContext
from tests.ranks import run_ranks
from tests.training import device
from tests.workers.roles import (
    EOS,
    GREEDY,
    MODEL,
    PROMPT,
    RESPONSE,
    SAMPLED,
    VOCAB,
    actor,
    experience,
    own_shard,
    prompts,
)
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, ParallelConfig, load_config
from workers.config.fit import padded_vocab_size
from workers.model.build import build_model
from workers.model.initialize import initialize_weights
from workers.model.local_spec import block_spec
from workers.model.transformer_config import transformer_config
from workers.model.vocab_padding import mask_padded_vocabulary
from workers.weights.offload import Offload

ROWS, N = 12, 2
Axes = dict[str, Any]
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"num_query_groups": 4},
    "tied": {"num_query_groups": 4, "tie_embeddings": True},
    "uneven stages": {"num_query_groups": 4, "transformer": {"num_layers_in_first_pipeline_stage": 1}},
    "experts": {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 32,
        "transformer": {"moe_router_load_balancing_type": "none"},
    },
}
TP2_PP2 = {"tp": 2, "pp": 2}


def policy(parallel: Axes, rollout: Axes | None, model: str = "dense", **changes: Any) -> ActorRolloutRefWorker:
    return actor(parallel, "actor_rollout", model=MODELS[model], rollout={"parallel": rollout} | changes)


def before_and_after(
    parallel: Axes, rollout: Axes | None, model: str, rows: int, changes: dict[str, Any]
) -> list[dict[str, Any]] | None:
    """Return samples and greedy responses, before and after an update; None except on the last stage."""
    worker = policy(parallel, rollout, model, **changes)
    batch = prompts(rows, SAMPLED | {"n": N})
    batch.batch["position"] = torch.arange(rows)
    mine = own_shard(batch, worker)
    greedy = DataProto(mine.batch, {}, GREEDY)
    outputs = [worker.generate_sequences(mine), worker.generate_sequences(greedy)]
    worker.update_actor(own_shard(experience(16), worker))
    outputs += [worker.generate_sequences(mine), worker.generate_sequences(greedy)]
    found = []
    for output in outputs:
        if output is not None:
            position = mine.batch["position"].repeat_interleave(len(output) // len(mine))
            found.append({"position": position, "metrics": output.meta_info.get("metrics")} | dict(output.batch))
    return found or None


@functools.cache
def alone(model: str, rows: int) -> list[dict[str, Any]]:
    whole = "dense" if model == "uneven stages" else model
    return run_ranks(before_and_after, 1, {}, None, whole, rows, {})[0]


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("ranks", "parallel", "rollout", "model", "rows", "changes"),
    [
        (4, TP2_PP2, {}, "dense", ROWS, {}),
        (4, TP2_PP2, {"tp": 4}, "tied", ROWS, {}),
        (8, {"cp": 2, "tp": 2}, {}, "dense", 3, {}),  # fewer samples, with and without n, than ranks
        (4, {"cp": 4, "order": "cp-tp-ep-dp-pp"}, {"tp": 2}, "dense", ROWS, {}),
        (4, {"pp": 2, "vpp": 2}, {"tp": 2, "pp": 2}, "tied", ROWS, {}),
        (4, {"tp": 2}, {"pp": 2, "order": "tp-cp-ep-pp-dp"}, "dense", ROWS, {"max_rows": 5}),
        (2, {"pp": 2}, {"tp": 2}, "uneven stages", ROWS, {}),
        (4, {"ep": 2, "pp": 2}, {"ep": 4}, "experts", 3, {"max_rows": 1}),
        (4, {"ep": 4}, {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, "experts", ROWS, {}),
    ],
    ids=["dp4", "tp4", "cp2-few", "cp4-tp2", "vpp", "orders", "uneven", "ep4-few", "etp"],
)
def test_responses_equal_those_of_one_process_before_and_after_an_update(
    ranks: int, parallel: Axes, rollout: Axes, model: str, rows: int, changes: dict[str, Any]
) -> None:
    expected = alone(model, rows)
    ranks_outputs = run_ranks(before_and_after, ranks, parallel, rollout, model, rows, changes)
    returned = [outputs for outputs in ranks_outputs if outputs is not None]
    assert len(returned) == ranks // parallel.get("pp", 1)
    for call, wanted in enumerate(expected):
        parts = [outputs[call] for outputs in returned]
        assert {int(position) for part in parts for position in part["position"]} == set(range(rows))
        for part in parts:
            own = torch.isin(wanted["position"], part["position"])
            for name in ("responses", "response_mask", "input_ids", "position_ids"):
                assert torch.equal(part[name], wanted[name][own])
            gap = (part["rollout_log_probs"] - wanted["rollout_log_probs"][own]).abs().max()
            assert gap < 1e-4
    change = expected[1]["rollout_log_probs"] - expected[3]["rollout_log_probs"]
    assert change.abs().max() > 0.05  # the update has an effect


@pytest.mark.simulated
def test_weights_are_copied_only_after_a_change_and_the_cost_is_reported() -> None:
    for outputs in run_ranks(before_and_after, 4, {"tp": 2}, {}, "dense", ROWS, {}):
        first, again, updated, updated_again = (output["metrics"] for output in outputs)
        assert again is updated_again is None
        for metrics in (first, updated):
            assert metrics["rollout/resharding_bytes_sent"] == metrics["rollout/resharding_least_bytes"] > 0
            assert metrics["rollout/resharding_seconds"] > 0
    results = [DataProto(None, {}, {"metrics": outputs[0]["metrics"]}) for outputs in [outputs, outputs]]
    assert len(DataProto.concat(results).meta_info["metrics"]["rollout/resharding_bytes_sent"]) == 2


class CustomModel(ActorRolloutRefWorker):
    """A custom model, which the configuration cannot describe: it has no name for the activation."""

    def build_model(self) -> list[Any]:
        return self.build_custom_model(self.config.parallel, self.context)

    def build_custom_model(self, parallel: ParallelConfig, context: MegatronContext) -> list[Any]:
        config = transformer_config(self.config.model, parallel)
        config.activation_func, config.bias_activation_fusion = torch.nn.functional.softplus, False

        def provider(pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
            spec = block_spec(config, "local", context.pg.pp.rank(), vp_stage)
            vocabulary = padded_vocab_size(VOCAB, parallel.tp)
            chunk = GPTModel(
                config,
                spec,
                vocabulary,
                32,
                pre_process,
                post_process,
                position_embedding_type="rope",
                vp_stage=vp_stage,
            )
            mask_padded_vocabulary(chunk, VOCAB)
            return chunk

        chunks = build_model(self.config.model, parallel, context, model_provider=provider)
        initialize_weights(chunks, context, seed=8)
        return chunks


class CustomRolloutModel(CustomModel):
    def build_rollout_model(self, parallel: ParallelConfig, context: MegatronContext) -> list[Any]:
        with context.activate():
            return self.build_custom_model(parallel, context)


def with_custom_model(parallel: Axes, rollout: Axes | None) -> list[torch.Tensor] | None:
    """Return greedy responses before and after an update."""
    worker = actor(parallel, "actor_rollout", CustomRolloutModel, rollout={"parallel": rollout})
    batch = own_shard(prompts(ROWS, GREEDY), worker)
    outputs = [worker.generate_sequences(batch)]
    for _ in range(2):
        worker.update_actor(own_shard(experience(16), worker))
    outputs.append(worker.generate_sequences(batch))
    return None if outputs[0] is None else [output.batch["responses"] for output in outputs]


@pytest.mark.simulated
def test_custom_model_generates_in_another_layout() -> None:
    expected = run_ranks(with_custom_model, 1, {}, None)[0]
    assert not torch.equal(*expected)
    returned = [found for found in run_ranks(with_custom_model, 4, TP2_PP2, {"tp": 2}) if found is not None]
    assert len(returned) == 2
    for found in returned:
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def rejected_custom_model() -> str:
    with pytest.raises(ConfigError) as caught:
        actor({}, "actor_rollout", CustomModel, rollout={"parallel": {"tp": 2}})
    assert caught.value.fields["key"] == "rollout.parallel"
    return str(caught.value)


@pytest.mark.simulated
def test_custom_model_without_build_rollout_model_is_rejected() -> None:
    for message in run_ranks(rejected_custom_model, 2):
        assert message.startswith("CustomModel overrides build_model, ") and "override build_rollout_model" in message


def stops_at_different_steps(max_rows: int) -> tuple[int, ...]:
    """Generate with experts divided over ranks with different rows, of which one is done after its first token."""
    worker = actor({"etp": 2}, "rollout", model=MODELS["experts"], rollout={"max_rows": max_rows})
    first = (
        worker.generate_sequences(own_shard(prompts(8, GREEDY), worker))
        .batch["responses"][:, 0]
        .contiguous()
        .to(device())
    )
    dist.broadcast(first, 0)
    rows = own_shard(prompts(8, GREEDY | {"eos_token_id": first.tolist()}), worker)
    return tuple(worker.generate_sequences(rows[: 4 - dist.get_rank()]).batch["response_mask"].sum(1).tolist())


@pytest.mark.simulated
@pytest.mark.parametrize("max_rows", [0, 1])
def test_rank_that_is_done_still_exchanges_tokens_of_experts(max_rows: int) -> None:
    done, other = run_ranks(stops_at_different_steps, 2, max_rows)
    assert done == (1, 1, 1, 1)
    assert len(other) == 3 and max(other) > 1


def greedy_of(parallel: Axes, shares: list[int], stops: list[int], max_rows: int) -> list[list[int]]:
    """Return this rank's responses without padding; data-parallel rank ``i`` has ``shares[i]`` of the rows."""
    worker = policy(parallel, None, "experts", max_rows=max_rows)
    rank = worker.context.pg.dp.rank()
    first = sum(shares[:rank])
    rows = prompts(sum(shares), GREEDY | {"eos_token_id": stops})[first : first + shares[rank]]
    made = worker.generate_sequences(rows).batch
    return [ids[mask == 1].tolist() for ids, mask in zip(made["responses"], made["response_mask"], strict=True)]


@functools.cache
def greedy_alone(rows: int, stops: tuple[int, ...]) -> list[list[int]]:
    return run_ranks(greedy_of, 1, {}, [rows], list(stops), 0)[0]


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("parallel", "shares", "max_rows"),
    [
        ({"ep": 2}, [2, 4, 3, 1], 0),
        ({"ep": 4}, [2, 4, 3, 1], 2),
        ({"tp": 2, "ep": 4, "etp": 1, "sequence_parallel": True}, [2, 8], 0),
    ],
    ids=["ep2", "ep4-in-passes", "over-tp-and-dp"],
)
def test_ranks_with_shared_experts_may_end_generation_at_different_steps(
    parallel: Axes, shares: list[int], max_rows: int
) -> None:
    stops = tuple(response[0] for response in greedy_alone(10, (EOS,))[: shares[0]])
    expected = greedy_alone(10, stops)
    longest = [
        max(map(len, expected[end - share : end])) for share, end in zip(shares, accumulate(shares), strict=True)
    ]
    assert longest[0] == 1 and longest[1] > 2  # the rows of the first rank end while others continue
    found = run_ranks(greedy_of, 4, parallel, shares, list(stops), max_rows)
    copies = 4 // len(shares)  # tensor-parallel ranks have the same rows
    assert [response for rank in found[::copies] for response in rank] == expected
    assert found[::copies] == found[copies - 1 :: copies]


def padding_only_on_one_rank() -> str:
    worker = policy({}, {"tp": 2})
    batch = prompts(4, GREEDY)
    batch.batch["attention_mask"][3] = 0
    with pytest.raises(DataError) as caught:
        worker.generate_sequences(own_shard(batch, worker))
    return str(caught.value)


@pytest.mark.simulated
def test_invalid_prompt_of_one_rank_raises_on_all() -> None:
    for message in run_ranks(padding_only_on_one_rank, 4):
        assert "generate_sequences: row 0, of 0 tokens, is padding only" in message


def offloaded_and_reloaded(path: str) -> dict[str, Any]:
    """Offload and reload parts, and compare greedy responses; save and load a checkpoint in between."""
    worker = policy({"tp": 2}, {})
    batch = own_shard(prompts(ROWS, GREEDY), worker)

    def responses() -> torch.Tensor:
        return worker.generate_sequences(batch).batch["responses"]

    away = worker.offloader.offloaded
    assert isinstance(away, Offload)
    first, copy = responses(), sum(parameter.nbytes for parameter in worker.rollout.rollout.chunks[0].parameters())
    freed = [worker.offload(["rollout"]), worker.offload(["rollout"])]
    second = responses()
    worker.offload(["params", "grads", "optimizer"])
    third, away_while_generating = responses(), away.parts
    worker.save_checkpoint(path)
    for _ in range(2):
        worker.update_actor(own_shard(experience(16), worker))
    worker.offload()
    worker.reload(["rollout"])
    updated = responses()
    worker.load_checkpoint(path)
    return {
        "same": [torch.equal(first, other) for other in (second, third, responses())],
        "updated": torch.equal(first, updated),
        "freed": freed,
        "copy": copy,
        "away": away_while_generating,
    }


@pytest.mark.simulated
def test_rollout_weights_are_offloaded_and_reloaded_and_in_no_checkpoint(tmp_path: Path) -> None:
    for rank in run_ranks(offloaded_and_reloaded, 4, str(tmp_path)):
        assert rank["same"] == [True, True, True] and not rank["updated"]
        tables = rank["freed"][0] - rank["copy"]  # of rotary positions
        assert 0 <= tables < 100 and rank["freed"][1] == 0
        assert rank["away"] == ("params", "grads", "optimizer")  # generation needs none of them
    manifest = json.loads((tmp_path / "global_step_0" / "manifest.json").read_text())
    assert manifest["parts"] == ["model"]


@pytest.mark.parametrize(
    ("rollout", "key", "text"),
    [
        ({"tp": 3}, "rollout.parallel.tp", "model.num_attention_heads is 4, which does not divide by rollout.parallel"),
        ({"pp": 3}, "rollout.parallel.pp", "take 6 layers or another rollout.parallel.pp"),
        ({"cp": 2}, "rollout.parallel.cp", "rollout.parallel.cp is 2: generation runs with cp=1"),
        ({"ep": 2}, "rollout.parallel.ep", "rollout.parallel.ep is 2, but the model has no experts"),
        ({"tpp": 2}, "rollout.parallel.tpp", "tpp"),
    ],
)
def test_rollout_layout_that_does_not_divide_the_model_is_rejected(rollout: Axes, key: str, text: str) -> None:
    config = {"model": MODEL, "rollout": {"prompt_length": PROMPT, "response_length": RESPONSE, "parallel": rollout}}
    with pytest.raises(ConfigError) as caught:
        load_config(ActorConfig, config)
    assert caught.value.fields["key"] == key
    assert text in str(caught.value)


def rejected_layout() -> tuple[str, str]:
    with pytest.raises(LayoutError) as caught:
        policy({}, TP2_PP2)
    return str(caught.value), caught.value.key


@pytest.mark.simulated
def test_rollout_layout_that_does_not_divide_the_ranks_is_rejected() -> None:
    for message, key in run_ranks(rejected_layout, 2):
        assert message.startswith("rollout.parallel: ") and "= 4 does not divide world_size 2" in message
        assert key == "rollout.parallel"
