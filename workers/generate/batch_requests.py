"""A batch as requests to engines, one for each response."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.config.sampling import OF_REQUESTS
from workers.generate.engine_protocol import Engine, Sampled
from workers.generate.rollout_protocol import Generated, LogProbBasis, Prompts
from workers.generate.sampling import Sampling


async def generate_by_requests(engines: Sequence[Engine], samples: Prompts, sampling: Sampling) -> Generated:
    """Return the responses to prompts, in their order.

    Args:
        engines: by row, the engine that generates it, with log-probabilities.
        samples: the prompts, with one row for each response.
        sampling: how they are generated.

    Raises:
        EngineLost: an engine takes no more requests.
        RequestFailed: an engine rejects a request.
    """
    settings = {name: getattr(sampling, name) for name in OF_REQUESTS if name != "max_tokens"}
    settings["eos_token_id"] = list(sampling.eos_token_ids)
    rows = zip(engines, samples.ids, samples.attention_mask.bool(), samples.seeds.flatten().tolist(), strict=True)
    answers = await asyncio.gather(
        *(
            engine.generate(array("q", ids[mask].tolist()), {**settings, "seed": seed})
            for engine, ids, mask, seed in rows
        )
    )
    return _generated(answers, samples, sampling)


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
