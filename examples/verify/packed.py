"""The GPT on rows of unequal lengths, packed and padded, as `python -m mcontroller verify` verifies it."""

import dataclasses
from functools import partial

import gpt
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from workers.zigzag import zigzag_positions

LENGTHS = ((4, 8, 4), (12, 4), (8, 8), (16,))  # of the rows of a micro-batch; cp=2 halves them into two pieces each


def positions(index):
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    lengths = torch.tensor(LENGTHS[index % len(LENGTHS)])
    starts = lengths.cumsum(0) - lengths
    rows = zip(starts.tolist(), lengths.tolist(), strict=True)
    return torch.cat([start + zigzag_positions(length, size, rank) for start, length in rows])


def batch(index):
    lengths, own = LENGTHS[index % len(LENGTHS)], positions(index)
    whole = gpt.whole_batch(index) | {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    return {name: value.index_select(1, own) for name, value in whole.items()} | {"lengths": torch.tensor(lengths)}


def merge(batches):
    return {name: torch.cat([each[name] for each in batches], -1) for name in batches[0]}


def forward_step(data_iterator, model):
    data = next(data_iterator)
    longest, bounds = int(data["lengths"].max()), torch.nn.functional.pad(data["lengths"].cumsum(0), (1, 0)).int()
    rows = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
    output = model(data["tokens"], data["position_ids"], None, labels=data["labels"], packed_seq_params=rows)
    return output, partial(gpt.loss, data["loss_mask"])


program = dataclasses.replace(
    gpt.program, batch=batch, forward_step=forward_step, merge=merge, positions=positions
)  # fmt: skip


def padded_batch(index):
    own, rows = gpt.own_positions(), [gpt.whole_batch(2 * index + row) for row in range(2)]
    whole = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    lengths = torch.tensor([[gpt.LENGTH - 3 * (index % 4)], [4 + index % 4]])
    whole["loss_mask"] *= torch.arange(gpt.LENGTH) < lengths
    return {name: value.index_select(1, own) for name, value in whole.items()}


padded = dataclasses.replace(gpt.program, batch=padded_batch, micro_batch_size=2)
