"""A batch as requests to engines: the responses and their experts are in the rows of their prompts."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from mcontroller.errors import DataError
from workers import LogProbBasis, Prompts, RolloutConfig, Sampling
from workers.generate.batch_requests import generate_by_requests
from workers.generate.engine_protocol import Sampled
from workers.generate.sampling import later_seed

IDS = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]])
SAMPLES = Prompts(IDS, (IDS > 0).long(), torch.tensor([[17], [18]]))


class Echo:
    """An engine that repeats the first tokens of a prompt, and later requests' before those of earlier ones.

    With ``parts``, it stops after so many tokens.
    """

    name = "echo"

    def __init__(self, length: int, **facts: Any) -> None:
        self.length, self.facts, self.requests = length, facts, list[tuple[list[int], Mapping[str, Any]]]()

    async def generate(
        self, prompt: array[int], sampling: Mapping[str, Any], on_part: Callable[[Sampled], None] | None = None
    ) -> Sampled:
        self.requests.append((prompt.tolist(), sampling))
        await asyncio.sleep(0.02 / self.length)
        whole = prompt[: min(self.length, sampling["response_length"])]
        made, experts = whole[: self.facts.get("parts")], None
        if "experts" in self.facts:
            experts = torch.arange(len(prompt) + len(made) - 1, dtype=torch.int8).view(-1, 1, 1)
        log_probs = array("d", (-0.5 * token for token in made))
        facts: dict[str, Any] = {"basis": self.facts.get("basis"), "experts": experts}
        answer = Sampled(made, log_probs, [(0, len(made))], is_partial=len(made) < len(whole), **facts)
        return answer._replace(**self.facts.get("changes", {}))

    async def close(self) -> None: ...


def generated(first: Echo, second: Echo, **settings: Any) -> Any:
    config = RolloutConfig(prompt_length=4, response_length=3)
    sampling = Sampling.of(config, {"eos_token_id": [2, 9], "pad_token_id": 0, **settings})
    return asyncio.run(generate_by_requests([first, second], SAMPLES, sampling, vocab_size=10))


def test_responses_are_padded_on_the_right_in_the_order_of_their_prompts() -> None:
    one, three = Echo(1), Echo(3)
    batch = generated(one, three, temperature=0.5, top_k=7)
    assert batch.responses.tolist() == [[5, 0, 0], [1, 2, 3]]
    assert batch.mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch.log_probs.tolist() == [[-2.5, 0, 0], [-0.5, -1.0, -1.5]]
    assert batch.basis is None and batch.routed_experts is None
    [(prompt, settings)], [(other, _)] = one.requests, three.requests
    assert prompt == [5, 6] and other == [1, 2, 3, 4]
    chosen = {name: settings[name] for name in ("seed", "response_length", "temperature", "top_k", "eos_token_id")}
    assert chosen == {"seed": 17, "response_length": 3, "temperature": 0.5, "top_k": 7, "eos_token_id": [2, 9]}


def test_experts_are_at_their_tokens_and_log_probs_have_the_basis_of_the_engine() -> None:
    basis = LogProbBasis(0.5, filtered=True)
    batch = generated(Echo(1, experts=True, basis=basis._asdict()), Echo(3, experts=True, basis=basis._asdict()))
    assert batch.basis == basis
    assert batch.routed_experts.shape == (2, 7, 1, 1) and batch.routed_experts.dtype == torch.int8
    assert batch.routed_experts.view(2, 7).tolist() == [[-1, -1, 0, 1, -1, -1, -1], [0, 1, 2, 3, 4, 5, -1]]


def test_the_rest_of_a_response_that_an_engine_stopped_is_requested_again() -> None:
    stopped = Echo(3, experts=True, parts=1)
    batch = generated(Echo(1, experts=True), stopped)
    assert batch.responses.tolist() == [[5, 0, 0], [1, 1, 1]] and batch.mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch.routed_experts[1].flatten().tolist() == [0, 1, 2, 3, 4, 5, -1]
    prompts = [[1, 2, 3, 4, *[1] * count] for count in range(3)]
    sent = [(later_seed(18, count), 3 - count) for count in range(3)]
    assert [prompt for prompt, _ in stopped.requests] == prompts
    assert [(settings["seed"], settings["response_length"]) for _, settings in stopped.requests] == sent


@pytest.mark.parametrize(
    ("field", "value"), [("log_probs", None), ("tokens", array("q", [10])), ("tokens", array("q", [3, 3]))]
)
def test_an_answer_that_is_no_row_of_the_policy_is_an_error(field: str, value: Any) -> None:
    with pytest.raises(DataError) as caught:
        generated(Echo(1), Echo(1, changes={field: value}))
    assert caught.value.field == field
