"""Columns of the batches of a step, and functions that read or add them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from mcontroller.data.batch import DataProto
from mcontroller.errors import DataError
from workers.columns import ROUTED_EXPERTS

RESPONSE_COLUMNS = ("responses", "response_mask", "rollout_log_probs")
"""The columns of generated responses that the trainer reads. It fetches them together."""

LOG_PROBS = ("rollout_log_probs", "engine_log_probs")
"""The columns with a log-probability for each token; a rollout returns one of them."""

FAILED = "failed"
"""Column of the responses that could not be made, bool ``[rows]``: they have no tokens and no score."""

EPISODE_SCORES = "episode_scores"
"""Column of the scores that episodes returned, float32 ``[rows]``; NaN for a response without one."""

STAGE_COLUMNS = frozenset(
    {
        ROUTED_EXPERTS,
        "old_log_probs",
        "entropys",
        "ref_log_prob",
        "values",
        "rm_scores",
        "token_level_scores",
        "token_level_rewards",
        "advantages",
        "returns",
        "importance_weights",
    }
)
"""The columns that the stages of a step add to the responses."""

TOKENS = "sequence_tokens"
"""Column of the number of tokens of each row, prompt and response, int64 ``[rows]``."""

PROMPTS = "prompt_numbers"
"""Column of the number of each row's prompt in the run, int64 ``[rows]``."""
_WHOLE = ("input_ids", "attention_mask", "position_ids", ROUTED_EXPERTS)
"""Columns ``[rows, prompt + response, ...]`` of responses; ``prompts`` is ``[rows, prompt]``."""


def columns(batch: DataProto, *names: str) -> list[Tensor]:
    """Return the tensor columns of these names.

    Raises:
        DataError: a column is missing; ``columns`` names the missing ones.
    """
    present = batch.tensor_names
    missing = [name for name in names if name not in present]
    if missing:
        raise DataError(
            f"the batch lacks column(s) {', '.join(missing)}; it has {', '.join(present) or 'none'}",
            columns=missing,
        )
    tensors = batch.tensors(names)
    return [tensors[name] for name in names]


def response_lengths(response_mask: Tensor) -> Tensor:
    """Return the tokens of responses up to the last one of the policy, int64 ``[rows]``; 0 if there is none."""
    return (torch.arange(1, response_mask.shape[1] + 1) * (response_mask != 0)).amax(1)


def supervised_rows(responses: DataProto) -> DataProto:
    """Return responses as rows of ``update_sft``, which train on the tokens of the policy.

    Args:
        responses: ``input_ids``, ``attention_mask`` ``[rows, prompt + response]``, ``response_mask``
            ``[rows, response]``.

    Returns:
        ``input_ids``, ``attention_mask`` and ``loss_mask``, int64 ``[rows, prompt + response]``.

    Raises:
        DataError: a column is missing.
    """
    ids, attention, mask = columns(responses, "input_ids", "attention_mask", "response_mask")
    loss_mask = torch.zeros_like(attention)
    loss_mask[:, -mask.size(1) :] = mask
    return DataProto.from_dict({"input_ids": ids, "attention_mask": attention, "loss_mask": loss_mask})


def without(batch: DataProto, names: Collection[str]) -> DataProto:
    """Return a batch without the tensor columns of these names; those that it does not have are no error."""
    return batch.select([name for name in batch.tensor_names if name not in names])


def with_tokens(batch: DataProto, problems: DataProto) -> DataProto:
    """Return a batch with the columns ``TOKENS`` and ``PROMPTS``.

    Args:
        batch: responses; their ``attention_mask`` is read, and not kept in the result.
        problems: of the rows, in their order, with the non-tensor column ``uid`` of whole numbers.
    """
    (mask,) = columns(batch.slice(), "attention_mask")
    prompts = torch.tensor(problems.non_tensor_batch["uid"].tolist())
    return batch.union(DataProto.from_dict({TOKENS: mask.sum(1), PROMPTS: prompts}))


def tokens_of(batch: DataProto) -> int:
    """Return the number of tokens of a batch, after ``with_tokens``."""
    return int(columns(batch, TOKENS)[0].sum())


def of_equal_width(batches: Sequence[DataProto], pad_token_id: int) -> list[DataProto]:
    """Return batches of responses padded to one width of prompts and of responses, so that they can be joined.

    A rollout loop that writes prompts of its own, or responses as wide as the longest one, makes batches of several.

    Args:
        batches: with ``input_ids`` ``[rows, prompt + response]`` and ``responses`` ``[rows, response]``; their other
            columns may have these dims.
        pad_token_id: fills ids; other columns are filled with 0, or -1 for what no token has.
    """
    sizes = []
    for batch in batches:
        ids, responses = columns(batch, "input_ids", "responses")
        sizes.append((ids.shape[1] - responses.shape[1], responses.shape[1]))
    widest = max(prompt for prompt, _ in sizes), max(response for _, response in sizes)
    fill = {"input_ids": pad_token_id, "prompts": pad_token_id, "responses": pad_token_id}
    fill |= {ROUTED_EXPERTS: -1, "token_versions": -1}
    padded = []
    for batch, (prompt, response) in zip(batches, sizes, strict=True):
        before, after = widest[0] - prompt, widest[1] - response
        wider = {}
        for name, column in batch.tensors().items() if before or after else ():
            if name in _WHOLE or name == "prompts":
                sides = (before, after if name in _WHOLE else 0)
            elif column.ndim > 1 and column.shape[1] == response:
                sides = (0, after)
            else:
                continue
            wider[name] = pad(column, (*(0, 0) * (column.ndim - 2), *sides), value=fill.get(name, 0))
        padded.append(batch.with_tensors(wider) if wider else batch)
    return padded
