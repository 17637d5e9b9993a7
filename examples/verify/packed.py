"""The GPT with rows of unequal lengths packed into one, as `python -m mcontroller verify` verifies it."""

import dataclasses
from functools import partial

import gpt
import torch
from megatron.core.packed_seq_params import PackedSeqParams

LENGTHS = (5, 8, 3)


def batch(index):
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {**gpt.whole_batch(index), "position_ids": positions, "bounds": bounds}


def forward_step(data_iterator, model):
    data = next(data_iterator)
    bounds, longest = data["bounds"], max(LENGTHS)
    rows = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
    output = model(data["tokens"], data["position_ids"], None, labels=data["labels"], packed_seq_params=rows)
    return output, partial(gpt.loss, data["loss_mask"])


program = dataclasses.replace(gpt.program, batch=batch, forward_step=forward_step)
