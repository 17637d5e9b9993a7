"""Which linear layers get adapters, and which weights are trained: names and patterns, without tensors.

A pattern is the end of a whole name, in Megatron's names or Hugging Face's, and may contain ``*``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mcontroller.config.checks import close_names
from mcontroller.errors import ConfigError
from workers.config.lora import LoraConfig
from workers.config.model import ModelConfig
from workers.weights.hf.config import read_config
from workers.weights.hf.family import MODEL_FAMILIES, ModelFamily, hf_names_of, matching_family

_LINEAR = re.compile(
    r"(decoder\.layers\.\d+\.(?:(?:self_attention|mlp)\.[\w.]*?linear_\w+|mixer\.(?:in|out)_proj))\.weight(\d*)"
)
_EXPERT = re.compile(r"\.mlp\.experts\.linear_fc[12]$")
_GATED = (".gate_proj", ".up_proj", ".down_proj")
# Mixtral's experts have other names in files than in transformers 5, which PEFT follows.
_MODULES = {".block_sparse_moe.": ".mlp.", ".w1": ".gate_proj", ".w3": ".up_proj", ".w2": ".down_proj"}
_CHECKED: set[str] = set()
"""Models that ``check_trained`` accepted: a search of layouts asks 2,000 times, and 128 experts have 12,000 names."""


@dataclass(frozen=True)
class Target:
    """The adapter of one linear layer.

    Attributes:
        name: of the layer in the whole model, in Megatron's names.
        factors: the names of its pairs of A and B in PEFT; Megatron's if PEFT has none.
        pieces: for each tensor that the rows of the weight consist of, the pair whose B has these rows, or None.
        experts: whether it is the layer of a group of experts.
    """

    name: str
    factors: tuple[str, ...]
    pieces: tuple[int | None, ...]
    experts: bool


def linear_names(tensors: Sequence[str]) -> list[str]:
    """Return the names that the linear layers of these tensors of a checkpoint have in transformers and PEFT.

    All experts of a layer are one module there.
    """
    names = []
    for tensor in tensors:
        name = re.sub(r"\.experts\.\d+\.", ".experts.", tensor.removesuffix(".weight"))
        if ".block_sparse_moe." in name:
            for file, module in _MODULES.items():
                name = name.replace(file, module)
        names.append(name)
    return names


def adapter_target(lora: LoraConfig, name: str, hf_names: Sequence[str]) -> Target | None:
    """Return the adapter of a linear layer; None if it has none.

    Args:
        lora: what is adapted.
        name: of the layer in the whole model, ``decoder.layers.3.mlp.linear_fc1``.
        hf_names: of the tensors that its weight consists of, in the order of its rows, as ``linear_names``.

    Raises:
        ConfigError: gate and up of experts, which have one A, are not selected together; the experts have other names,
            as those of gpt-oss; or it is a layer of Mamba.
    """
    experts = _EXPERT.search(name) is not None
    if experts and not lora.experts:
        return None
    names = list(hf_names) or [name]
    chosen = [_is_chosen(lora, name, hf_name) for hf_name in names]
    if experts and hf_names and any(chosen) and not all(hf_name.endswith(_GATED) for hf_name in names):
        raise ConfigError(
            f"model.lora selects experts that PEFT has no names for: {names[chosen.index(True)]}; expected "
            f"{', '.join(_GATED)}; set model.lora.experts=false",
            key="model.lora.experts",
            value=True,
        )
    if experts and len(names) == 2:
        both = f"{names[0].rpartition('.')[0]}.gate_up_proj"
        if _is_chosen(lora, name, both) or all(chosen):
            return Target(name, (both,), (0, 0), True)
        if any(chosen):
            raise ConfigError(
                f"model.lora selects {names[chosen.index(True)]} and not {names[chosen.index(False)]}, which have one "
                "A in a layer of experts: select both, or gate_up_proj, or set model.lora.experts=false",
                key="model.lora.targets",
                value=lora.targets,
            )
    if not any(chosen):
        return None
    if not name.rpartition(".")[2].startswith("linear_"):
        raise ConfigError(
            f"model.lora selects {names[0]}, a layer with states, of which adapters are not computed: add "
            f"{name.rpartition('.')[2]!r} to model.lora.exclude, or name other layers in model.lora.targets",
            key="model.lora.exclude",
            value=lora.exclude,
        )
    numbers = iter(range(len(names)))
    pieces = tuple(next(numbers) if is_chosen else None for is_chosen in chosen)
    return Target(name, tuple(hf_name for hf_name, yes in zip(names, chosen, strict=True) if yes), pieces, experts)


def _is_chosen(lora: LoraConfig, name: str, hf_name: str) -> bool:
    both = name, hf_name
    return ("all-linear" in lora.targets or matches(lora.targets, both)) and not matches(lora.exclude, both)


def matches(patterns: Iterable[str], names: Sequence[str]) -> bool:
    """Return whether a pattern is one of the names, or the end of one after a dot."""
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for pattern in patterns for name in names
    )


def trains(model: ModelConfig, name: str, hf_names: Sequence[str]) -> bool:
    """Return whether a weight of the model is trained; adapters always are.

    Args:
        model: what is trained.
        name: of the weight in the whole model, in Megatron's names.
        hf_names: of the tensors that it consists of.
    """
    names = name, *hf_names
    chosen = matches(model.train_only, names) if model.train_only else model.lora is None
    return chosen and not matches(model.freeze, names)


def base_is_frozen(model: ModelConfig) -> bool:
    """Return whether updates change the adapters of a model and nothing else, as far as its configuration says.

    Biases with which routers choose experts move unless their update rate is 0, which is Megatron-Bridge's here.
    """
    bridge, fields = model.provider == "bridge", model.transformer
    biased = bridge or fields.get("moe_router_enable_expert_bias", False)
    rate = fields.get("moe_router_bias_update_rate", 0.0 if bridge else None)
    return model.lora is not None and not model.train_only and (not biased or rate == 0.0)


def model_family_of(model: ModelConfig) -> ModelFamily | None:
    """Return the family that a model names; if it names none, the first that is built like it, if any is."""
    if model.family is not None:
        return MODEL_FAMILIES.get_or_raise(model.family, "model.family")
    if model.provider == "bridge":
        return MODEL_FAMILIES.get(str(read_config(str(model.hf_path)).get("model_type")))
    return matching_family({field.name: getattr(model, field.name) for field in dataclasses.fields(model)})


def check_trained(model: ModelConfig) -> None:
    """Check that every name in ``lora``, ``freeze`` and ``train_only`` selects something, and that something is left.

    Raises:
        ConfigError: a name selects nothing; ``key`` names the field.
    """
    lora = model.lora
    if lora is None and not model.freeze and not model.train_only:
        return
    checked = repr(model)
    if checked in _CHECKED:
        return
    weights = {name: hf_names for name, hf_names in _weights_of(model)}
    for key in ("freeze", "train_only"):
        _check_each(f"model.{key}", getattr(model, key), [(name, *hf) for name, hf in weights.items()])
    if lora is not None:
        linears = list(_linears_of(model, weights))
        names = [(name, *hf, *_joined(name, hf)) for name, hf in linears]
        _check_each("model.lora.targets", [target for target in lora.targets if target != "all-linear"], names)
        _check_each("model.lora.exclude", lora.exclude, names)
        adapted = [name for name, hf in linears if adapter_target(lora, name, hf) is not None]
        for name in adapted if model.transformer.get("moe_shared_expert_overlap") else ():
            check_not_overlapped(name)
        if not adapted:
            raise ConfigError(
                f"model.lora: targets {lora.targets} without {lora.exclude} and experts={lora.experts} leave no linear "
                "layer with an adapter",
                key="model.lora.targets",
                value=lora.targets,
            )
    elif not any(trains(model, name, hf) for name, hf in weights.items()):
        text = "model.freeze and model.train_only leave no weight to train"
        raise ConfigError(text, key="model.freeze", value=model.freeze)
    _CHECKED.add(checked)


def check_not_overlapped(name: str) -> None:
    """Raise ConfigError if a layer is of shared experts, which ``moe_shared_expert_overlap`` computes in parts.

    Their linear layers then get the input of all ranks, and leave the sums over ranks to others.
    """
    if ".shared_experts." in name:
        raise ConfigError(
            f"model.transformer.moe_shared_expert_overlap is true, and model.lora has an adapter of {name}, which is "
            "not computed in the parts that overlap: set moe_shared_expert_overlap=false, or "
            "model.lora.exclude=['*shared_experts*']",
            key="model.transformer.moe_shared_expert_overlap",
            value=True,
        )


def _weights_of(model: ModelConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The names of the weights of the model's family, of all layers and experts, by Megatron and Hugging Face."""
    family = model_family_of(model)
    tables = [candidate.names for candidate in ([family] if family else MODEL_FAMILIES.values())]
    experts = range(model.num_moe_experts or 0)
    for template in dict.fromkeys(name for table in tables for name in table):
        for layer in range(model.num_layers + model.prediction_layers) if "{layer}" in template else (0,):
            for expert in experts if "{expert}" in template else (0,):
                name = template.format(layer=layer, expert=expert)
                yield name, hf_names_of(family, name)


def _linears_of(model: ModelConfig, weights: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, hf_names in weights.items():
        linear = _LINEAR.fullmatch(name)
        if linear is not None and linear[2] in ("", "0") and (model.has_states or ".mixer." not in name):
            split = model.gated_linear_unit or not linear[1].endswith(".linear_fc1")
            yield linear[1], tuple(linear_names(hf_names)) if split else ()


def _joined(name: str, hf_names: Sequence[str]) -> tuple[str, ...]:
    """The name of gate and up of an expert in transformers, where one tensor has those of all experts."""
    if not _EXPERT.search(name) or not hf_names:
        return ()
    prefix = hf_names[0].rpartition(".")[0]
    return (f"{prefix}.gate_up_proj",) if len(hf_names) == 2 else (f"{prefix}.down_proj",)


def _check_each(key: str, patterns: Sequence[str], names: Sequence[Sequence[str]]) -> None:
    for pattern in patterns:
        if not any(matches([pattern], alternatives) for alternatives in names):
            ends = {end for alternatives in names for name in alternatives for end in (name.rpartition(".")[2], name)}
            raise ConfigError(
                f"{key}: {pattern!r} matches nothing in the model{close_names(pattern, sorted(ends))}; names are "
                f"ends of names such as {names[0][0] if names else 'none'}, and may contain *",
                key=key,
                value=pattern,
            )
