"""Adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcontroller.errors import ConfigError, DataError, before_changes
from parallel_state.agreement import all_gather_values, raise_on_every_rank
from workers.config.model import ModelConfig
from workers.lora.adapters import Adapter, adapters_of, changed_beside_adapters
from workers.lora.base import base_hash
from workers.weights.hf.export_files import exporting, on_first_rank, save_tensors, writing_to
from workers.weights.hf.files import has_weights, open_safetensors
from workers.weights.hf.hub import local_directory
from workers.weights.moves import Span
from workers.weights.shards import WeightShard, whole_shard
from workers.weights.whole_tensors import Receivers, WholeTensors, tensors_in

_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_EXPERT = re.compile(r"(.*)\.(\d+)\.lora_(A|B\d)")


def _shards(chunks: Sequence[Any]) -> Iterator[WeightShard]:
    """The parts of this rank, under PEFT's names; of experts under the name of each, with the pieces of B apart."""
    for adapters in adapters_of(chunks):
        experts = {name for adapter in adapters if adapter.target.experts for name in adapter.target.factors}
        for adapter in adapters:
            for number in adapter.numbers:
                yield from _of_adapter(adapter, number, experts)


def _of_adapter(adapter: Adapter, number: int | None, experts: set[str]) -> Iterator[WeightShard]:
    target = adapter.target
    of_expert = number is not None
    keys = [f"{_experts_name(name, experts)}.{number}" if of_expert else name for name in target.factors]
    for index, key in enumerate(keys):
        name = f"{_PREFIX}{key}.{'lora_A' if of_expert else 'lora_A.weight'}"
        yield _part(adapter, name, adapter.a(index, number), 1)
    for index, pair in enumerate(target.pieces):
        if pair is not None:
            name = f"{_PREFIX}{keys[pair]}.{f'lora_B{index}' if of_expert else 'lora_B.weight'}"
            yield _part(adapter, name, adapter.b(index, number), 0)


def _experts_name(name: str, experts: set[str]) -> str:
    """PEFT wraps the module of all experts once for each tensor, gate_up_proj inside of down_proj."""
    module, _, tensor = name.rpartition(".")
    return f"{module}.base_layer" if tensor == "gate_up_proj" and f"{module}.down_proj" in experts else module


def _part(adapter: Adapter, name: str, factor: Tensor, dim: int) -> WeightShard:
    whole = whole_shard(name, factor)
    if adapter.split != dim:
        return whole
    start, size = adapter.group.rank() * factor.size(dim), factor.size(dim)
    shape = list(factor.shape)
    shape[dim] *= adapter.group.size()
    part = whole.part._replace(shape=tuple(shape), dim=dim, spans=(Span(start, start + size, 0),))
    return replace(whole, part=part)


@torch.no_grad()
def adapter_tensors(chunks: Sequence[Any], receivers: Receivers = (0,)) -> dict[str, Tensor]:
    """Return the whole adapter under PEFT's names, in host memory (a collective).

    Args:
        chunks: this rank's model chunks.
        receivers: the ranks that get the tensors.
    """
    whole = WholeTensors(lambda: list(_shards(chunks)))
    arriving = tensors_in(partial(whole.buckets, receivers=receivers), torch.device("cpu"))
    single = {name: tensor.clone() for name, tensor in arriving}
    tensors: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in single.items():
        of_expert = _EXPERT.fullmatch(name)
        if of_expert is None:
            tensors[name] = tensor
        else:
            experts.setdefault(of_expert[1], {}).setdefault(int(of_expert[2]), {})[of_expert[3]] = tensor
    for key, of_layer in experts.items():
        of_experts = [of_layer[number] for number in sorted(of_layer)]
        tensors[f"{key}.lora_A.weight"] = torch.cat([factors["A"] for factors in of_experts])
        b = [torch.cat([factors[piece] for piece in sorted(factors) if piece != "A"]) for factors in of_experts]
        tensors[f"{key}.lora_B.weight"] = torch.stack(b, -1).flatten(1)  # the experts last
    return tensors


@torch.no_grad()
def load_adapter(chunks: Sequence[Any], model: ModelConfig) -> None:
    """Fill the adapters from ``model.lora.path`` (a collective).

    Raises:
        DataError: on every rank: the file lacks a tensor, has one of another shape, or has others: ``tensor`` names it.
    """
    assert model.lora is not None and model.lora.path is not None
    path = Path(model.lora.path)
    with before_changes():
        tensors = raise_on_every_rank(lambda: _read(path))
        raise_on_every_rank(lambda: [_value(shard, tensors, model, path) for shard in _shards(chunks)])
        read = all_gather_values({_name_in_file(shard) for shard in _shards(chunks)})
        raise_on_every_rank(lambda: _check_all_read(tensors.keys() - set().union(*read), model, path))
    for shard in _shards(chunks):
        shard.param.copy_(shard.slice_of(_value(shard, tensors, model, path)))


def _read(path: Path) -> dict[str, Tensor]:
    file = open_safetensors(path / _FILE)
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


def _name_in_file(shard: WeightShard) -> str:
    """Return the name of the tensor of a file that a part is of: of all experts, if it is of one."""
    of_expert = _EXPERT.fullmatch(shard.part.name)
    return shard.part.name if of_expert is None else f"{of_expert[1]}.lora_{of_expert[3][0]}.weight"


def _check_all_read(unused: Collection[str], model: ModelConfig, path: Path) -> None:
    """Raise DataError if a file has tensors that no adapter of the model has."""
    if unused:
        assert model.lora is not None
        raise DataError(
            f"the adapter at {str(path)!r} has {len(unused)} tensors that model.lora has no adapter for, such as "
            f"{min(unused)}: targets are {model.lora.targets}, exclude {model.lora.exclude}, and only linear layers of "
            "the decoder have adapters of A and B. Merge others into their base with PEFT (merge_and_unload), and set "
            "model.hf_path to the result",
            path=str(path),
            tensor=min(unused),
            unused=sorted(unused),
        )


def _value(shard: WeightShard, tensors: dict[str, Tensor], model: ModelConfig, path: Path) -> Tensor:
    """Return the whole tensor of a part from those of a file."""
    assert model.lora is not None
    of_expert, rank, experts = _EXPERT.fullmatch(shard.part.name), model.lora.rank, model.num_moe_experts or 0
    name = _name_in_file(shard)
    whole = value = tensors.get(name)
    if value is not None and of_expert is not None:
        number = int(of_expert[2])
        if of_expert[3] == "A" and len(value) == rank * experts:
            value = value[number * rank : (number + 1) * rank]
        elif of_expert[3] != "A" and value.dim() == 2 and value.size(1) == rank * experts:
            value = value.unflatten(1, (rank, experts))[..., number]
            value = value if len(value) == shard.part.shape[0] else value.chunk(2)[int(of_expert[3][1])]
    if value is None or tuple(value.shape) != shard.part.shape:
        actual = "none" if whole is None else list(whole.shape)
        raise DataError(
            f"the adapter at {str(path)!r} does not fit the model: {name} is {actual}, expected "
            f"{list(shard.part.shape)}{'' if of_expert is None else ' of each expert'}",
            path=str(path),
            tensor=name,
        )
    return value


def export_adapter(chunks: Sequence[Any], path: str, model: ModelConfig, base: Mapping[str, Any] | None) -> None:
    """Write the adapter as a new directory in PEFT's format (a collective).

    The file names the hash of the base (``base_hash``) in its metadata.

    Args:
        chunks: this rank's model chunks.
        path: the directory.
        model: of the chunks.
        base: ``TrainingState.base``.

    Raises:
        ConfigError: the model has no adapter, or trains weights that PEFT's format does not have.
        DataError: ``path`` exists and is not empty, or cannot be written. The group goes on, and nothing is left there.
    """
    with before_changes():
        also = {name for names in all_gather_values(changed_beside_adapters(chunks)) for name in names}
        if base is None or also:
            why = "model.lora is not set" if base is None else f"{', '.join(sorted(also)[:3])} are trained too"
            text = f"the adapter alone cannot be exported: {why}; export the merged model instead"
            raise ConfigError(text, key="model.lora")
        tensors, config = adapter_tensors(chunks), peft_config(chunks, model)
    with exporting(Path(path)) as directory:
        on_first_rank(lambda: write_adapter(directory, tensors, config, base_sha256=base["sha256"]))


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], **metadata: str) -> None:
    """Write the two files of an adapter into a folder, with ``metadata`` in the header of the tensors.

    Raises:
        DataError: a file cannot be written.
    """
    save_tensors(tensors, folder / _FILE, **metadata)
    file = folder / "adapter_config.json"
    with writing_to(file):
        file.write_text(json.dumps(config, indent=2))


def peft_config(chunks: Sequence[Any], model: ModelConfig) -> dict[str, Any]:
    """Return the content of ``adapter_config.json`` (a collective)."""
    lora = model.lora
    assert lora is not None
    targets = {name for adapters in adapters_of(chunks) for adapter in adapters for name in adapter.target.factors}
    names = sorted({name for theirs in all_gather_values(targets) for name in theirs})
    of_experts = [name for name in names if ".experts." in name]
    linears = [name for name in names if ".experts." not in name]
    ends = sorted({name.rpartition(".")[2] for name in linears})
    short = all("*" not in target and ("." not in target or "experts." in target) for target in lora.targets)
    everywhere = short and not lora.exclude
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.hf_path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.use_rslora,
        "bias": "none",
        "target_modules": ends if everywhere else linears,
        "target_parameters": sorted({f"mlp.experts.{name.rpartition('.')[2]}" for name in of_experts}) or None
        if everywhere
        else of_experts or None,
    }


def check_adapter(model: ModelConfig) -> None:
    """Check that the adapter at ``model.lora.path`` belongs to the model's base, before any process starts.

    The base is not compared if its weights are not in ``model.hf_path``: a planned run downloads none.

    Raises:
        ConfigError: there is none, or it names another base by its hash.
        DataError: a file is damaged.
    """
    lora = model.lora
    if lora is None or lora.path is None:
        return
    file = Path(lora.path) / _FILE
    if not file.is_file():
        raise ConfigError(f"model.lora.path: there is no {str(file)!r}", key="model.lora.path", value=lora.path)
    expected = (open_safetensors(file).metadata() or {}).get("base_sha256")
    if expected is None or (model.hf_path is not None and not has_weights(Path(local_directory(model.hf_path)))):
        return
    base = base_hash(model)
    if expected != base:
        raise ConfigError(
            f"the adapter at {lora.path!r} was trained on another base: its base has the SHA-256 {expected[:16]}..., "
            f"model.hf_path={model.hf_path!r} has {base[:16]}...: set model.hf_path to the base of the adapter",
            key="model.lora.path",
            value=lora.path,
        )
