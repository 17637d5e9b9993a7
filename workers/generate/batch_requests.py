"""A batch as requests to engines, one for each response."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from mcontroller.errors import DataError
from workers.config.sampling import OF_REQUESTS
from workers.generate.engine_protocol import Engine, Sampled, check_answer
from workers.generate.rollout_protocol import Generated, LogProbBasis, Prompts
from workers.generate.sampling import Sampling, later_seed


async def generate_by_requests(
    engines: Sequence[Engine], samples: Prompts, sampling: Sampling, vocab_size: int
) -> Generated:
    """Return the responses to prompts, in their order.

    Args:
        engines: by row, the engine that generates it, with log-probabilities.
        samples: the prompts, with one row for each response.
        sampling: how they are generated.
        vocab_size: of the policy.

    Raises:
        DataError: an engine does not answer as ``Sampled`` says, without log-probabilities, or has another model.
        EngineLost: an engine takes no more requests.
        RequestFailed: an engine rejects a request.
    """
    rows = zip(engines, samples.ids, samples.attention_mask.bool(), samples.seeds.flatten().tolist(), strict=True)
    answers = await asyncio.gather(
        *(
            _response(engine, array("q", ids[mask].tolist()), sampling, seed, vocab_size)
            for engine, ids, mask, seed in rows
        )
    )
    return _generated(answers, samples, sampling)


async def _response(engine: Engine, prompt: array[int], sampling: Sampling, seed: int, vocab_size: int) -> Sampled:
    """Return a whole response: what a partial answer leaves out is another request."""
    settings = {name: getattr(sampling, name) for name in OF_REQUESTS if name != "max_tokens"}
    settings["eos_token_id"] = list(sampling.eos_token_ids)
    tokens, log_probs, experts, known = array("q"), array("d"), list[Tensor](), 0
    while True:
        left = sampling.response_length - len(tokens)
        settings |= {"seed": later_seed(seed, len(tokens)), "response_length": left}
        answer = await engine.generate(prompt + tokens, {**settings})
        check_answer(answer, left, vocab_size)
        if answer.log_probs is None:
            raise DataError("an engine returned no log-probabilities, which a batch needs", field="log_probs")
        tokens += answer.tokens
        log_probs += answer.log_probs
        if answer.experts is not None:
            experts.append(answer.experts[known:])
            known = len(answer.experts)
        has_ended = len(answer.tokens) == left or (answer.tokens and tokens[-1] in sampling.eos_token_ids)
        if has_ended or not answer.is_partial:
            whole = torch.cat(experts) if experts else None
            return Sampled(tokens, log_probs, (), basis=answer.basis, experts=whole)


def _generated(answers: Sequence[Sampled], samples: Prompts, sampling: Sampling) -> Generated:
    shape = len(answers), sampling.response_length
    responses, mask = torch.full(shape, sampling.pad_token_id), torch.zeros(shape, dtype=torch.long)
    log_probs = torch.zeros(shape)
    for row, answer in enumerate(answers):
        length = len(answer.tokens)
        responses[row, :length], mask[row, :length] = torch.tensor(answer.tokens), 1
        log_probs[row, :length] = torch.tensor(answer.log_probs)
    basis = next((LogProbBasis(**answer.basis) for answer in answers if answer.basis), None)
    experts = [answer.experts for answer in answers if answer.experts is not None]
    column = None
    if experts:
        width = samples.ids.size(1)
        starts = width - samples.attention_mask.sum(1)
        column = experts_of_rows(experts, starts.tolist(), width + sampling.response_length)
    return Generated(responses, mask, log_probs, basis, column)


def experts_of_rows(experts: Sequence[Tensor], starts: Sequence[int], width: int) -> Tensor:
    """Return the column ``routed_experts`` of rows ``[rows, width, layers, topk]``; -1 for tokens that have none.

    Args:
        experts: by row, of consecutive tokens ``[tokens, layers, topk]``.
        starts: by row, the first of these tokens.
        width: [tokens] of a row.
    """
    column = experts[0].new_full((len(experts), width, *experts[0].shape[1:]), -1)
    for row, (start, part) in enumerate(zip(starts, experts, strict=True)):
        column[row, start : start + len(part)] = part
    return column
