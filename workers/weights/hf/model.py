"""Weights of Hugging Face checkpoints into a Megatron model on any layout, and out of it again, tensor by tensor.

A rank reads its own slices of the files, and holds at most one whole tensor at a time on the way out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config, unwrap_model

from mcontroller.errors import DataError
from parallel_state.agreement import everyones, on_every_rank
from parallel_state.megatron import MegatronContext
from workers.config import ModelConfig
from workers.config.from_hf import model_config_from_hf
from workers.model.value_head import ValueHead
from workers.weights.hf.config import hf_config_of
from workers.weights.hf.files import WeightFiles, WeightWriter, publish, start_writing
from workers.weights.hf.names import Counterpart, counterpart
from workers.weights.shards import Shard, named_buffers, named_shards

__all__ = ["export_hf", "hf_tensors", "load_hf", "model_config_from_hf"]

logger = logging.getLogger(__name__)

_SCORE = "score.weight"
_LM_HEAD = "lm_head.weight"
# Tensors that old checkpoints hold and that follow from the configuration.
_DERIVED = ".rotary_emb.inv_freq"


@torch.no_grad()
def load_hf(
    chunks: Sequence[torch.nn.Module], path: str | os.PathLike[str], context: MegatronContext
) -> frozenset[str]:
    """Fill these model chunks from a directory of safetensors (a collective); what was left as it was.

    Values are cast to the dtype of the parameters; rows that pad the vocabulary are 0. A model with a value head
    takes it from ``score.weight``; a checkpoint without one leaves the head, and its name alone is returned.

    Raises:
        DataError: on every rank, before anything is copied: tensors that the model needs and the checkpoint lacks,
            that the model does not have, or whose shapes differ; fields ``missing``, ``unexpected``, ``differing``.
    """
    places = on_every_rank(lambda: _places(chunks, context))
    files = on_every_rank(lambda: WeightFiles(Path(path)))
    left = _check_names(_plan(places), files, str(path))
    for place in places:
        if place.shard.name not in left:
            place.shard.param.copy_(place.read(files))
    return left


@torch.no_grad()
def hf_tensors(chunks: Sequence[torch.nn.Module], context: MegatronContext) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the whole model under its Hugging Face name, the same on every rank, in the model's order.

    A collective at every step: all ranks iterate, to the end. Tensors are on the model's device, without the
    vocabulary's padding; tied output weights come once, as the embedding. One that no axis divides may share its
    memory with the model: copy what is to be kept or changed.

    Raises:
        DataError: on every rank, at the first step: a tensor has no counterpart in these families.
    """
    places = on_every_rank(lambda: _all_places(chunks, context))
    mine = {place.shard.name: place for place in places}
    device = places[0].shard.param.device
    for entry in _plan(places):
        if entry.name in mine:
            tensors = mine[entry.name].whole()
        else:
            tensors = [torch.empty(shape, dtype=entry.dtype, device=device) for shape in entry.shapes]
        for name, tensor in zip(entry.hf_names, tensors, strict=True):
            whole = tensor.contiguous()
            if len(entry.holders) < dist.get_world_size():
                dist.broadcast(whole, src=entry.holders[0])
            yield name, whole


@torch.no_grad()
def export_hf(
    chunks: Sequence[torch.nn.Module],
    context: MegatronContext,
    path: str | os.PathLike[str],
    model: ModelConfig,
    *,
    companions_from: str | os.PathLike[str] | None = None,
    max_file_bytes: int = 4_000_000_000,
) -> None:
    """Write the model as a Hugging Face directory, which appears when it is whole (a collective).

    The first rank that holds a tensor gathers and writes it: one rank of each pipeline stage, and of each ep
    rank for its experts, all at the same time. Each holds up to ``max_file_bytes`` in host memory.

    Args:
        path: a directory that does not exist yet, or is empty, in a file system that all ranks share.
        model: what ``config.json`` says of the model.
        companions_from: a Hugging Face directory whose tokenizer and generation configuration are copied.

    Raises:
        DataError: there is something at ``path``; a tensor has no counterpart in these families.
        ConfigError: no family is built like ``model``.
    """
    target, rank = Path(path), dist.get_rank()
    places = on_every_rank(lambda: _all_places(chunks, context))
    mine = {place.shard.name: place for place in places}
    plan = _plan(places)
    config = hf_config_of(model, value_head=any(_SCORE in entry.hf_names for entry in plan))
    on_every_rank(lambda: start_writing(target) if rank == 0 else None)
    writer = WeightWriter(target, rank, max_file_bytes)
    for entry in plan:
        place, owner = mine.get(entry.name), entry.holders[0]
        if place is not None and place.is_gathered_with(owner):
            tensors = place.whole()
            if rank == owner:
                for name, tensor in zip(entry.hf_names, tensors, strict=True):
                    writer.add(name, tensor)
    written = [file for files in everyones(writer.close()) for file in files]
    if rank == 0:
        publish(target, config, written, Path(companions_from) if companions_from is not None else None)
        logger.info("%d tensors in %d files at %s", sum(len(file.tensors) for file in written), len(written), target)
    dist.barrier()


@dataclass(frozen=True)
class _Place:
    """A parameter of this rank, and which parts of which Hugging Face tensors it is."""

    shard: Shard
    counterpart: Counterpart

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the whole Hugging Face tensors."""
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
        """What the parameter is in the checkpoint: this rank's slices, joined."""
        shard, parts = self.shard, []
        for name, part in zip(self.counterpart.names, self.counterpart.split(shard.param), strict=True):
            held = part.size(shard.dim) if shard.dim is not None else 0
            start = shard.group.rank() * held
            stop = start + held if shard.rows is None else min(start + held, shard.rows)
            parts.append(files.read(name, shard.dim, min(start, stop), stop))
        tensor = self.counterpart.join(parts)
        if shard.rows is not None and len(tensor) < len(shard.param):
            tensor = torch.cat([tensor, tensor.new_zeros(len(shard.param) - len(tensor), *tensor.shape[1:])])
        return tensor

    def whole(self) -> list[torch.Tensor]:
        """The whole Hugging Face tensors, on every rank of the shard's group (a collective over it)."""
        shard = self.shard
        mine = shard.param.detach().contiguous()
        if shard.dim is None or shard.group.size() == 1:
            tensors = self.counterpart.split(mine)
        else:
            gathered = [torch.empty_like(mine) for _ in range(shard.group.size())]
            dist.all_gather(gathered, mine, group=shard.group)
            parts = [self.counterpart.split(part) for part in gathered]
            tensors = [torch.cat(of_name, shard.dim) for of_name in zip(*parts, strict=True)]
        return [tensor[: shard.rows] for tensor in tensors]

    def is_gathered_with(self, rank: int) -> bool:
        return rank in dist.get_process_group_ranks(self.shard.group)


@dataclass(frozen=True)
class _Entry:
    """One tensor of the whole Megatron model, as every rank knows it; ``holders`` are ranks, ascending."""

    name: str
    hf_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    layer: int | None
    holders: tuple[int, ...]


def _places(chunks: Sequence[torch.nn.Module], context: MegatronContext) -> list[_Place]:
    places = []
    for chunk in chunks:
        has_value_head = isinstance(getattr(unwrap_model(chunk), "output_layer", None), ValueHead)
        for shard in named_shards([chunk], context):
            places.append(_Place(shard, counterpart(shard.name, get_model_config(chunk), has_value_head)))
    return places


def _all_places(chunks: Sequence[torch.nn.Module], context: MegatronContext) -> list[_Place]:
    """As ``_places``; DataError for a model that is more than its parameters, as a learnt bias of experts is."""
    for name, buffer in named_buffers(chunks, context):
        if bool(buffer.any()):
            text = f"{name} is no parameter and not 0: it has no counterpart in a Hugging Face checkpoint"
            raise DataError(text, tensor=name)
    return _places(chunks, context)


def _plan(places: Sequence[_Place]) -> list[_Entry]:
    """Every tensor of the whole model, the same list on all ranks, in the order of the model (a collective)."""
    mine = [(p.shard.name, p.counterpart.names, p.shapes, p.shard.param.dtype, p.counterpart.layer) for p in places]
    described: dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...], torch.dtype, int | None]] = {}
    holders: dict[str, list[int]] = {}
    for rank, held in enumerate(everyones(mine)):
        for name, hf_names, shapes, dtype, layer in held:
            described.setdefault(name, (hf_names, shapes, dtype, layer))
            holders.setdefault(name, []).append(rank)
    entries = [_Entry(name, *described[name], holders=tuple(holders[name])) for name in described]
    return sorted(entries, key=lambda entry: (entry.layer is None, entry.layer or 0))


def _check_names(plan: Sequence[_Entry], files: WeightFiles, path: str) -> frozenset[str]:
    """Raise, on all ranks alike, unless the checkpoint fits; the names of the tensors that it rightly lacks."""
    shapes = {name: shape for entry in plan for name, shape in zip(entry.hf_names, entry.shapes, strict=True)}
    left = frozenset(entry.name for entry in plan if entry.hf_names == (_SCORE,) and _SCORE not in files.names)
    optional = {_SCORE} if left else set()
    missing = sorted(shapes.keys() - files.names - optional)
    unexpected = sorted(name for name in files.names - shapes.keys() - {_LM_HEAD} if not name.endswith(_DERIVED))
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
    return left


def _some(names: Sequence[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
