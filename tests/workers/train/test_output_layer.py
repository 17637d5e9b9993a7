"""The output layer runs over the targets that count, and over nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from mcontroller.data.batch import DataProto
from tests.ranks import run_ranks
from tests.workers.roles import VOCAB, actor, be_a_worker, largest_difference, weights
from workers.actor import ActorRolloutRefWorker

pytestmark = pytest.mark.simulated

PROMPT, RESPONSE, ROWS = 6, 24, 8


def samples() -> DataProto:
    """Return rows with 1 to 5 response tokens of 24 possible ones; one row has a response that does not count."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 6, (ROWS, 1), generator=generator)
    mask = (torch.arange(RESPONSE) < lengths).long()
    responses = torch.randint(2, VOCAB, (ROWS, RESPONSE), generator=generator) * mask
    prompts = torch.randint(2, VOCAB, (ROWS, PROMPT), generator=generator)
    return DataProto.from_dict(
        {
            "input_ids": torch.cat((prompts, responses), 1),
            "attention_mask": torch.cat((torch.ones_like(prompts), mask), 1),
            "responses": responses,
            "response_mask": mask * (torch.arange(ROWS)[:, None] != 3),
            "old_log_probs": -4.0 * mask,
            "advantages": torch.randn(mask.shape, generator=generator) * mask,
        }
    )


def settings(packed: bool) -> dict[str, Any]:
    lengths = {"prompt_length": PROMPT, "response_length": RESPONSE}
    return {"rollout": lengths, "packed": packed, "ppo_epochs": 1, "ppo_micro_batch_size": ROWS}


def through_the_output_layer(packed: bool, parallel: dict[str, Any]) -> list[int]:
    """Return the tokens through the output layer in scoring and in training, and the targets that count."""
    worker, batch = actor(parallel, "actor", **settings(packed)), samples()
    recorded: list[int] = []
    hook = worker.model[0].module.output_layer.register_forward_pre_hook
    hook(lambda module, args: recorded.append(args[0].shape[:-1].numel()))
    worker.compute_log_prob(batch)
    scored = sum(recorded)
    worker.update_actor(batch)
    return [scored, sum(recorded) - scored, int(batch.batch["response_mask"].sum())]


@pytest.mark.parametrize("packed", [False, True])
def test_output_layer_runs_over_the_targets_that_count(packed: bool) -> None:
    scored, trained, counted = run_ranks(through_the_output_layer, 1, packed, {})[0]
    assert scored == trained == counted < ROWS * RESPONSE / 6


def test_targets_are_divided_over_context_parallel_ranks() -> None:
    ranks = run_ranks(through_the_output_layer, 2, False, {"cp": 2})
    assert sum(rank[0] for rank in ranks) == ranks[0][2]


class Wrapped(nn.Module):
    """A model of another class, which computes the logits of all its tokens, of the whole vocabulary."""

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        self.inner, self.config, self.model_type = model, model.config, model.model_type

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner(*args, **kwargs, runtime_gather_output=True)

    def set_input_tensor(self, tensor: Tensor) -> None:
        self.inner.set_input_tensor(tensor)


class OfAnotherClass(ActorRolloutRefWorker):
    def build_model(self) -> list[nn.Module]:
        return [Wrapped(chunk) for chunk in super().build_model()]  # type: ignore[arg-type]


def scores_and_weights(worker_class: type[ActorRolloutRefWorker], parallel: dict[str, Any]) -> dict[str, Tensor]:
    be_a_worker()
    worker = actor(parallel, "actor", worker_class, **settings(False))
    scores = worker.compute_log_prob(samples()).batch
    worker.update_actor(samples())
    named = {name.removeprefix("inner."): weight for name, weight in weights(worker).items()}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        named[name] = named[name][:VOCAB]  # without the padding for tp
    return named | {"log_probs": scores["old_log_probs"], "entropys": scores["entropys"]}


@pytest.mark.parametrize("tp", [1, 2])
def test_model_of_another_class_computes_the_same_from_its_own_logits(tp: int) -> None:
    expected = run_ranks(scores_and_weights, 1, ActorRolloutRefWorker, {})[0]
    actual = run_ranks(scores_and_weights, tp, OfAnotherClass, {"tp": tp})[0]
    assert actual["log_probs"].abs().max() > 1
    assert largest_difference(expected, actual) < 1e-5
