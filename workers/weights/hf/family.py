"""Model families: the registry of how each ``model_type`` of Hugging Face maps to a GPT model of Megatron.

A family is one file. It maps ``config.json`` to fields of ``ModelConfig`` and back, and lists the names of the weights.
``workers.weights.hf.families`` are built in. To add one, subclass the nearest (or ``ModelFamily``) and register it in a
module that the module of your worker imports, or that ``imports`` of a run names::

    from workers import register_model_family
    from workers.weights.hf.families.llama import Llama

    @register_model_family("my_llama")
    class MyLlama(Llama):
        architecture = "MyLlama"
        only_built = {**Llama.only_built, "logit_scale": (1.0,)}
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from mcontroller.config.registry import Registry
from mcontroller.errors import ConfigError
from workers.weights.hf.fields import INERT, NEUTRAL, READ_ELSEWHERE, ReadKeys, not_built

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
_EXPERT = re.compile(r"(.*\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")
MODEL_FAMILIES: Registry[ModelFamily] = Registry("model family", key="model_type")
"""Every registered family by its ``model_type``."""


class ModelFamily(ABC):
    """One family. All configurations are plain mappings: ``config.json`` as read, and fields of ``ModelConfig``.

    Attributes:
        model_type: the name that the family is registered under, as ``config.json`` has it.
        architecture: prefix of the class names in transformers, as in ``LlamaForCausalLM``.
        add_qkv_bias, qk_layernorm, has_experts: the layers that the family has. They determine the family of a model
            that was not read from a Hugging Face directory. None: with and without.
        special: other fields of Megatron's TransformerConfig that determine the family, and their values.
        has_extra_layers: whether checkpoints may have layers of multi-token prediction after the last one, which are
            left out unless ``mtp_num_layers`` builds them.
        copies: for such a layer, the names of its copies of weights of the whole model, by Megatron's names of these.
        reference_type: the ``model_type`` that computes the same in transformers; None: the family's own.
        names: the tensors that one tensor of Megatron's GPT model consists of, stacked along dim 0, by its name.
            ``{layer}`` and ``{expert}`` are numbers, counted from 0 over the whole model. q, k and v of
            ``linear_qkv`` are interleaved by query group.
        value_head: the name of the weight of a value head, ``[1, hidden_size]``.
        inert: other keys that change no logits; an export keeps them.
        only_built: keys that change what is computed, and the values that are built. Every other key is rejected,
            unless it is in one of the lists of ``workers.weights.hf.fields``.
    """

    architecture: ClassVar[str]
    add_qkv_bias: ClassVar[bool | None] = False
    qk_layernorm: ClassVar[bool | None] = False
    has_experts: ClassVar[bool] = False
    special: ClassVar[Mapping[str, Any]] = {
        "multi_latent_attention": False,
        "moe_router_enable_expert_bias": False,
        "window_size": None,
        "mamba_num_heads": None,
    }
    has_extra_layers: ClassVar[bool] = False
    copies: ClassVar[Mapping[str, str]] = {}
    reference_type: ClassVar[str | None] = None
    names: ClassVar[Mapping[str, tuple[str, ...]]]
    value_head: ClassVar[str] = "score.weight"
    inert: ClassVar[tuple[str, ...]] = ()
    only_built: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type

    @abstractmethod
    def fields_from(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of ``ModelConfig`` that ``config.json`` determines.

        The keys that this reads are computed; every other one is checked by ``workers.weights.hf.fields``.

        Args:
            config: read key by key; ``fields.layered(changes, config)`` changes some.

        Raises:
            ConfigError: a key is missing, or has a value with which Megatron's model would compute something else;
                ``key`` and ``value`` are from ``config.json``.
        """

    @abstractmethod
    def config_from(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``config.json`` of a model of this family, without ``model_type`` and ``architectures``.

        Args:
            fields: every field of ``ModelConfig``.

        Raises:
            ConfigError: ``config.json`` of the family cannot express a field; ``key`` and ``value`` are the field's.
        """

    def differences(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that keep a model from being of this family, with the values that the family has.

        Args:
            fields: fields of ``ModelConfig`` or of Megatron's ``TransformerConfig``.
        """
        flags: dict[str, Any] = {"add_qkv_bias": self.add_qkv_bias, "qk_layernorm": self.qk_layernorm}
        differing: dict[str, Any] = {
            name: value for name, value in flags.items() if value not in (None, fields.get(name))
        }
        if (fields.get("num_moe_experts") is not None) != self.has_experts:
            differing["num_moe_experts"] = "a number" if self.has_experts else None
        inside = fields.get("transformer", fields)
        return differing | {
            name: value for name, value in self.special.items() if (inside.get(name) or None) != (value or None)
        }

    def neutral(self) -> dict[str, tuple[Any, ...]]:
        """Return ``NEUTRAL`` with the family's keys, and those that state what the family always has."""
        always = {"qkv_bias": self.add_qkv_bias, "use_qk_norm": self.qk_layernorm}
        stated = {key: (value, None) for key, value in always.items() if value is not None}
        return {**NEUTRAL, **stated, **self.only_built}

    def inert_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of ``config.json`` that change no logits, as an export keeps them."""
        kept = INERT | frozenset(self.inert)
        return {key: value for key, value in config.items() if key in kept or key.startswith("_")}

    def check_keys(self, read: ReadKeys) -> None:
        """Check that no key of ``config.json`` changes what a model computes without being computed.

        Args:
            read: the file, after ``fields_from`` has read it.

        Raises:
            ConfigError: a key is in none of the lists, or has a value at which it changes something; ``key`` and
                ``value`` are from ``config.json``.
        """
        neutral = self.neutral()
        known = INERT | READ_ELSEWHERE | read.keys_read | frozenset(self.inert)
        for key, value in read.config.items():
            if key in known or key.startswith("_"):
                continue
            if key not in neutral:
                raise ConfigError(
                    f"config.json: {key} is {value!r}: model_type {self.model_type!r} does not compute this key; if it "
                    "changes nothing, add it to `inert` of a custom family (workers.register_model_family), or build "
                    "the model in build_model",
                    key=key,
                    value=value,
                )
            if value not in neutral[key]:
                raise not_built(key, value, neutral[key][0])

    def not_expressible(self, key: str, value: Any, expressible: Any) -> ConfigError:
        """Return the error for a field of the model that the family's ``config.json`` cannot express."""
        return ConfigError(
            f"{key} is {value!r}: a config.json of model_type {self.model_type!r} can only express {expressible!r}",
            key=key,
            value=value,
        )


Family = TypeVar("Family", bound=type[ModelFamily])


def register_model_family(model_type: str) -> Callable[[Family], Family]:
    """Return a decorator that registers a subclass of ``ModelFamily`` for a ``model_type`` of Hugging Face.

    Raises:
        ConfigError: another family is registered for this ``model_type``.
    """

    def register(family: Family) -> Family:
        MODEL_FAMILIES.add(model_type, family(model_type))
        return family

    return register


def matching_family(fields: Mapping[str, Any]) -> ModelFamily | None:
    """Return the first registered family without ``differences`` from these fields, or None."""
    return next((family for family in MODEL_FAMILIES.values() if not family.differences(fields)), None)


def family_like(fields: Mapping[str, Any]) -> ModelFamily:
    """Return the family that a model is built like.

    Args:
        fields: every field of ``ModelConfig``. If ``family`` is set, no other family is considered.

    Raises:
        ConfigError: ``family`` is not registered, or differs from the model, or no family is built like the model.
    """
    if fields["family"] is not None:
        nearest = MODEL_FAMILIES.get_or_raise(fields["family"], "model.family")
    elif (matching := matching_family(fields)) is not None:
        return matching
    else:
        nearest = min(MODEL_FAMILIES.values(), key=lambda family: _distance(family.differences(fields)))
    for name, value in nearest.differences(fields).items():
        if name in fields:
            raise nearest.not_expressible(f"model.{name}", fields[name], value)
        raise nearest.not_expressible(f"model.transformer.{name}", fields["transformer"].get(name, False), value)
    return nearest


def hf_names_of(family: ModelFamily | None, name: str) -> tuple[str, ...]:
    """Return the names of the tensors that a weight of Megatron consists of; empty if the family has none.

    Args:
        family: of the model; None for the names of all.
        name: in the whole model, in Megatron's names.
    """
    in_layer, of_expert = _LAYER.fullmatch(name), _EXPERT.fullmatch(name)
    numbers = {"layer": in_layer[2] if in_layer else "", "expert": of_expert[2] if of_expert else ""}
    template = _LAYER.sub(r"\1{layer}\3", f"{of_expert[1]}{{expert}}" if of_expert else name)
    families = MODEL_FAMILIES.values() if family is None else [family]
    templates = next((candidate.names[template] for candidate in families if template in candidate.names), ())
    return tuple(name.format(**numbers) for name in templates)


def _distance(differences: Mapping[str, Any]) -> tuple[bool, int]:
    """Return a sort key: the number of differences, after all families that agree on having experts."""
    return "num_moe_experts" in differences, len(differences)
