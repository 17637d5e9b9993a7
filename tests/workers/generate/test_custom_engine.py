"""A custom engine replaces Megatron: it receives weights as named tensors, and generates the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.workers.roles import GREEDY, actor, experience, own_shard, prompts
from workers import Generated, Prompts, Rollout, Sampling
from workers.actor import ActorRolloutRefWorker
from workers.weights.hf.config import hf_config_of

transformers = pytest.importorskip("transformers")

ROWS = 6
DENSE = {"num_query_groups": 4, "add_qkv_bias": True, "tie_embeddings": True}


class TransformersRollout(Rollout):
    """A greedy rollout, whatever is asked for, with a model of transformers in the worker's process."""

    holds_weights = True

    def __init__(self, worker: ActorRolloutRefWorker) -> None:
        config = hf_config_of(worker.config.model)
        self.model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config), dtype=torch.float32
        )
        self.model.eval().to(worker.device)
        self.slept = 0

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, float]:
        parameters = dict(self.model.named_parameters())
        count = len(parameters)
        for name, tensor in weights:
            parameters.pop(name).data.copy_(tensor)
        assert not parameters  # the stream has every tensor once
        return {"tensors": float(count)}

    def generate(self, prompts: Prompts, sampling: Sampling) -> Generated:
        samples = prompts.samples()
        done = self.model.generate(
            samples.ids,
            attention_mask=samples.attention_mask,
            do_sample=False,
            max_new_tokens=sampling.response_length,
            eos_token_id=list(sampling.eos_token_ids),
            pad_token_id=sampling.pad_token_id,
            output_logits=True,
            return_dict_in_generate=True,
        )
        width = samples.ids.size(1)
        short = width + sampling.response_length - done.sequences.size(1)
        responses = torch.nn.functional.pad(done.sequences[:, width:], (0, short), value=sampling.pad_token_id)
        stopped = torch.isin(responses, torch.tensor(sampling.eos_token_ids, device=responses.device)).long()
        mask = (stopped.cumsum(1) - stopped == 0).long()
        steps = torch.stack(done.logits, 1).log_softmax(-1).gather(-1, responses[:, : len(done.logits), None])
        log_probs = torch.nn.functional.pad(steps.squeeze(-1), (0, short)) * mask
        return Generated(responses, mask, log_probs)

    def sleep(self) -> int:
        self.slept += 1
        for parameter in self.model.parameters():
            parameter.data.zero_()
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def wake_up(self) -> None:
        self.slept -= 1


class CustomEngineWorker(ActorRolloutRefWorker):
    def build_rollout(self) -> Rollout:
        return TransformersRollout(self)


def generations(worker: ActorRolloutRefWorker) -> list[dict[str, Any] | None]:
    """Generate greedily from this rank's prompts: first, again, after an update, and after a sleep."""
    batch = own_shard(prompts(ROWS, GREEDY), worker)
    outputs = [worker.generate_sequences(batch), worker.generate_sequences(batch)]
    for _ in range(2):
        worker.update_actor(own_shard(experience(16), worker))
    outputs.append(worker.generate_sequences(batch))
    worker.offload()
    outputs.append(worker.generate_sequences(batch))
    return [output and dict(output.batch) | {"meta_info": output.meta_info} for output in outputs]


def with_megatron(parallel: dict[str, Any], model: dict[str, Any]) -> Any:
    return generations(actor(parallel, "actor_rollout", model=model))


def with_custom_engine(parallel: dict[str, Any], model: dict[str, Any]) -> Any:
    worker = actor(parallel, "actor_rollout", CustomEngineWorker, model=model)
    found = generations(worker)
    engine = worker.rollout
    pulled = {name: tensor.clone() for name, tensor in worker.rollout_weights()}
    ours = dict(engine.model.named_parameters())
    return {
        "generations": found,
        "pulled": all(torch.equal(ours[name], tensor) for name, tensor in pulled.items()) and len(pulled) == len(ours),
        "asleep": engine.slept,
        "parts": tuple(worker.offloader.parts()),
    }


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("ranks", "parallel", "model"),
    [(1, {}, DENSE), (4, {"tp": 2, "pp": 2}, DENSE)],
    ids=["one", "tp2-pp2"],
)
def test_custom_engine_generates_megatrons_tokens_before_and_after_an_update(
    ranks: int, parallel: dict[str, Any], model: dict[str, Any]
) -> None:
    expected = run_ranks(with_megatron, 1, {}, model)[0]
    for found in run_ranks(with_custom_engine, ranks, parallel, model):
        for ours, wanted in zip(found["generations"], expected, strict=True):
            for name in ("responses", "response_mask", "input_ids", "position_ids"):
                assert torch.equal(ours[name], wanted[name])
            assert (ours["rollout_log_probs"] - wanted["rollout_log_probs"]).abs().max() < 1e-4
        weights_updated = ["metrics" in ours["meta_info"] for ours in found["generations"]]
        assert weights_updated == [True, False, True, True]
        assert found["pulled"] and found["asleep"] == 0
        assert found["parts"] == ("params", "grads", "optimizer", "rollout")
    assert not torch.equal(expected[0]["responses"], expected[2]["responses"])
