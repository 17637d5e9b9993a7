"""Generation: the cache computes what a full pass computes, and a sample does not depend on where it is drawn."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import RowParallelLinear

from mcontroller.data.protocol import DataProto
from mcontroller.dispatch.registration import registration_of
from mcontroller.errors import ConfigError, DataError
from mcontroller.partition import split_rows
from tests.forking import run_ranks
from tests.workers.roles import EOS, GREEDY, PAD, PROMPT, RESPONSE, SAMPLED, VOCAB, actor, own_shard, prompts
from workers.generate import linears as generation_linears
from workers.model.local_modules import TELayerNormColumnParallelLinear

ROWS = 12
LAYOUTS = {
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "dp2-pp2-vpp2": (4, {"pp": 2, "vpp": 2}),
    "tp2-sequence-parallel": (2, {"tp": 2, "sequence_parallel": True}),
}


def generated(parallel: dict[str, Any], meta_info: dict[str, Any], order: list[int]) -> dict[str, torch.Tensor] | None:
    """What this rank's last stage generates, each row beside the place of its prompt in the batch."""
    worker = actor(parallel, "actor_rollout")
    batch = prompts(ROWS, meta_info)
    batch.batch["place"] = torch.arange(ROWS)
    mine = own_shard(batch.select_idxs(order), worker)
    handed_on = [worker.generate_sequences(mine)]
    stages = worker.context.pg.pp
    dist.broadcast_object_list(handed_on, src=dist.get_process_group_ranks(stages)[-1], group=stages)
    output = handed_on[0]
    scores = worker.compute_log_prob(output)
    if scores is None:
        return None
    place = mine.batch["place"].repeat_interleave(meta_info.get("n", 1))
    return {"place": place} | dict(output.batch) | dict(scores.batch)


@functools.cache
def everywhere(layout: str | None, greedy: bool = True, n: int = 1, backwards: bool = False) -> dict[str, torch.Tensor]:
    """The rows of all ranks of a layout, in the order of the batch."""
    world_size, parallel = (1, {}) if layout is None else LAYOUTS[layout]
    order = list(range(ROWS))[:: -1 if backwards else 1]
    meta_info = (GREEDY if greedy else SAMPLED) | {"n": n}
    parts = [part for part in run_ranks(generated, world_size, parallel, meta_info, order) if part]
    by_shard = {tuple(part["place"].tolist()): part for part in parts}.values()  # tp ranks hold the same rows
    joined = {name: torch.cat([part[name] for part in by_shard]) for name in parts[0]}
    order_back = joined["place"].argsort(stable=True)
    return {name: column[order_back] for name, column in joined.items()}


def argmax_without_cache() -> torch.Tensor:
    """Greedy responses, one row and one token at a time, from whole unpadded sequences."""
    worker = actor({}, "rollout")
    model = worker.model[0].eval()
    responses = torch.full((ROWS, RESPONSE), PAD)
    with worker.context.activate(), torch.no_grad():
        for row, prompt in enumerate(prompts(ROWS, {}).batch):
            sequence = prompt["input_ids"][prompt["attention_mask"] == 1]
            for step in range(RESPONSE):
                logits = model(sequence[None], torch.arange(len(sequence))[None], None)[0, -1, :VOCAB]
                responses[row, step] = logits.argmax()
                sequence = torch.cat((sequence, responses[row, step : step + 1]))
                if responses[row, step] == EOS:
                    break
    return responses


@functools.cache
def greedy_reference() -> torch.Tensor:
    return run_ranks(argmax_without_cache, 1)[0]


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_greedy_tokens_are_the_argmax_of_full_passes(layout: str | None) -> None:
    assert torch.equal(everywhere(layout)["responses"], greedy_reference())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_those_of_one_process(layout: str) -> None:
    expected, found = everywhere(None, greedy=False, n=2), everywhere(layout, greedy=False, n=2)
    assert torch.equal(found["responses"], expected["responses"])


def test_samples_do_not_depend_on_the_order_of_the_batch() -> None:
    assert torch.equal(
        everywhere(None, greedy=False, backwards=True)["responses"], everywhere(None, greedy=False)["responses"]
    )


def test_samples_of_one_prompt_differ_and_repeat_the_prompt_next_to_each_other() -> None:
    samples = everywhere(None, greedy=False, n=2)
    assert torch.equal(samples["prompts"][0::2], samples["prompts"][1::2])
    assert (samples["responses"][0::2] != samples["responses"][1::2]).any(1).float().mean() > 0.9


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_log_probs_of_samples_are_those_that_scoring_computes(layout: str | None) -> None:
    samples = everywhere(layout, greedy=False, n=2)
    assert samples["rollout_log_probs"].abs().max() > 1
    torch.testing.assert_close(samples["rollout_log_probs"], samples["old_log_probs"], atol=1e-4, rtol=0)


def with_weights_laid_out(parallel: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Generated and scored before and after the weights changed, every weight in oneDNN's order while generating."""
    laid_out = []
    reorder = torch.ops.mkldnn._reorder_linear_weight
    worker = actor(parallel, "actor_rollout")
    worker.generate_sequences(prompts(ROWS, GREEDY))
    monkeypatch.setattr(generation_linears, "WORTH_LAYING_OUT", 1)
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", lambda weight: laid_out.append(weight) or reorder(weight)
    )
    rounds = []
    for factor in (1.0, 1.1):
        for parameter in worker.model[0].parameters():
            parameter.data *= factor
        laid_out.clear()
        generated = worker.generate_sequences(prompts(ROWS, GREEDY))
        scored = worker.compute_log_prob(generated)
        rounds.append({"count": len(laid_out)} | dict(generated.batch) | dict(scored.batch))
    return rounds


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_laid_out_for_the_processor_generate_the_same(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = run_ranks(with_weights_laid_out, world_size, {"tp": world_size}, monkeypatch)[-1]
    assert before["count"] == after["count"] == 4 * 4 + 1  # of every layer qkv, projection, fc1, fc2; and the output
    assert torch.equal(before["responses"], greedy_reference())
    for samples in (before, after):
        torch.testing.assert_close(samples["rollout_log_probs"], samples["old_log_probs"], atol=1e-5, rtol=0)
    assert (before["rollout_log_probs"] - after["rollout_log_probs"]).abs().max() > 1e-2


class Adapted(RowParallelLinear):
    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(input_)
        return output + 0.3 * output.roll(1, -1), bias


class Rounded(RowParallelLinear):
    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **others: Any) -> torch.Tensor:
        return super()._forward_impl(input=input, weight=(weight * 4).round() / 4, **others)


class Scaled(TELayerNormColumnParallelLinear):
    """Its weight is another tensor in every call, of its own in every layer."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super().forward(hidden, self.weight * (1 + 0.1 * self.layer_number))


def with_own_linears(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    monkeypatch.setattr(generation_linears, "WORTH_LAYING_OUT", 1)
    worker = actor({}, "actor_rollout")
    for layer in worker.model[0].module.decoder.layers:
        layer.self_attention.linear_proj.__class__ = Adapted
        layer.mlp.linear_fc2.__class__ = Rounded
        for linear in (layer.self_attention.linear_qkv, layer.mlp.linear_fc1):
            linear.__class__, linear.layer_number = Scaled, layer.layer_number
    samples = worker.generate_sequences(prompts(ROWS, SAMPLED))
    return [samples.batch["rollout_log_probs"], worker.compute_log_prob(samples).batch["old_log_probs"]]


def test_linears_of_the_users_own_generate_what_they_score(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, scored = run_ranks(with_own_linears, 1, monkeypatch)[0]
    torch.testing.assert_close(sampled, scored, atol=1e-5, rtol=0)


def test_responses_end_at_the_stop_token_and_are_padded_after_it() -> None:
    samples = everywhere(None, greedy=False, n=2)
    assert 0 < (samples["response_mask"].sum(1) < RESPONSE).sum() < 2 * ROWS
    for response, mask in zip(samples["responses"], samples["response_mask"], strict=True):
        stops = (response == EOS).nonzero().flatten().tolist()
        length = stops[0] + 1 if stops else RESPONSE
        assert mask.tolist() == [1] * length + [0] * (RESPONSE - length)
        assert (response[length:] == PAD).all()
    assert torch.equal(samples["input_ids"], torch.cat((samples["prompts"], samples["responses"]), 1))
    assert torch.equal(samples["attention_mask"][:, PROMPT:], samples["response_mask"])
    assert torch.equal(samples["position_ids"], (samples["attention_mask"].cumsum(1) - 1).clamp(min=0))


def few(parallel: dict[str, Any], rows: int) -> DataProto | None:
    """Of fewer prompts than ranks, this rank's part as dispatch gives it."""
    worker = actor(parallel, "rollout")
    registration = registration_of(type(worker), "generate_sequences")
    assert registration is not None
    group = worker.context.pg.dp
    partition = split_rows(rows, group.size(), padding=registration.rows.padding)
    return worker.generate_sequences(prompts(rows, SAMPLED | {"n": 2})[partition.rows(group.rank())])


@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_prompts_than_ranks_are_sampled_as_in_one_process(rows: int) -> None:
    alone = run_ranks(few, 1, {}, rows)[0]
    parts = [part for part in run_ranks(few, 8, {"pp": 2}, rows) if part is not None]
    joined = DataProto.concat(parts)
    assert len(parts) == 4 and len(joined) == 2 * rows
    for name, column in alone.batch.items():
        if name != "rollout_log_probs":
            assert torch.equal(joined.batch[name], column), name


def stops_early() -> list[int]:
    worker = actor({}, "rollout")
    first = worker.generate_sequences(prompts(ROWS, GREEDY)).batch["responses"][:, 0]
    calls = []
    worker.model[0].register_forward_hook(lambda *_: calls.append(1))
    out = worker.generate_sequences(prompts(ROWS, GREEDY | {"eos_token_id": first.unique().tolist()}))
    return [len(calls), int(out.batch["response_mask"].sum())]


def test_generation_ends_when_every_row_has_stopped() -> None:
    assert run_ranks(stops_early, 1)[0] == [1, ROWS]


def refusals() -> list[str]:
    worker = actor({}, "rollout")
    good = prompts(2, SAMPLED)
    right_padded = DataProto.from_dict(
        {"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 0]])},
        meta_info=SAMPLED,
    )
    too_long = DataProto.from_dict(
        dict.fromkeys(("input_ids", "attention_mask"), torch.ones(1, PROMPT + 1).long()), meta_info=SAMPLED
    )
    messages = []
    for batch, error in (
        (right_padded, DataError),
        (too_long, DataError),
        (good.select(["input_ids"]), DataError),
        (good.select(meta_info_keys=["pad_token_id"]), DataError),
        (DataProto(good.batch, {}, SAMPLED | {"temperature": 0.0}), ConfigError),
        (DataProto(good.batch, {}, SAMPLED | {"n": 1.5}), ConfigError),
        (DataProto(good.batch, {}, SAMPLED | {"pad_token_id": VOCAB}), DataError),
        (DataProto(good.batch, {}, SAMPLED | {"eos_token_id": ["</s>"]}), ConfigError),
        (DataProto.from_dict({name: column[:, :0] for name, column in good.batch.items()}, {}, SAMPLED), DataError),
        (good[:0], DataError),
    ):
        with pytest.raises(error) as caught:
            worker.generate_sequences(batch)
        messages.append(str(caught.value))
    return messages


def test_prompts_that_cannot_be_generated_from_are_refused_by_name() -> None:
    right_padded, too_long, no_mask, no_stop, cold, half, outside, text, empty, nothing = run_ranks(refusals, 1)[0]
    assert "row 0 is padded on the right" in right_padded
    assert f"row 0, of {PROMPT + 1} tokens, is longer than {PROMPT}" in too_long
    assert "'attention_mask'" in no_mask
    assert "eos_token_id" in no_stop
    assert "do_sample" in cold
    assert "meta_info['n'] is 1.5; expected int" in half
    assert f"pad_token_id is {VOCAB}, the vocabulary has {VOCAB}" in outside
    assert "meta_info['eos_token_id'] is '</s>'; expected int" in text
    assert "input_ids is [2, 0]: rows without a token" in empty
    assert "a batch of 0 rows" in nothing
