"""Load Hugging Face checkpoints into a Megatron model on any layout, and write them again, tensor by tensor.

A rank reads its own slices of the files. On the way out it has at most one bucket of whole tensors in memory at a time.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from mcontroller.errors import DataError, before_changes
from parallel_state.agreement import all_gather_values, raise_on_every_rank
from parallel_state.megatron import MegatronContext
from workers.weights.hf.config import family_at, family_of, hf_config_of
from workers.weights.hf.export_files import WeightWriter, complete_export, exporting, on_first_rank
from workers.weights.hf.family import ModelFamily
from workers.weights.hf.files import WeightFiles
from workers.weights.hf.hub import local_directory
from workers.weights.hf.names import (
    OUTPUT_LAYER,
    bridge_of,
    copies_of,
    hf_shards,
    model_family,
    names_of,
    with_copies,
)
from workers.weights.hf.verify_load import verify_load
from workers.weights.same_tensors import check_same_tensors
from workers.weights.shards import WeightShard, named_shards
from workers.weights.whole_tensors import StreamedTensors, WholeTensors, tensors_in

logger = logging.getLogger(__name__)

# Tensors that old checkpoints contain and that follow from the configuration.
_DERIVED = ".rotary_emb.inv_freq"
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@torch.no_grad()
def load_hf(
    chunks: Sequence[torch.nn.Module], path: str | os.PathLike[str], context: MegatronContext
) -> frozenset[str]:
    """Fill model chunks from a directory of safetensors (a collective), and return the names of tensors left out.

    The files have the names of the family in ``config.json``, or, if that is not registered, the names that
    ``hf_tensors`` uses. Values are cast to the dtype of the parameters; rows that pad the vocabulary become 0. A value
    head is read from ``score.weight``. If the checkpoint has none, the head stays as it is, and its name is returned.

    Args:
        chunks: this rank's model chunks, wrapped or not.
        path: the directory, in a file system that every rank sees.
        context: the layout of the chunks.

    Raises:
        DataError: on every rank, before anything is copied: the model needs tensors that the checkpoint lacks, or the
            checkpoint has tensors that the model lacks, or shapes differ (fields ``missing``, ``unexpected`` and
            ``differing``); or files are missing or damaged.
    """
    if (bridge := bridge_of(chunks)) is not None:
        return raise_on_every_rank(lambda: bridge.load(chunks))
    with before_changes():
        family = raise_on_every_rank(lambda: family_at(path) or model_family(chunks))
        shards = raise_on_every_rank(lambda: hf_shards(chunks, context, family, complete=False))
        files = raise_on_every_rank(lambda: WeightFiles(Path(local_directory(path))))
        shapes = {name: shape for theirs in all_gather_values(_shapes(shards)) for name, shape in theirs.items()}
        head = (family or ModelFamily).value_head
        left = {head} if head in shapes and head not in files.names else set[str]()
        copies = copies_of(chunks, family)
        _check_names(shapes, left, files, family, {name for names in copies.values() for name in names}, str(path))
        raise_on_every_rank(lambda: _check_copies(copies, files, str(path)))
    for parameter in named_shards(chunks, context):
        parameter.padding().zero_()
    for shard in shards:
        if shard.part.name not in left:
            _read(shard, files)
    return frozenset({OUTPUT_LAYER} if left else ())


def hf_whole_tensors(
    chunks: Sequence[torch.nn.Module], context: MegatronContext, bucket_bytes: int = 64 << 20
) -> WholeTensors | StreamedTensors:
    """Return all tensors of the whole model under their Hugging Face names, to be read as often as they change.

    They have no padding of the vocabulary; tied output weights come once, as the embedding. The names are from the
    family ``chunk.model_family``, which ``build_model`` sets to ``ModelConfig.family``. If a chunk has none, they are
    from the first registered family that is built like it. If that has no counterpart of a tensor, reading them is a
    DataError on every rank.

    Args:
        chunks: this rank's model chunks, wrapped or not.
        context: the layout of the chunks.
        bucket_bytes: the size of a bucket on the device; a larger tensor has one for itself.
    """
    if (bridge := bridge_of(chunks)) is not None:
        return bridge.tensors(chunks, bucket_bytes)
    return WholeTensors(
        lambda: raise_on_every_rank(lambda: hf_shards(chunks, context, model_family(chunks))), bucket_bytes
    )


def hf_tensors(chunks: Sequence[torch.nn.Module], context: MegatronContext) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate once over all tensors of the whole model under their Hugging Face names, one bucket in memory at a time.

    Every rank gets the same tensors. Each step is a collective: all ranks must iterate until the end. Tensors are on
    the model's device. See ``hf_whole_tensors``.
    """
    yield from hf_whole_tensors(chunks, context)


def checkpoint_tensors(path: str | os.PathLike[str], bucket_bytes: int) -> StreamedTensors:
    """Return the tensors of a Hugging Face directory, for an engine in a group without a model.

    Args:
        path: the directory.
        bucket_bytes: the size of a bucket; a larger tensor has one for itself.

    Raises:
        DataError: files are missing or damaged.
    """
    files = WeightFiles(Path(local_directory(path)))
    names = sorted(name for name in files.names if not name.endswith(_DERIVED))
    return StreamedTensors(lambda: ((name, files.read(name)) for name in names), bucket_bytes)


@torch.no_grad()
def export_hf(
    chunks: Sequence[torch.nn.Module],
    context: MegatronContext,
    path: str | os.PathLike[str],
    model: Any,
    *,
    companions_from: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    max_file_bytes: int = 4_000_000_000,
) -> None:
    """Write the model as a Hugging Face directory, which becomes visible when it is complete (a collective).

    Its ``model_type`` is ``model.family``, from the checkpoint that the model was loaded from; without one, the first
    registered family that is built like the model.

    The first rank that has a part of a tensor puts it together and writes it: one rank of each pipeline stage, and of
    each ep rank for its experts, all at the same time. Each keeps up to ``max_file_bytes`` in host memory.

    Args:
        chunks: this rank's model chunks, wrapped or not.
        context: the layout of the chunks.
        path: a directory that does not exist yet, or is empty, in a file system that all ranks share.
        model: the ``ModelConfig`` of the model, which becomes ``config.json``.
        companions_from: a Hugging Face directory whose files beside the weights are copied: tokenizer, code.
        tokenizer: a directory with the files of another tokenizer, which are copied instead.
        max_file_bytes: the size at which a rank starts another file.

    Raises:
        DataError: ``path`` exists and is not empty, or cannot be written, or the family has no counterpart of a tensor;
            the group goes on, and nothing is left at ``path``. Or transformers computes something else from the files
            (``model.verify_load``), with the name of the layer.
        ConfigError: no family is built like ``model``.
    """
    target, rank = Path(path), dist.get_rank()
    with before_changes():
        if (bridge := bridge_of(chunks)) is not None:
            whole, value_head = hf_whole_tensors(chunks, context), bridge.value_head
        else:
            family = family_of(model)
            shards = raise_on_every_rank(lambda: with_copies(hf_shards(chunks, context, family), chunks, family))
            value_head = any(family.value_head in names for names in all_gather_values(_shapes(shards)))
            whole = WholeTensors(lambda: shards)
        config = hf_config_of(model, value_head=value_head)
    with exporting(target) as directory:
        writer = WeightWriter(directory, rank, max_file_bytes)
        for name, tensor in tensors_in(partial(whole.buckets, receivers="first"), torch.device("cpu")):
            writer.add(name, tensor)
        of_ranks = all_gather_values(raise_on_every_rank(writer.close))
        written = {file: tensors for files in of_ranks for file, tensors in files.items()}
        companions, other_tokenizer = (None if path is None else Path(path) for path in (companions_from, tokenizer))
        on_first_rank(lambda: complete_export(directory, config, written, companions, other_tokenizer))
    if rank == 0:
        logger.info("%d tensors in %d files at %s", sum(map(len, written.values())), len(written), target)
    if model.verify_load != "off":
        with context.activate():
            verified = verify_load(unwrap_model(list(chunks)), dataclasses.replace(model, hf_path=str(target)), context)
        if rank == 0:
            logger.info("%s", verified)
        dist.barrier()  # the caller may move or remove the files


def _shapes(shards: Sequence[WeightShard]) -> dict[str, tuple[int, ...]]:
    return {shard.part.name: shard.part.shape for shard in shards}


def _read(shard: WeightShard, files: WeightFiles) -> None:
    """Fill a part from the checkpoint: this rank's indices, which are consecutive there."""
    part = shard.part
    if part.dim is None:
        shard.param.copy_(files.read(part.name))
        return
    if part.spans:
        first = part.spans[0].start
        read = files.read(part.name, part.dim, first, part.spans[-1].stop)
        for start, stop, offset in part.spans:
            values = read.narrow(part.dim, start - first, stop - start)
            shard.param.narrow(part.dim, offset, stop - start).copy_(values)


def _check_names(
    shapes: Mapping[str, tuple[int, ...]],
    left: set[str],
    files: WeightFiles,
    family: ModelFamily | None,
    copies: set[str],
    path: str,
) -> None:
    """Raise, on all ranks, unless the checkpoint fits the model, which may lack the names ``left``."""
    # A model with tied embeddings or a value head does not need the output layer of a checkpoint.
    spare = {*names_of(family).get(OUTPUT_LAYER, ()), *copies}
    if family is not None and family.has_extra_layers:
        layers = max(int(number[1]) for name in {*shapes, *copies} if (number := _LAYER.search(name)))
        extra = {name for name in files.names if (number := _LAYER.search(name)) and int(number[1]) > layers}
        spare |= extra
        if extra and dist.get_rank() == 0:
            logger.warning("%s: left out %d tensors of layers that predict more tokens at once", path, len(extra))
    have = {
        name: files.shape(name) if name in shapes else ()
        for name in files.names
        if name in shapes or (name not in spare and not name.endswith(_DERIVED))
    }
    need = {name: shape for name, shape in shapes.items() if name not in left}
    check_same_tensors(have, need, f"the checkpoint at {path!r} does not fit the model")


def _check_copies(copies: Mapping[str, list[str]], files: WeightFiles, path: str) -> None:
    """Raise DataError unless rows of the copies that layers of multi-token prediction have are those of the weights."""
    for name, names in copies.items():
        for copy in files.names.intersection(names):
            row = files.first_different_row(name, copy)
            if row is not None:
                raise DataError(
                    f"{path}: row {row} of {copy} differs from {name}, of which it is a copy: leave out "
                    "model.transformer.mtp_num_layers",
                    tensor=copy,
                )
