"""Every key of ``config.json`` is computed, or changes nothing, or is rejected: lists of keys, and how keys are read.

A key that changes what a model computes and that is read over would result in wrong numbers without an error. So each
key is of one of these kinds, and any other is rejected:

- computed: the keys that ``ModelFamily.fields_from`` reads, which ``ReadKeys`` notes;
- inert: ``INERT``, ``ModelFamily.inert`` and keys that begin with ``_``, where libraries keep their own notes, such
  as ``_name_or_path``: they change no logits; an export keeps them as they were;
- neutral: ``NEUTRAL`` and ``ModelFamily.only_built``, accepted only with values that change nothing.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from mcontroller.errors import ConfigError

# Names that transformers wrote into config.json until it had generation_config.json.
_GENERATION = """
    bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate
    suppress_tokens temperature top_k top_p typical_p
"""
_IDS = "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id"
_HISTORY = """
    finetuning_task initializer_range initializer_factor tokenizer_class prefix
    task_specific_params transformers_version transformers.js_config unsloth_fixed unsloth_version is_llama_config
    max_sequence_length generation_config
"""
_IMPLEMENTATION = """
    attn_implementation gradient_checkpointing keys_to_ignore_at_inference output_attentions output_hidden_states
    return_dict tf_legacy_loss torchscript use_bfloat16 use_cache use_return_dict
"""
_CLASSIFIER = "classifier_dropout id2label label2id num_labels problem_type"

INERT: frozenset[str] = frozenset(" ".join((_GENERATION, _IDS, _HISTORY, _IMPLEMENTATION)).split())
"""Keys that change no logits in any family: ids of special tokens, the file's history, how a library computes."""

# Keys that this project writes itself, or that are read by other modules.
READ_ELSEWHERE = frozenset(("architectures", "model_type", *_CLASSIFIER.split()))

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "attention_dropout": (0, None),
    "attn_logit_softcapping": (None,),
    "chunk_size_feed_forward": (0, None),
    "cross_attention_hidden_size": (None,),
    "embedding_multiplier": (1, None),
    "first_k_dense_replace": (0, None),
    "final_logit_softcapping": (None,),
    "is_causal": (True,),
    "is_decoder": (False, True, None),
    "is_encoder_decoder": (False, None),
    "logits_scaling": (1, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "n_shared_experts": (0, None),
    "num_nextn_predict_layers": (0, None),
    "num_shared_experts": (0, None),
    "pretraining_tp": (1, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "residual_multiplier": (1, None),
    "rope_interleaved": (False, None),
    "shared_expert_intermediate_size": (0, None),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False, None),
    "use_bidirectional_attention": (False, None),
    "use_mrope": (False, None),
    "use_sliding_window": (False, None),
}
"""Keys with the values at which they change nothing; the first is reported as the expected one."""


class ReadKeys(Mapping[str, Any]):
    """The content of ``config.json``, which is read key by key, and the keys that were read.

    It cannot be copied, because a copy reads every key: ``layered(changes, config)`` is one with changes.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config, self.keys_read = config, set[str]()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return self.config[key]

    def __iter__(self) -> Iterator[str]:
        raise TypeError("config.json is read key by key: change it by layered(changes, config)")

    def __len__(self) -> int:
        return len(self.config)


class Field(NamedTuple):
    """A field of ``ModelConfig`` that is one key of ``config.json``.

    Attributes:
        name: ``num_layers``, or of Megatron's other fields ``transformer.q_lora_rank``.
        read: from ``config.json`` and the key to the value; raises ConfigError for another kind of value.
    """

    name: str
    read: Callable[[Mapping[str, Any], str], Any]

    def of(self, fields: Mapping[str, Any]) -> Any:
        """Return its value among the fields of a model."""
        inside = self.name.removeprefix("transformer.")
        return fields[self.name] if inside == self.name else fields["transformer"].get(inside)


def size(name: str) -> Field:
    """Return a field that is a whole number of at least 1."""
    return Field(name, size_of)


def layered(*mappings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a mapping with the value of each key in the first of ``mappings`` that has it."""
    return ChainMap(*mappings)  # type: ignore[arg-type]  # nothing writes to it


def size_of(config: Mapping[str, Any], key: str) -> int:
    """Return a key that is a whole number of at least 1.

    Raises:
        ConfigError: it is something else.
    """
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise _wrong(key, value, "a whole number of at least 1")
    return value


def optional_size_of(config: Mapping[str, Any], key: str) -> int | None:
    """Return a key that is a whole number of at least 1, or None if it is null or missing.

    Raises:
        ConfigError: it is something else.
    """
    return None if config.get(key) is None else size_of(config, key)


def count_of(config: Mapping[str, Any], key: str) -> int:
    """Return a key that is a whole number of at least 0.

    Raises:
        ConfigError: it is something else.
    """
    return 0 if type(config.get(key)) is int and config[key] == 0 else size_of(config, key)


def number_of(config: Mapping[str, Any], key: str) -> float:
    """Return a key that is a finite number above 0.

    Raises:
        ConfigError: it is something else.
    """
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise _wrong(key, value, "a number above 0")
    return value


def flag_of(config: Mapping[str, Any], key: str) -> bool:
    """Return a key that is true or false.

    Raises:
        ConfigError: it is something else.
    """
    value = config.get(key)
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return value


def _wrong(key: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"config.json: {key} is {value!r}; expected {expected}", key=key, value=value)


def not_built(key: str, value: Any, built: Any) -> ConfigError:
    """Return the error for a key of ``config.json`` whose value changes what is computed, and is not supported."""
    return ConfigError(f"config.json: {key} is {value!r}; only {built!r} is supported", key=key, value=value)
