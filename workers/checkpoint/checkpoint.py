"""Checkpoints in Megatron's distributed format: written in one layout, read in any other.

A checkpoint is a directory ``global_step_<n>`` that appears all at once: it is written under another name and renamed
when every rank is done. Beside Megatron's files it holds ``manifest.json``: the step, the layout, what parts there are
and the name and shape of every weight, so that a checkpoint that does not fit is refused by name. The file ``latest``
in the directory above names the newest one. Of Megatron-LM's own checkpoints the weights are read.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import CheckpointException

from mcontroller.errors import DataError
from parallel_state.agreement import raise_on_every_rank
from parallel_state.megatron import MegatronContext
from workers.checkpoint.background_saves import BackgroundSaves
from workers.checkpoint.files import directory_of, find_checkpoint, new_partial, partial_of, publish, read_manifest
from workers.checkpoint.optimizer_state import with_own_groups
from workers.checkpoint.plain import find_plain, plain_manifest

__all__ = ["Training", "load_checkpoint", "open_checkpoint", "save_checkpoint"]


@dataclass
class Training:
    """What a checkpoint holds of a worker.

    Attributes:
        models: by part ("model", "reference"), the model chunks of this rank.
        optimizer, scheduler: of the part "model"; None where it is not trained. Saved once it has made a step.
        counters: numbers that go into the manifest.
    """

    context: MegatronContext
    models: dict[str, Sequence[Any]]
    optimizer: MegatronOptimizer | None = None
    scheduler: OptimizerParamScheduler | None = None
    counters: dict[str, int | str] = field(default_factory=dict)


def save_checkpoint(
    training: Training,
    path: str | os.PathLike[str],
    step: int,
    keep: int | None = None,
    background: BackgroundSaves | None = None,
) -> Path:
    """Write ``<path>/global_step_<step>`` and point ``latest`` to it: the directory (a collective).

    Args:
        path: on a file system that all nodes share.
        keep: how many checkpoints stay under ``path``, this one and the newest steps of the others; None keeps all.
        background: writes while the caller goes on; the directory appears when it finishes the checkpoint.

    Raises:
        DataError: on every rank, if there can be no directory at ``path``.
    """
    if background is not None:
        background.finish()
    target = directory_of(Path(path), step)
    raise_on_every_rank(lambda: new_partial(target) if dist.get_rank() == 0 else None)
    partial = str(partial_of(target))
    if training.scheduler is None or training.scheduler.num_steps == 0:
        training = dataclasses.replace(training, optimizer=None)
    state = _sharded_state(training, loading=False)
    publishing = functools.partial(_publish, target, _manifest(training, state, step), keep)
    if background is not None:
        background.begin(state, partial, publishing)
    else:
        dist_checkpointing.save(state, partial)
        publishing()
    return target


def _publish(target: Path, manifest: Mapping[str, Any], keep: int | None) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        publish(target, manifest, keep)
    dist.barrier()


def open_checkpoint(path: str | os.PathLike[str], vocab_size: int) -> tuple[Path, dict[str, Any]]:
    """The checkpoint at ``path``, or the latest one under it, and its manifest (a collective).

    A distributed checkpoint of Megatron-LM's has a manifest as well: of its weights, for a model of ``vocab_size``.

    Raises:
        DataError: on every rank, if there is none for one of them, or it was never finished.
    """
    return raise_on_every_rank(lambda: _opened(path, vocab_size))


def _opened(path: str | os.PathLike[str], vocab_size: int) -> tuple[Path, dict[str, Any]]:
    plain = find_plain(Path(path))
    if plain is not None:
        return plain, plain_manifest(plain, vocab_size)
    checkpoint = find_checkpoint(path)
    return checkpoint, read_manifest(checkpoint)


def load_checkpoint(training: Training, checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Put what the checkpoint holds into the models, the optimizer and the schedule (a collective).

    The weights may come from any layout. The optimizer's state is read where the checkpoint has it; the random state
    returns only in the layout that saved it. A part "reference" that the checkpoint lacks is read from its "model".

    Raises:
        DataError: on every rank, before anything changes: weights that the model needs and the checkpoint lacks or
            has in another shape, or the reverse; an optimizer state of the other kind (distributed or not).
    """
    sources = _sources(training, manifest)
    with_optimizer = "optimizer" in manifest["parts"] and training.optimizer is not None
    same_layout = manifest["layout"] == _layout(training)
    wanted = dataclasses.replace(
        training,
        models={part: training.models[part] for part in sources},
        optimizer=training.optimizer if with_optimizer else None,
    )
    state = _sharded_state(wanted, loading=True, sources=sources)
    _check_weights(_shapes(wanted, state, sources), manifest, sources, checkpoint)
    _check_optimizer(training, manifest, checkpoint)
    if not same_layout:
        del state["random"]
    own = state.pop("optimizer", None)
    # Tensors are found by their own names; here they are to stay apart from what was saved beside them.
    loaded = _loaded(state if own is None else state | {"tensors_of_optimizer": own}, checkpoint)
    for part, chunks in wanted.models.items():
        for index, chunk in enumerate(chunks):
            weights = loaded[f"{part}{index}"]
            prefix = _prefix(sources[part])
            unwrap_model(chunk).load_state_dict({name.removeprefix(prefix): value for name, value in weights.items()})
    for part in training.models.keys() - sources.keys():
        for chunk, model in zip(training.models[part], training.models["model"], strict=True):
            unwrap_model(chunk).load_state_dict(unwrap_model(model).state_dict())
    found = None if own is None else with_own_groups(loaded["tensors_of_optimizer"], own, loaded["optimizer"])
    _load_optimizer(training, found, manifest)
    if same_layout:
        _set_random_state(loaded["random"])


def _loaded(state: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    try:
        return dist_checkpointing.load(state, str(checkpoint))
    except CheckpointException as error:  # not an Exception: it would pass whoever catches those
        causes = "; ".join(f"rank {rank}: {cause!r:.300}" for rank, (cause, _) in sorted(error.failures.items())[:1])
        text = f"the checkpoint {str(checkpoint)!r} cannot be read: {causes}"
        raise DataError(text, path=str(checkpoint)) from error


def _sources(training: Training, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Which part of the checkpoint each model is read from; one that is to be copied from "model" is left out."""
    sources = {part: part if part in manifest["parts"] else "model" for part in training.models}
    return {part: source for part, source in sources.items() if part == source or "model" not in training.models}


def _prefix(part: str) -> str:
    return "" if part == "model" else f"{part}."


def _layout(training: Training) -> dict[str, Any]:
    layout = training.context.layout
    return {
        "world_size": layout.world_size,
        **{axis: getattr(layout, axis) for axis in ("tp", "pp", "cp", "ep", "etp", "vpp", "order")},
    }


def _sharded_state(training: Training, *, loading: bool, sources: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Everything as Megatron's sharded tensors and objects, by part and chunk."""
    group = training.context.pg.dp_cp
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": group,
    }
    state: dict[str, Any] = {}
    for part, chunks in training.models.items():
        prefix = _prefix(part if sources is None else sources[part])
        for index, chunk in enumerate(chunks):
            state[f"{part}{index}"] = unwrap_model(chunk).sharded_state_dict(prefix=prefix, metadata=metadata)
    if training.optimizer is not None:
        chunks = [state[f"model{index}"] for index in range(len(training.models["model"]))]
        weights = chunks[0] if len(chunks) == 1 else {f"model{index}": chunk for index, chunk in enumerate(chunks)}
        state["optimizer"] = training.optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state["random"] = ShardedObject("random", _random_state(), (world_size,), (rank,))
    return state


def _shapes(
    training: Training, state: Mapping[str, Any], sources: Mapping[str, str]
) -> dict[str, dict[str, list[int]]]:
    """By part, the name and shape of every weight in the whole model, without padding of its vocabulary.

    From all ranks (a collective).
    """
    mine: dict[str, dict[str, list[int]]] = {part: {} for part in sources}
    for part, source in sources.items():
        for index, chunk in enumerate(training.models[part]):
            vocab_size = getattr(unwrap_model(chunk), "unpadded_vocab_size", None)
            for tensor in _sharded_tensors(state[f"{part}{index}"]):
                shape = list(tensor.global_shape)
                if tensor.allow_shape_mismatch and vocab_size is not None:
                    shape[0] = min(shape[0], vocab_size)
                mine[part][tensor.key.removeprefix(_prefix(source))] = shape
    everyone: list[dict[str, dict[str, list[int]]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return {part: {name: shape for held in everyone for name, shape in sorted(held[part].items())} for part in sources}


def _sharded_tensors(weights: Mapping[str, Any]) -> Iterator[ShardedTensor]:
    """Those of a chunk, gated units (made of two tensors by a factory) among them."""
    for value in weights.values():
        held = list(nested_values(value.build())) if isinstance(value, ShardedTensorFactory) else [value]
        yield from (tensor for tensor in held if isinstance(tensor, ShardedTensor))


def _manifest(training: Training, state: Mapping[str, Any], step: int) -> dict[str, Any]:
    optimizer = training.optimizer
    return {
        "format": 1,
        "step": step,
        "layout": _layout(training),
        "parts": [*training.models, *(["optimizer"] if optimizer is not None else [])],
        "distributed_optimizer": optimizer is not None and optimizer.config.use_distributed_optimizer,
        "scheduler_steps": 0 if training.scheduler is None else training.scheduler.num_steps,
        "counters": training.counters,
        "weights": _shapes(training, state, {part: part for part in training.models}),
    }


def _check_weights(
    needed: Mapping[str, Mapping[str, list[int]]],
    manifest: Mapping[str, Any],
    sources: Mapping[str, str],
    checkpoint: Path,
) -> None:
    for part, source in sources.items():
        held, shapes = manifest["weights"][source], needed[part]
        missing = sorted(shapes.keys() - held.keys())
        unexpected = sorted(held.keys() - shapes.keys())
        differing = [
            f"{name} is {held[name]}, the model's is {shapes[name]}"
            for name in sorted(shapes.keys() & held.keys())
            if held[name] != shapes[name]
        ]
        if missing or unexpected or differing:
            raise DataError(
                f"the checkpoint {str(checkpoint)!r} does not fit the {part}: missing {missing or 'none'}; "
                f"unexpected {unexpected or 'none'}; of another shape {differing or 'none'}",
                path=str(checkpoint),
                missing=missing,
                unexpected=unexpected,
                differing=differing,
            )


def _check_optimizer(training: Training, manifest: Mapping[str, Any], checkpoint: Path) -> None:
    if training.optimizer is None or "optimizer" not in manifest["parts"]:
        return
    wanted = training.optimizer.config.use_distributed_optimizer
    if wanted != manifest["distributed_optimizer"]:
        raise DataError(
            f"the checkpoint {str(checkpoint)!r} was saved with optim.distributed_optimizer="
            f"{manifest['distributed_optimizer']}, this run has {wanted}: Megatron cannot read the one as the other",
            path=str(checkpoint),
            distributed_optimizer=manifest["distributed_optimizer"],
        )


@torch.no_grad()
def _load_optimizer(training: Training, state: Any, manifest: Mapping[str, Any]) -> None:
    optimizer, scheduler = training.optimizer, training.scheduler
    if optimizer is None or scheduler is None:
        return
    if state is None:
        optimizer.reload_model_params()
    else:
        optimizer.load_state_dict(state)
    scheduler.num_steps = manifest["scheduler_steps"]
    scheduler.step(0)


def _random_state() -> dict[str, Any]:
    return {
        "host": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["host"])
    torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tracker"])
