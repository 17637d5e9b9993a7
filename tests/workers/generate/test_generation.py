"""Generation with the cache equals full passes, and samples do not depend on the layout or the order of the batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.utils import unwrap_model

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.registration import registration_of
from mcontroller.errors import ConfigError, DataError
from mcontroller.partition import split_rows
from tests import forking
from tests.ranks import run_ranks
from tests.training import device
from tests.workers.roles import EOS, GREEDY, PAD, PROMPT, RESPONSE, SAMPLED, VOCAB, actor, own_shard, prompts
from workers.generate import decoding, megatron_rollout
from workers.generate.rollout_protocol import Generated, Prompts
from workers.generate.sampling import Sampling
from workers.model.local_modules import TELayerNormColumnParallelLinear

ROWS = 12
LAYOUTS = {
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "dp2-pp2-vpp2": (4, {"pp": 2, "vpp": 2}),
    "tp2-sequence-parallel": (2, {"tp": 2, "sequence_parallel": True}),
}


def generated(parallel: dict[str, Any], meta_info: dict[str, Any], order: list[int]) -> dict[str, torch.Tensor] | None:
    """Generate and score; return the rows of the last stage with the position of each prompt in the batch."""
    worker = actor(parallel, "actor_rollout")
    batch = prompts(ROWS, meta_info)
    batch.batch["position"] = torch.arange(ROWS)
    mine = own_shard(batch.select_idxs(order), worker)
    broadcast = [worker.generate_sequences(mine)]
    stages = worker.context.pg.pp
    dist.broadcast_object_list(broadcast, src=dist.get_process_group_ranks(stages)[-1], group=stages)
    output = broadcast[0]
    scores = worker.compute_log_prob(output)
    if scores is None:
        return None
    position = mine.batch["position"].repeat_interleave(meta_info.get("n", 1))
    return {"position": position} | dict(output.batch) | dict(scores.batch)


@functools.cache
def of_all_ranks(
    layout: str | None, greedy: bool = True, n: int = 1, backwards: bool = False
) -> dict[str, torch.Tensor]:
    """Return the rows of all ranks of a layout, in the order of the batch."""
    world_size, parallel = (1, {}) if layout is None else LAYOUTS[layout]
    order = list(range(ROWS))[:: -1 if backwards else 1]
    meta_info = (GREEDY if greedy else SAMPLED) | {"n": n}
    parts = [part for part in run_ranks(generated, world_size, parallel, meta_info, order) if part]
    by_shard = {tuple(part["position"].tolist()): part for part in parts}.values()  # tp ranks have the same rows
    joined = {name: torch.cat([part[name] for part in by_shard]) for name in parts[0]}
    order_back = joined["position"].argsort(stable=True)
    return {name: column[order_back] for name, column in joined.items()}


def drawn_apart(parallel: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, list[Any]]:
    """The responses of a rank, whose draws are wrong unless it is tp rank 0 of the last stage; what chunks keep."""
    worker = actor(parallel, "actor_rollout")
    pg = worker.context.pg
    right = pg.tp.rank() == 0 and pg.pp.rank() == pg.pp.size() - 1
    draw = decoding.draw_tokens

    def wrong_elsewhere(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        token, log_prob = draw(*args)
        return token if right else (token + 1) % VOCAB, log_prob

    monkeypatch.setattr(decoding, "draw_tokens", wrong_elsewhere)
    rollout = worker.rollout
    samples = prompts(ROWS, GREEDY).batch
    with worker.context.activate():
        asked = Prompts(samples["input_ids"], samples["attention_mask"], torch.zeros(ROWS, 1, dtype=torch.long))
        made: list[Generated] = []
        generate = decoding.generate
        monkeypatch.setattr(megatron_rollout, "generate", lambda *args: made.append(generate(*args)) or made[-1])
        rollout.generate(asked, Sampling.of(worker.config.rollout, GREEDY))
        responses = made[0].responses
    return responses.cpu(), [chunk.decoder.input_tensor for chunk in unwrap_model(worker.model)]


@pytest.mark.processes
@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "pp-dp-tp"])
def test_all_ranks_of_a_replica_continue_with_the_tokens_of_one(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = {"tp": 2, "pp": 2, "order": order}
    found = forking.run_ranks(drawn_apart, 4, parallel, monkeypatch)  # each rank replaces a function
    expected = of_all_ranks(None)["responses"]
    for responses, inputs in found:
        assert torch.equal(responses, expected)
        assert inputs == [None]  # the hidden states of the previous stage are released


def argmax_without_cache() -> torch.Tensor:
    """Return greedy responses from full passes of unpadded sequences, one row and one token at a time."""
    worker = actor({}, "rollout")
    model = worker.model[0].eval()
    responses = torch.full((ROWS, RESPONSE), PAD)
    with worker.context.activate(), torch.no_grad():
        for row, prompt in enumerate(prompts(ROWS, {}).batch):
            sequence = prompt["input_ids"][prompt["attention_mask"] == 1].to(device())
            for step in range(RESPONSE):
                positions = torch.arange(len(sequence), device=device())
                chosen = model(sequence[None], positions[None], None)[0, -1:, :VOCAB].argmax(-1)
                responses[row, step] = int(chosen)
                sequence = torch.cat((sequence, chosen))
                if responses[row, step] == EOS:
                    break
    return responses


@functools.cache
def greedy_reference() -> torch.Tensor:
    return run_ranks(argmax_without_cache, 1)[0]


@pytest.mark.simulated
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_greedy_tokens_are_the_argmax_of_full_passes(layout: str | None) -> None:
    assert torch.equal(of_all_ranks(layout)["responses"], greedy_reference())


@pytest.mark.simulated
@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_equal_those_of_one_process(layout: str) -> None:
    expected, found = of_all_ranks(None, greedy=False, n=2), of_all_ranks(layout, greedy=False, n=2)
    assert torch.equal(found["responses"], expected["responses"])


@pytest.mark.simulated
def test_samples_do_not_depend_on_the_order_of_the_batch() -> None:
    assert torch.equal(
        of_all_ranks(None, greedy=False, backwards=True)["responses"], of_all_ranks(None, greedy=False)["responses"]
    )


@pytest.mark.simulated
def test_samples_of_one_prompt_differ_and_repeat_the_prompt_next_to_each_other() -> None:
    samples = of_all_ranks(None, greedy=False, n=2)
    assert torch.equal(samples["prompts"][0::2], samples["prompts"][1::2])
    assert (samples["responses"][0::2] != samples["responses"][1::2]).any(1).float().mean() > 0.9


@pytest.mark.simulated
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_log_probs_of_samples_equal_those_of_scoring(layout: str | None) -> None:
    samples = of_all_ranks(layout, greedy=False, n=2)
    assert samples["rollout_log_probs"].abs().max() > 1
    torch.testing.assert_close(samples["rollout_log_probs"], samples["old_log_probs"], atol=1e-4, rtol=0)


class MixedOutput(RowParallelLinear):
    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(input_)
        return output + 0.3 * output.roll(1, -1), bias


class RoundedWeight(RowParallelLinear):
    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **others: Any) -> torch.Tensor:
        return super()._forward_impl(input=input, weight=(weight * 4).round() / 4, **others)


class ScaledWeight(TELayerNormColumnParallelLinear):
    """Its weight is a new tensor in every call, and different in every layer."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super().forward(hidden, self.weight * (1 + 0.1 * self.layer_number))


def with_custom_linears() -> list[torch.Tensor]:
    worker = actor({}, "actor_rollout")
    for layer in worker.model[0].module.decoder.layers:
        layer.self_attention.linear_proj.__class__ = MixedOutput
        layer.mlp.linear_fc2.__class__ = RoundedWeight
        for linear in (layer.self_attention.linear_qkv, layer.mlp.linear_fc1):
            linear.__class__, linear.layer_number = ScaledWeight, layer.layer_number
    samples = worker.generate_sequences(prompts(ROWS, SAMPLED))
    return [samples.batch["rollout_log_probs"], worker.compute_log_prob(samples).batch["old_log_probs"]]


@pytest.mark.simulated
def test_custom_linears_generate_with_the_log_probs_that_they_score() -> None:
    sampled, scored = run_ranks(with_custom_linears, 1)[0]
    torch.testing.assert_close(sampled, scored, atol=1e-5, rtol=0)


@pytest.mark.simulated
def test_responses_end_at_the_stop_token_and_are_padded_after_it() -> None:
    samples = of_all_ranks(None, greedy=False, n=2)
    assert 0 < (samples["response_mask"].sum(1) < RESPONSE).sum() < 2 * ROWS
    for response, mask in zip(samples["responses"], samples["response_mask"], strict=True):
        stops = (response == EOS).nonzero().flatten().tolist()
        length = stops[0] + 1 if stops else RESPONSE
        assert mask.tolist() == [1] * length + [0] * (RESPONSE - length)
        assert (response[length:] == PAD).all()
    assert torch.equal(samples["input_ids"], torch.cat((samples["prompts"], samples["responses"]), 1))
    assert torch.equal(samples["attention_mask"][:, PROMPT:], samples["response_mask"])
    assert torch.equal(samples["position_ids"], (samples["attention_mask"].cumsum(1) - 1).clamp(min=0))


def generated_from_few(parallel: dict[str, Any], rows: int) -> DataProto | None:
    """Generate from fewer prompts than ranks, divided as dispatch does."""
    worker = actor(parallel, "rollout")
    registration = registration_of(type(worker), "generate_sequences")
    assert registration is not None
    group = worker.context.pg.dp
    partition = split_rows(rows, group.size(), padding=registration.rows.padding)
    return worker.generate_sequences(prompts(rows, SAMPLED | {"n": 2})[list(partition.shards[group.rank()])])


@pytest.mark.simulated
@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_prompts_than_ranks_are_sampled_as_in_one_process(rows: int) -> None:
    alone = run_ranks(generated_from_few, 1, {}, rows)[0]
    parts = [part for part in run_ranks(generated_from_few, 8, {"pp": 2}, rows) if part is not None]
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


@pytest.mark.simulated
def test_generation_ends_when_every_row_has_stopped() -> None:
    assert run_ranks(stops_early, 1)[0] == [1, ROWS]


def rejections() -> list[str]:
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


@pytest.mark.simulated
def test_invalid_prompts_and_settings_are_rejected_with_their_name() -> None:
    right_padded, too_long, no_mask, no_stop, cold, half, outside, text, empty, nothing = run_ranks(rejections, 1)[0]
    assert "row 0 is padded on the right" in right_padded
    assert f"row 0, of {PROMPT + 1} tokens, is longer than {PROMPT}" in too_long
    assert "'attention_mask'" in no_mask
    assert "eos_token_id" in no_stop
    assert "do_sample" in cold
    assert "meta_info['n'] is 1.5; expected int" in half
    assert f"pad_token_id is {VOCAB}, expected a token id of the vocabulary, 0 to {VOCAB - 1}" in outside
    assert "meta_info['eos_token_id'] is '</s>'; expected int" in text
    assert "input_ids is [2, 0], expected at least one token in every row" in empty
    assert "a batch of 0 rows" in nothing
