"""Megatron's schedules (no pipelining, 1F1B, interleaved) over micro-batches of any kind, and what surrounds a pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model
from torch import nn


def run_schedule(
    chunks: Sequence[nn.Module],
    step: Callable[[Iterator[Any], Any], tuple[Any, Callable[..., Any]]],
    micro_batches: Sequence[Any],
    shapes: Sequence[tuple[int, int]],
    pg: ProcessGroupCollection,
    *,
    forward_only: bool,
) -> list[Any]:
    """Run micro-batches through the chunks, and return what the last stage reports of each; an empty list elsewhere.

    Args:
        chunks: this rank's model chunks.
        step: Megatron's ``forward_step_func``: takes a micro-batch from an iterator, and runs it through a chunk.
        micro_batches: as many on every data-parallel rank; with several chunks, a multiple of the stages.
        shapes: number and length of the sequences of each, over all ranks of the cp axis.
        pg: the groups of the layout.
        forward_only: whether there is no backward pass; what ``step`` returns beside the output makes the reports then.
    """
    interleaved, config = len(chunks) > 1, get_model_config(chunks[0])
    # If shapes differ, stages send each other the shape of every tensor first. Packed ones differ most of the time:
    # padding them to one length would cost what packing saves.
    config.variable_seq_lengths = len(set(shapes)) > 1
    iterators = [iter(micro_batches) for _ in chunks]
    reports: list[Any] = get_forward_backward_func(pp_size=pg.pp.size(), vp_size=len(chunks) if interleaved else None)(
        forward_step_func=step,
        p2p_communicator=P2PCommunicator(pg.pp, config),
        pg_collection=pg,
        data_iterator=iterators if interleaved else iterators[0],
        model=list(chunks) if interleaved else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=shapes[0][1],
        micro_batch_size=shapes[0][0],
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return reports


@contextlib.contextmanager
def scoring(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager that turns off dropout and gradients of the chunks."""
    training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk, mode in zip(chunks, training, strict=True):
            chunk.train(mode)


@contextlib.contextmanager
def releasing_inputs(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager that releases the hidden states of the previous stage, which Megatron keeps in each chunk."""
    try:
        yield
    finally:
        for chunk in chunks:
            unwrap_model(chunk).set_input_tensor(None)
