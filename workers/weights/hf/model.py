"""Load Hugging Face checkpoints into a Megatron model on any layout, and write them again, tensor by tensor.

A rank reads its own slices of the files. On the way out it has at most one bucket of whole tensors in memory at a time.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config, unwrap_model

from mcontroller.errors import DataError, before_changes
from parallel_state.agreement import all_gather_values, raise_on_every_rank
from parallel_state.megatron import MegatronContext
from workers.weights.fingerprints import TensorPart
from workers.weights.hf.config import ModelDescription, family_at, family_of, hf_config_of
from workers.weights.hf.family import MODEL_FAMILIES, ModelFamily, matching_family
from workers.weights.hf.files import WeightFiles, WeightWriter, finish_export, start_export
from workers.weights.hf.names import Counterpart, counterpart, names_of
from workers.weights.refit_plan import spans_of
from workers.weights.shards import WeightShard, named_buffers, named_shards

__all__ = ["HfStream", "export_hf", "hf_parts", "hf_tensors", "load_hf"]

logger = logging.getLogger(__name__)

_OUTPUT_LAYER = "output_layer.weight"
# Tensors that old checkpoints contain and that follow from the configuration.
_DERIVED = ".rotary_emb.inv_freq"


@torch.no_grad()
def load_hf(
    chunks: Sequence[torch.nn.Module], path: str | os.PathLike[str], context: MegatronContext
) -> frozenset[str]:
    """Fill model chunks from a directory of safetensors (a collective), and return the names of tensors left out.

    The names in the files are those of the family in ``config.json``. If that is not registered, they are those that
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
    with before_changes():
        family = raise_on_every_rank(lambda: family_at(path) or _family_of(chunks))
        shards = raise_on_every_rank(lambda: _mapped_shards(chunks, context, family))
        files = raise_on_every_rank(lambda: WeightFiles(Path(path)))
        left = _check_names(_plan(shards), files, family, str(path))
    for each in shards:
        if each.shard.name not in left:
            each.shard.param.copy_(each.read(files))
    return left


def hf_tensors(chunks: Sequence[torch.nn.Module], context: MegatronContext) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate once over all tensors of the whole model under their Hugging Face names; see ``HfStream``."""
    yield from HfStream(chunks, context)


class HfStream:
    """All tensors of the whole model under their Hugging Face names, in the model's order, as often as it is iterated.

    Every rank gets the same tensors. Each step is a collective: all ranks must iterate until the end. Tensors are on
    the model's device, without the vocabulary's padding; tied output weights come once, as the embedding. A tensor may
    share its memory with the model, or with others: copy what you keep or change.

    Ranks exchange which tensors they have at the first iteration, and again only if the chunks of a rank have changed.
    Tensors are gathered and sent in buckets, with one broadcast for each rank that has a part of a bucket.

    The names are those of the family ``chunk.model_family``, which ``build_model`` sets to ``ModelConfig.family``. If a
    chunk has none, they are those of the first registered family that is built like it.

    Args:
        chunks: this rank's model chunks, wrapped or not.
        context: the layout of the chunks.
        bucket_bytes: the size of a bucket on the device; a larger tensor has one for itself.

    Raises:
        DataError: on every rank, at the first step: the family has no counterpart of a tensor.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], context: MegatronContext, bucket_bytes: int = 64 << 20
    ) -> None:
        self._chunks, self._context, self._bucket_bytes = chunks, context, bucket_bytes
        self._planned_for: list[tuple[Any, ...]] | None = None
        self._plan: list[_Entry] = []

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over names and whole tensors."""
        shards = raise_on_every_rank(lambda: _all_mapped(self._chunks, self._context, _family_of(self._chunks)))
        held = [(each.shard.name, each.shard.param.shape, each.shard.param.dtype) for each in shards]
        if any(all_gather_values(held != self._planned_for)):
            self._plan, self._planned_for = _plan(shards), held
        mine = {each.shard.name: each for each in shards}
        for bucket in _in_buckets(self._plan, self._bucket_bytes):
            yield from _tensors_of(bucket, mine, shards[0].shard.param.device)


@torch.no_grad()
def hf_parts(chunks: Sequence[torch.nn.Module], context: MegatronContext) -> Iterator[TensorPart]:
    """Iterate over this rank's parts of the tensors of ``hf_tensors``; nothing is exchanged after the first step.

    Args:
        chunks: this rank's model chunks, wrapped or not.
        context: the layout of the chunks.

    Raises:
        DataError: on every rank, at the first step: the family has no counterpart of a tensor.
    """
    for each in raise_on_every_rank(lambda: _all_mapped(chunks, context, _family_of(chunks))):
        yield from each.parts()


@torch.no_grad()
def export_hf(
    chunks: Sequence[torch.nn.Module],
    context: MegatronContext,
    path: str | os.PathLike[str],
    model: ModelDescription,
    *,
    companions_from: str | os.PathLike[str] | None = None,
    max_file_bytes: int = 4_000_000_000,
) -> None:
    """Write the model as a Hugging Face directory, which becomes visible when it is complete (a collective).

    Its ``model_type`` is ``model.family``, which is that of the checkpoint that the model was loaded from; without one,
    the first registered family that is built like the model.

    The first rank that has a part of a tensor gathers and writes it: one rank of each pipeline stage, and of each ep
    rank for its experts, all at the same time. Each keeps up to ``max_file_bytes`` in host memory.

    Args:
        chunks: this rank's model chunks, wrapped or not.
        context: the layout of the chunks.
        path: a directory that does not exist yet, or is empty, in a file system that all ranks share.
        model: the ``ModelConfig`` of the model, which becomes ``config.json``.
        companions_from: a Hugging Face directory whose tokenizer and generation configuration are copied.
        max_file_bytes: the size at which a rank starts another file.

    Raises:
        DataError: ``path`` exists and is not empty, or the family has no counterpart of a tensor.
        ConfigError: no family is built like ``model``.
    """
    target, rank = Path(path), dist.get_rank()
    with before_changes():
        shards = raise_on_every_rank(lambda: _all_mapped(chunks, context, family_of(model)))
        mine = {each.shard.name: each for each in shards}
        plan = _plan(shards)
        config = hf_config_of(model, value_head=any(entry.is_value_head for entry in plan))
        raise_on_every_rank(lambda: start_export(target) if rank == 0 else None)
    writer = WeightWriter(target, rank, max_file_bytes)
    for entry in plan:
        own, writer_rank = mine.get(entry.name), entry.holders[0]
        if own is not None and own.is_gathered_with(writer_rank):
            tensors = own.whole()
            if rank == writer_rank:
                for name, tensor in zip(entry.hf_names, tensors, strict=True):
                    writer.add(name, tensor)
    written = [file for files in all_gather_values(writer.close()) for file in files]
    if rank == 0:
        finish_export(target, config, written, Path(companions_from) if companions_from is not None else None)
        logger.info("%d tensors in %d files at %s", sum(len(file.tensors) for file in written), len(written), target)
    dist.barrier()


@dataclass(frozen=True)
class _MappedShard:
    """A parameter of this rank, and the Hugging Face tensors that it is a part of."""

    shard: WeightShard
    counterpart: Counterpart

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the whole Hugging Face tensors."""
        parts = self.counterpart.split(torch.empty_like(self.shard.param, device="meta"))
        return tuple(self._whole_shape(part.shape) for part in parts)

    def _whole_shape(self, part: torch.Size) -> tuple[int, ...]:
        shape = list(part)
        if self.shard.dim is not None:
            shape[self.shard.dim] *= self.shard.group.size()
        if self.shard.rows is not None:
            shape[0] = self.shard.rows
        return tuple(shape)

    def read(self, files: WeightFiles) -> torch.Tensor:
        """Return the value of the parameter in the checkpoint: this rank's slices, joined."""
        shard, parts = self.shard, []
        for name, part in zip(self.counterpart.names, self.counterpart.split(shard.param), strict=True):
            length = part.size(shard.dim) if shard.dim is not None else 0
            start = shard.group.rank() * length
            stop = start + length if shard.rows is None else min(start + length, shard.rows)
            parts.append(files.read(name, shard.dim, min(start, stop), stop))
        tensor = self.counterpart.join(parts)
        if shard.rows is not None and len(tensor) < len(shard.param):
            tensor = torch.cat([tensor, tensor.new_zeros(len(shard.param) - len(tensor), *tensor.shape[1:])])
        return tensor

    def parts(self) -> Iterator[TensorPart]:
        """Iterate over this rank's parts of the Hugging Face tensors."""
        shard, tensors = self.shard, self.counterpart.split(self.shard.param.detach())
        for name, tensor, shape in zip(self.counterpart.names, tensors, self.shapes, strict=True):
            part = TensorPart(name, tensor, shape)
            if shard.dim is not None:
                size, rank = shard.group.size(), shard.group.rank()
                spans = spans_of(tensor.size(shard.dim), 1, size, rank, shape[shard.dim])
                part = part._replace(dim=shard.dim, spans=spans, group=shard.group, expert=shard.expert)
            yield part

    @property
    def is_divided(self) -> bool:
        """Whether other ranks have parts of the tensors."""
        return self.shard.dim is not None and self.shard.group.size() > 1

    def whole(self) -> list[torch.Tensor]:
        """Return the whole Hugging Face tensors, on every rank of the shard's group (a collective over it)."""
        return _whole_tensors([self])[0]

    def joined(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the whole Hugging Face tensors from the parameters of all ranks of the shard's group, by rank."""
        of_rank = [self.counterpart.split(part) for part in parts]
        if len(parts) == 1:
            tensors = list(of_rank[0])
        else:
            assert self.shard.dim is not None
            tensors = [torch.cat(of_name, self.shard.dim) for of_name in zip(*of_rank, strict=True)]
        return [tensor[: self.shard.rows] for tensor in tensors]

    def is_gathered_with(self, rank: int) -> bool:
        return rank in dist.get_process_group_ranks(self.shard.group)


@dataclass(frozen=True)
class _Entry:
    """One tensor of the whole Megatron model, known to every rank; ``holders`` are the ranks with a part, ascending."""

    name: str
    hf_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    layer: int | None
    holders: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(map(math.prod, self.shapes)) * self.dtype.itemsize

    @property
    def is_value_head(self) -> bool:
        return _is_value_head(self.name, self.shapes[0])


def _in_buckets(plan: Sequence[_Entry], bucket_bytes: int) -> Iterator[list[_Entry]]:
    """Divide the plan into runs of up to this many bytes, and of at least one entry."""
    bucket: list[_Entry] = []
    size = 0
    for entry in plan:
        if bucket and size + entry.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(entry)
        size += entry.nbytes
    if bucket:
        yield bucket


def _tensors_of(
    bucket: Sequence[_Entry], mine: Mapping[str, _MappedShard], device: torch.device
) -> list[tuple[str, torch.Tensor]]:
    """Names and whole tensors of a bucket, on every rank (a collective)."""
    held = [entry.name for entry in bucket if entry.name in mine]
    tensors = dict(zip(held, _whole_tensors([mine[name] for name in held]), strict=True))
    sent: dict[int, list[_Entry]] = {}
    for entry in bucket:
        if len(entry.holders) < dist.get_world_size():
            sent.setdefault(entry.holders[0], []).append(entry)
    for source, entries in sent.items():
        shapes = [(shape, entry.dtype) for entry in entries for shape in entry.shapes]
        own = [tensor for entry in entries for tensor in tensors[entry.name]] if source == dist.get_rank() else None
        received = iter(_broadcast(shapes, own, source, device))
        for entry in entries:
            tensors[entry.name] = [next(received) for _ in entry.shapes]
    pairs = [zip(entry.hf_names, tensors[entry.name], strict=True) for entry in bucket]
    return [(name, tensor.contiguous()) for pair in pairs for name, tensor in pair]


def _whole_tensors(shards: Sequence[_MappedShard]) -> list[list[torch.Tensor]]:
    """The whole Hugging Face tensors of each shard, with one gather for each group that divides them."""
    gathered: dict[int, list[torch.Tensor]] = {}
    of_group: dict[dist.ProcessGroup, list[int]] = {}
    for index, each in enumerate(shards):
        if each.is_divided:
            of_group.setdefault(each.shard.group, []).append(index)
        else:
            gathered[index] = [each.shard.param.detach()]
    for group, indices in of_group.items():
        params = [shards[index].shard.param.detach() for index in indices]
        flat = _as_bytes(params)
        parts = [torch.empty_like(flat) for _ in range(group.size())]
        dist.all_gather(parts, flat, group=group)
        of_rank = [_from_bytes(part, [(param.shape, param.dtype) for param in params]) for part in parts]
        gathered |= {index: list(of_param) for index, of_param in zip(indices, zip(*of_rank, strict=True), strict=True)}
    return [each.joined(gathered[index]) for index, each in enumerate(shards)]


def _broadcast(
    shapes: Sequence[_Shape], own: Sequence[torch.Tensor] | None, source: int, device: torch.device
) -> list[torch.Tensor]:
    """Send tensors of these shapes from one rank to all others; ``own`` is None there (a collective)."""
    size = sum(map(_aligned_size, shapes))
    flat = torch.empty(size, dtype=torch.uint8, device=device) if own is None else _as_bytes(own)
    dist.broadcast(flat, src=source)
    return _from_bytes(flat, shapes)


_Shape = tuple[tuple[int, ...], torch.dtype]
_ALIGNMENT = 16  # bytes; a multiple of every dtype's size


def _aligned_size(shape: _Shape) -> int:
    return -(-math.prod(shape[0]) * shape[1].itemsize // _ALIGNMENT) * _ALIGNMENT


def _as_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of the tensors one after another, each from an aligned one on; of one tensor without a copy."""
    parts = []
    for tensor in tensors:
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        padding = _aligned_size((tuple(tensor.shape), tensor.dtype)) - flat.numel()
        parts += [flat, flat.new_zeros(padding)] if padding else [flat]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _from_bytes(flat: torch.Tensor, shapes: Sequence[_Shape]) -> list[torch.Tensor]:
    """The tensors of ``_as_bytes``, as views."""
    parts = flat.split([_aligned_size(shape) for shape in shapes])
    return [
        part[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for part, (shape, dtype) in zip(parts, shapes, strict=True)
    ]


def _family_of(chunks: Sequence[torch.nn.Module]) -> ModelFamily | None:
    """The family that the chunks name; if they name none, the one that is built like them, if any is."""
    model_type = getattr(unwrap_model(chunks[0]), "model_family", None)
    if model_type is not None:
        return MODEL_FAMILIES.get_or_raise(model_type, "model.family")
    return matching_family(vars(get_model_config(chunks[0])))


def _mapped_shards(
    chunks: Sequence[torch.nn.Module], context: MegatronContext, family: ModelFamily | None
) -> list[_MappedShard]:
    mapped = []
    for chunk in chunks:
        config = get_model_config(chunk)
        for shard in named_shards([chunk], context):
            value_head = _is_value_head(shard.name, shard.full_shape)
            theirs = counterpart(shard.name, family, config, value_head)
            if shard.pieces > 1 and len(theirs.names) != shard.pieces:
                raise DataError(
                    f"{shard.name} consists of {shard.pieces} tensors (gate and up), each divided over tp separately; "
                    f"the family {family.model_type if family else None!r} names {len(theirs.names)}",
                    tensor=shard.name,
                )
            mapped.append(_MappedShard(shard, theirs))
    return mapped


def _all_mapped(
    chunks: Sequence[torch.nn.Module], context: MegatronContext, family: ModelFamily | None
) -> list[_MappedShard]:
    """As ``_mapped_shards``; DataError if buffers are part of the model, such as a learned bias of experts."""
    for name, buffer in named_buffers(chunks, context):
        if bool(buffer.any()):
            text = f"{name} is a buffer and not 0: it has no counterpart in a Hugging Face checkpoint"
            raise DataError(text, tensor=name)
    return _mapped_shards(chunks, context, family)


def _is_value_head(name: str, shape: Sequence[int]) -> bool:
    """Whether an output layer has one output: no vocabulary is as small."""
    return name == _OUTPUT_LAYER and shape[0] == 1


def _plan(shards: Sequence[_MappedShard]) -> list[_Entry]:
    """All tensors of the whole model, the same list on all ranks, in the order of the model (a collective)."""
    mine = [
        (each.shard.name, each.counterpart.names, each.shapes, each.shard.param.dtype, each.counterpart.layer)
        for each in shards
    ]
    described: dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...], torch.dtype, int | None]] = {}
    holders: dict[str, list[int]] = {}
    for rank, theirs in enumerate(all_gather_values(mine)):
        for name, hf_names, shapes, dtype, layer in theirs:
            described.setdefault(name, (hf_names, shapes, dtype, layer))
            holders.setdefault(name, []).append(rank)
    entries = [_Entry(name, *described[name], holders=tuple(holders[name])) for name in described]
    return sorted(entries, key=lambda entry: (entry.layer is None, entry.layer or 0))


def _check_names(plan: Sequence[_Entry], files: WeightFiles, family: ModelFamily | None, path: str) -> frozenset[str]:
    """Raise, on all ranks, unless the checkpoint fits the model; return the names of tensors that it may lack."""
    shapes = {name: shape for entry in plan for name, shape in zip(entry.hf_names, entry.shapes, strict=True)}
    left = [entry for entry in plan if entry.is_value_head and entry.hf_names[0] not in files.names]
    missing = sorted(shapes.keys() - files.names - {entry.hf_names[0] for entry in left})
    # A model with tied embeddings or a value head does not need the output layer of a checkpoint.
    spare = names_of(family).get(_OUTPUT_LAYER, ())
    unexpected = sorted(name for name in files.names - shapes.keys() - {*spare} if not name.endswith(_DERIVED))
    differing = [
        f"{name} is {list(files.shape(name))}, the model's is {list(shapes[name])}"
        for name in sorted(shapes.keys() & files.names)
        if files.shape(name) != shapes[name]
    ]
    if missing or unexpected or differing:
        raise DataError(
            f"the checkpoint at {path!r} does not fit the model: missing {_some(missing)}; unexpected "
            f"{_some(unexpected)}; of another shape {_some(differing)}",
            missing=missing,
            unexpected=unexpected,
            differing=differing,
        )
    return frozenset(entry.name for entry in left)


def _some(names: Sequence[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
