"""Load a checkpoint into a worker of any layout; of Megatron-LM's own checkpoints, the weights.

``open_checkpoint`` finds it and verifies every file, ``check_checkpoint`` compares it with the models and the
optimizer, and ``load_checkpoint`` changes them. Nothing has changed if one of the first two raises.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from mcontroller.errors import DataError
from mcontroller.files import sha256_of
from parallel_state.agreement import raise_on_every_rank
from workers.checkpoint.manifest import FileEntry, Manifest, find_checkpoint, read_manifest
from workers.checkpoint.megatron_lm import find_megatron_lm_checkpoint, megatron_lm_manifest
from workers.checkpoint.optimizer_state import check_buckets, merge_optimizer_state
from workers.checkpoint.state import (
    RANDOM,
    computed_function,
    is_adapted,
    layout_of,
    needed_shapes,
    saved_shapes,
    sharded_state,
    sharded_tensors,
    weight_prefix,
)
from workers.checkpoint.unpickle import check_objects, known_types, read_common, read_metadata
from workers.config.model import ModelConfig
from workers.train.state import TrainingState, set_random_state
from workers.weights.same_tensors import check_same_tensors

_HEAD = "output_layer.weight"
_OF_HEAD = (_HEAD, "output_layer.bias")
_CONFIG = "metadata.json"
_logger = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """A checkpoint that was found whole.

    Attributes:
        directory: of its files.
        manifest: its manifest.
        metadata: torch's description of its tensors and objects.
    """

    directory: Path
    manifest: Manifest
    metadata: Metadata


def open_checkpoint(path: str | os.PathLike[str], vocab_size: int) -> Checkpoint:
    """Find the checkpoint at ``path``, or the latest one in it, read its manifest and verify it (a collective).

    Args:
        path: the directory of a checkpoint or of several; Megatron-LM's, in its distributed format, are read too.
        vocab_size: of the model, without padding.

    Raises:
        DataError: on every rank, if one of them finds no checkpoint, or one that is unfinished or damaged.
    """
    directory, manifest = raise_on_every_rank(lambda: _open(path, vocab_size))
    return Checkpoint(directory, manifest, verify(directory, manifest))


def _open(path: str | os.PathLike[str], vocab_size: int) -> tuple[Path, Manifest]:
    of_megatron_lm = find_megatron_lm_checkpoint(Path(path))
    if of_megatron_lm is not None:
        return of_megatron_lm, megatron_lm_manifest(of_megatron_lm, vocab_size)
    checkpoint = find_checkpoint(path)
    return checkpoint, read_manifest(checkpoint)


def verify(checkpoint: Path, manifest: Manifest) -> Metadata:
    """Check all files of a checkpoint, each rank a part of them, and return torch's description (a collective).

    A checkpoint of Megatron-LM, which has no checksums, is checked for complete files and the types of its pickles.

    Args:
        checkpoint: its directory.
        manifest: its manifest.

    Raises:
        DataError: on every rank, if a file is missing or damaged, or would run code; names the file.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    files = manifest["files"]
    if not files and rank == 0:
        _logger.warning("the checkpoint %r has no checksums: the content of its files is not verified", str(checkpoint))
    largest_first = sorted(files, key=lambda name: (-files[name]["size"], name))

    def verify_files() -> None:
        for name in largest_first[rank::world_size]:
            _verify_file(checkpoint, name, files[name])

    def verify_types() -> Metadata:
        _verify_config(checkpoint)
        read_common(checkpoint)
        metadata = read_metadata(checkpoint)
        check_objects(checkpoint, metadata, rank, world_size)
        return metadata

    raise_on_every_rank(verify_files)
    return raise_on_every_rank(verify_types)


def _verify_file(checkpoint: Path, name: str, expected: FileEntry) -> None:
    path, reason = checkpoint / name, ""
    try:
        size = path.stat().st_size
        if size != expected["size"]:
            reason = f"{name} has {size} bytes, expected {expected['size']}"
        else:
            sha256 = sha256_of(path)
            if sha256 != expected["sha256"]:
                reason = f"the SHA-256 of {name} is {sha256}, expected {expected['sha256']}"
    except OSError as error:
        reason = f"{name} cannot be read: {error}"
    if reason:
        raise DataError(f"the checkpoint {str(checkpoint)!r} is damaged: {reason}", path=str(path), file=name)


def _verify_config(checkpoint: Path) -> None:
    """Check ``metadata.json``, by which Megatron chooses the reader."""
    try:
        content = json.loads((checkpoint / _CONFIG).read_text(encoding="utf-8"))
        known = isinstance(content, dict) and content.get("sharded_backend") == "torch_dist"
        reason = f"its content is {content!r:.200}, expected sharded_backend 'torch_dist'"
    except (ValueError, RecursionError, OSError) as error:
        known, reason = False, str(error)
    if not known:
        text = f"the checkpoint {str(checkpoint)!r} is damaged: {_CONFIG} cannot be read: {reason}"
        raise DataError(text, path=str(checkpoint), file=_CONFIG)


def check_checkpoint(
    training: TrainingState, model: ModelConfig, checkpoint: Checkpoint, distributed: Mapping[str, bool]
) -> bool:
    """Compare a checkpoint with the models and the optimizer that it is to be loaded into (a collective).

    Args:
        training: the objects to load into.
        model: the configuration of its models.
        checkpoint: as ``open_checkpoint`` returns it.
        distributed: by phase of training, whether its optimizer is a distributed one; empty if it is not trained.

    Returns:
        Whether its head is left out: the model has a value head, and the checkpoint is of a model with logits.

    Raises:
        DataError: on every rank, if weights are missing, unexpected or of another shape; if the model computes
            something else with them; if the optimizer's state is missing, of an unknown phase, in buckets that this
            optimizer does not have, or that of a distributed optimizer and this one is not, or the reverse.
    """
    directory, manifest, metadata = checkpoint
    saved = saved_shapes(metadata, manifest["parts"], manifest["vocab_size"])
    raise_on_every_rank(lambda: _check_base(training.base, manifest.get("base"), directory))
    sources = _sources(training, manifest)
    models = {part: training.models[part] for part in sources}
    weights = sharded_state(dataclasses.replace(training, models=models, optimizer=None), loading=True, sources=sources)
    needed = needed_shapes(training, weights, sources)
    head = needed.get("model", {}).get(_HEAD)
    without_head = head is not None and head[0] == 1 and saved.get("model", {}).get(_HEAD) != head
    for part, source in sources.items():
        have, need = saved[source], needed[part]
        if without_head:
            have, need = ({name: shape for name, shape in it.items() if name not in _OF_HEAD} for it in (have, need))
        text = f"the checkpoint {str(directory)!r} does not match the {part}"
        check_same_tensors(have, need, text, path=str(directory))
    raise_on_every_rank(lambda: _check_function(computed_function(training, model), manifest, directory))
    if without_head:
        if dist.get_rank() == 0:
            _logger.warning(
                "the checkpoint %r is of a model with logits: the value head is not loaded and keeps its initial "
                "weights, and the optimizer is new",
                str(directory),
            )
        return True
    if distributed:
        phase = str(manifest["counters"].get("phase") or training.counters.get("phase"))
        if phase not in distributed:
            raise DataError(
                f"the checkpoint {str(directory)!r} was saved in the phase {phase!r}; this role is trained in "
                f"{', '.join(distributed)}",
                path=str(directory),
                phase=phase,
            )
        _check_optimizer(distributed[phase], manifest, directory)
        if manifest["optimizer_buckets"] is not None and training.optimizer is not None:
            check_buckets(training.optimizer, layout_of(training), manifest, directory)
    return False


def _check_base(base: Mapping[str, Any] | None, saved: Mapping[str, Any] | None, checkpoint: Path) -> None:
    """Raise DataError unless a checkpoint of adapters is loaded into adapters of the same base, or one of none."""
    if base is None and saved is None:
        return
    start = f"the checkpoint {str(checkpoint)!r} has "
    if base is None or saved is None:
        has, needs = ("the whole model", "adapters (model.lora)") if saved is None else ("adapters", "the whole model")
        advice = "set model.lora as it was saved" if base is None else "export it, and set model.hf_path to the export"
        raise DataError(f"{start}{has}, and this role needs {needs}: {advice}", path=str(checkpoint))
    if base["sha256"] != saved["sha256"]:
        raise DataError(
            f"{start}adapters of the base {saved['path']!r} with the SHA-256 {saved['sha256'][:16]}..., and "
            f"model.hf_path={base['path']!r} has {base['sha256'][:16]}...: set model.hf_path to the same base",
            path=str(checkpoint),
        )
    if base["scale"] != saved["scale"]:
        raise DataError(
            f"{start}adapters that are multiplied by {saved['scale']:g}, and model.lora says {base['scale']:g}: set "
            "model.lora.alpha, rank and use_rslora as they were",
            path=str(checkpoint),
        )


def _check_function(function: Mapping[str, Any], manifest: Manifest, checkpoint: Path) -> None:
    """Raise DataError if the model computes something else than the saved one did with weights of the same shapes."""
    saved = manifest.get("function", {})
    differing = {name: (saved[name], function[name]) for name in sorted(saved.keys() & function.keys())}
    differing = {name: (old, new) for name, (old, new) in differing.items() if old != new}
    if differing:
        text = "; ".join(f"{name} is {new!r}, saved with {old!r}" for name, (old, new) in differing.items())
        raise DataError(
            f"the checkpoint {str(checkpoint)!r} is of a model that computes something else with the same weights: "
            f"{text:.500}. Set the fields of model as they were; to change them, export_hf, and set model.hf_path to "
            "the export with another config.json",
            path=str(checkpoint),
            differing=differing,
        )


def _check_optimizer(distributed: bool, manifest: Manifest, checkpoint: Path) -> None:
    if "optimizer" not in manifest["parts"]:
        steps = manifest["counters"].get("optimizer_steps", 0)
        if steps:
            raise DataError(
                f"the checkpoint {str(checkpoint)!r} has no optimizer state, after {steps} steps of the optimizer: "
                "training would go on with a new one. Load it into a role that is not trained, or train from its "
                "weights: export_hf, and model.hf_path",
                path=str(checkpoint),
                optimizer_steps=steps,
            )
        return
    if distributed != manifest["distributed_optimizer"]:
        raise DataError(
            f"the checkpoint {str(checkpoint)!r} was saved with optim.distributed_optimizer="
            f"{manifest['distributed_optimizer']}, this run has {distributed}: Megatron cannot convert one into the "
            f"other; set optim.distributed_optimizer={manifest['distributed_optimizer']}",
            path=str(checkpoint),
            distributed_optimizer=manifest["distributed_optimizer"],
        )


def load_checkpoint(training: TrainingState, checkpoint: Checkpoint, *, without_head: bool = False) -> None:
    """Load the checkpoint into the models, the optimizer and the schedule (a collective).

    The weights may come from any layout. The optimizer's state is loaded, unless it had made no step. The random state
    is restored only in the layout that saved it, on the same kind of device. If the checkpoint has no part "reference",
    the reference is loaded from its "model".

    Args:
        training: the objects to load into.
        checkpoint: as ``open_checkpoint`` returns it; ``check_checkpoint`` has accepted it.
        without_head: load the weights only, without the head's: the result of ``check_checkpoint``.

    Raises:
        DataError: on every rank, before the weights change, if tensors of the optimizer are missing.
    """
    directory, manifest, metadata = checkpoint
    names = metadata.state_dict_metadata
    sources = _sources(training, manifest)
    with_optimizer = "optimizer" in manifest["parts"] and training.optimizer is not None and not without_head
    same_layout = manifest["layout"] == layout_of(training) and not without_head
    loading = dataclasses.replace(
        training,
        models={part: training.models[part] for part in sources},
        optimizer=training.optimizer if with_optimizer else None,
    )
    in_buckets = manifest["optimizer_buckets"] is not None
    state = sharded_state(loading, loading=True, sources=sources, in_buckets=in_buckets)
    if not same_layout:
        del state[RANDOM]
    optimizer = state.pop("optimizer", None)
    if optimizer is not None:
        raise_on_every_rank(lambda: _check_optimizer_tensors(optimizer, names, directory))
    # Tensors are found by their own names. Under another key they stay apart from the optimizer's other state.
    kept = _take_absent_extra_states(state, sources, {name.partition("/shard_")[0] for name in names})
    if without_head:
        for chunk, values in kept.items():
            if _HEAD in state[chunk]:
                values[_HEAD] = state[chunk].pop(_HEAD).data
    replicas = training.context.pg.dp_cp
    loaded = _read(state if optimizer is None else state | {"tensors_of_optimizer": optimizer}, directory, replicas)
    for part, values in kept.items():
        loaded[part] |= values
    load_models(training, loaded, sources)
    merged = None
    if optimizer is not None:
        merged = merge_optimizer_state(loaded["tensors_of_optimizer"], optimizer, loaded["optimizer"])
    load_optimizer(training, merged, 0 if without_head else manifest["scheduler_steps"])
    if same_layout:
        set_random_state(loaded[RANDOM])


def _check_optimizer_tensors(optimizer: Mapping[Any, Any], saved: Collection[str], checkpoint: Path) -> None:
    """Raise DataError if a checkpoint lacks tensors of this rank's optimizer."""
    missing = sorted({tensor.key for tensor in sharded_tensors(optimizer)}.difference(saved))
    if missing:
        raise DataError(
            f"the checkpoint {str(checkpoint)!r} has no state of the optimizer for {missing[0]!r} and "
            f"{len(missing) - 1} more tensors: it was saved with another optim.optimizer, another dtype, or other "
            "weights that are trained (model.freeze, train_only, lora). Set them as they were, or train from its "
            "weights: export_hf, and model.hf_path",
            path=str(checkpoint),
            missing=missing,
        )


def _read(state: dict[str, Any], checkpoint: Path, replicas: dist.ProcessGroup) -> dict[str, Any]:
    """Read the state; ranks that need the same tensors read a part each, and send it to the others."""
    strategy = get_default_load_sharded_strategy(str(checkpoint))
    if dist.get_world_size(replicas) > 1:
        strategy = FullyParallelLoadStrategyWrapper(strategy, replicas)
    try:
        with known_types():
            return dist_checkpointing.load(state, str(checkpoint), sharded_strategy=strategy)
    except CheckpointException as error:  # derives from BaseException: `except Exception` would not catch it
        causes = "; ".join(f"rank {rank}: {cause!r:.300}" for rank, (cause, _) in sorted(error.failures.items())[:1])
        text = f"the checkpoint {str(checkpoint)!r} cannot be read: {causes}"
        raise DataError(text, path=str(checkpoint)) from error


def _take_absent_extra_states(
    state: Mapping[str, Any], sources: Mapping[str, str], saved: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Remove the extra states that the checkpoint does not have, and return the model's own, by chunk and name.

    Transformer Engine's layers have one each, with the scales of fp8. Local layers have none, and Megatron reads what
    it is asked for or fails.
    """
    kept: dict[str, dict[str, Any]] = {}
    for chunk, weights in state.items():
        if chunk.rstrip("0123456789") not in sources:
            continue
        absent = [name for name, entry in weights.items() if _is_extra_state(entry) and entry.key not in saved]
        kept[chunk] = {name: weights.pop(name).data for name in absent}
    return kept


def _is_extra_state(entry: Any) -> bool:
    return isinstance(entry, ShardedObject) and entry.key.endswith("._extra_state")


def _sources(training: TrainingState, manifest: Manifest) -> dict[str, str]:
    """By part, the part of the checkpoint that it is read from; a part to be copied from "model" is omitted."""
    sources = {part: part if part in manifest["parts"] else "model" for part in training.saved_models}
    return {part: source for part, source in sources.items() if part == source or "model" not in training.models}


def load_models(training: TrainingState, loaded: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Copy loaded weights into the models.

    Args:
        training: the models.
        loaded: the weights of every chunk by name, by part and chunk.
        sources: by part, the part whose names the weights have; a part without one is copied from "model".
    """
    for part, source in sources.items():
        prefix = weight_prefix(source)
        for index, chunk in enumerate(training.models[part]):
            weights = loaded[f"{part}{index}"]
            state = {name.removeprefix(prefix): value for name, value in weights.items()}
            unwrap_model(chunk).load_state_dict(state, strict=not is_adapted(chunk))
            for name, copy in training.float32[part][index].items() if part in training.float32 else ():
                copy.copy_(weights[prefix + name])
    for part in training.saved_models.keys() - sources.keys():
        for chunk, model in zip(training.models[part], training.models["model"], strict=True):
            unwrap_model(chunk).load_state_dict(unwrap_model(model).state_dict())


@torch.no_grad()
def load_optimizer(training: TrainingState, state: Any, scheduler_steps: int) -> None:
    """Load the argument of ``load_state_dict`` into the optimizer, if there is one; None: start with the weights."""
    optimizer, scheduler = training.optimizer, training.scheduler
    if optimizer is None or scheduler is None:
        return
    if state is None:
        optimizer.reload_model_params()
    else:
        optimizer.load_state_dict(state)
    scheduler.num_steps = scheduler_steps
    scheduler.step(0)
