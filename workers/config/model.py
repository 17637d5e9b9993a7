"""ModelConfig: the architecture and the initial weights of a GPT model."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mcontroller.config.checks import check_above, check_at_least, check_between, check_one_of
from mcontroller.config.fields import check_unused, strict_fields, unused_if, used_if
from mcontroller.errors import ConfigError
from workers.config.lora import LoraConfig
from workers.weights.hf.config import describes_model, has_bridge, model_fields_from_hf
from workers.weights.hf.hub import local_directory

# Fields that only a native model reads: Bridge has them from config.json.
_NATIVE = {
    "normalization",
    "gated_linear_unit",
    "activation",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rope_scaling_factor",
    "hybrid_layer_pattern",
    "transformer_impl",
}


@strict_fields
@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A GPT model. Sizes are of the whole model, before any axis divides it.

    With ``hf_path`` set, ``load_config`` reads every size that is not set from the checkpoint's ``config.json``.
    """

    vocab_size: int
    """[tokens] Size of the vocabulary, without padding."""
    max_sequence_length: int
    """[tokens] Longest sequence, prompt and response together."""
    num_layers: int
    """[layers] Transformer layers of the whole model."""
    hidden_size: int
    """[channels] Width of the hidden states."""
    num_attention_heads: int
    """[heads] Attention heads of each layer."""
    num_query_groups: int | None = None
    """[groups] Key-value heads of each layer (grouped-query attention). None: as many as heads."""
    ffn_hidden_size: int | None = None
    """[channels] Width inside the MLP. None: 4 times hidden_size."""
    kv_channels: int | None = None
    """[channels] Width of one head. None: hidden_size / num_attention_heads."""
    normalization: str = "RMSNorm"
    """Normalization layer: RMSNorm or LayerNorm."""
    layernorm_epsilon: float = 1e-5
    """Epsilon inside the normalization's square root."""
    gated_linear_unit: bool = True
    """Multiply the MLP's activation with a second projection (SwiGLU with silu)."""
    activation: str = "silu"
    """Activation of the MLP: silu, gelu, gelu_tanh, relu, squared_relu or quick_gelu."""
    add_bias_linear: bool = False
    """Add a bias to every linear layer."""
    add_qkv_bias: bool = False
    """Add a bias to the query, key and value projections only."""
    qk_layernorm: bool = False
    """Normalize queries and keys of each head."""
    position_embedding_type: str = "rope"
    """Position embeddings: rope, learned_absolute or none."""
    rotary_base: int = used_if(10000, position_embedding_type="rope")
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = used_if(1.0, position_embedding_type="rope")
    """Fraction of each head's channels that are rotated, 0 to 1."""
    rope_scaling_factor: float | None = used_if(None, position_embedding_type="rope")
    """Factor of Llama 3's scaling of rotary positions. None: no scaling."""
    tie_embeddings: bool = False
    """Use the input embedding as the output projection."""
    attention_dropout: float = 0.0
    """Dropout probability of attention weights, 0 to 1."""
    hidden_dropout: float = 0.0
    """Dropout probability of hidden states, 0 to 1."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights."""
    num_moe_experts: int | None = None
    """[experts] Experts of each mixture-of-experts layer. None: a dense model."""
    moe_router_topk: int = unused_if(2, num_moe_experts=None)
    """[experts] Experts that compute each token."""
    moe_ffn_hidden_size: int | None = unused_if(None, num_moe_experts=None)
    """[channels] Width inside each expert. None: ffn_hidden_size."""
    dtype: str = "float32"
    """Type of the parameters and of the computation: float32, bfloat16 or float16."""
    hybrid_layer_pattern: str | None = None
    """Letters of a HybridModel (megatron-core 0.19), such as ``*-*E``. None: a GPTModel, which computes the same.

    Two for each layer: attention is ``*`` (``+`` if multi-latent), an MLP ``-``, and experts are ``E``. With Mamba
    layers, ``M``, each letter is a layer. Stages follow from parallel.pp: ``|`` is ignored.
    """
    transformer_impl: str = "auto"
    """Layer implementation: transformer_engine, local (plain PyTorch), or auto (Transformer Engine on GPUs)."""
    seed: int = 1234
    """Seed of the initial weights, which are the same for every layout."""
    hf_path: str | None = None
    """Directory of a Hugging Face checkpoint with the initial weights, or a name of the hub, such as Qwen/Qwen3-0.6B,
    which is downloaded. None: random weights from the seed."""
    provider: str = "auto"
    """What builds the model: native (the families of this package), bridge (Megatron-Bridge, docs/models.md), or auto.

    auto is bridge for a model that is as its config.json says, where Bridge and Transformer Engine are installed.
    """
    verify_load: str = "auto"
    """Compare every layer with transformers after a load and an export: layers, off, or auto (files up to 1 GiB).

    With provider=bridge, auto is layers.
    """
    family: str | None = None
    """Model type that the model is exported as. None: the type of the registered family that is built like it."""
    lora: LoraConfig | None = None
    """Adapters of low rank, which are trained in place of the weights. None: the weights are trained."""
    freeze: list[str] = field(default_factory=list)
    """Weights that are not trained, by patterns: the end of a name in Megatron or Hugging Face, such as router.weight.

    A pattern may contain ``*``, as decoder.layers.0.*; such weights cost neither gradients nor optimizer state.
    """
    train_only: list[str] = field(default_factory=list)
    """The only weights that are trained, by patterns as in freeze. Empty: all; with lora, none beside the adapters."""
    transformer: dict[str, Any] = field(default_factory=dict)
    """Other fields of Megatron's TransformerConfig, under Megatron's names."""

    def __post_init__(self) -> None:
        check_one_of("model.provider", self.provider, ("auto", "native", "bridge"))
        if self.provider == "auto":
            given = {field.name: getattr(self, field.name) for field in fields(self)}
            object.__setattr__(self, "provider", automatic_provider(given))
        if self.provider == "bridge" and self.hf_path is None:
            text = (
                "model.provider is 'bridge', which builds what a config.json describes: set model.hf_path, or "
                "model.provider=native before the sizes are read"
            )
            raise ConfigError(text, key="model.hf_path", value=None)
        if self.provider == "bridge" and self.hybrid_layer_pattern is not None:
            raise ConfigError(
                "model.hybrid_layer_pattern is the pattern of a model that this package builds, but model.provider is "
                "'bridge': leave the pattern out, or set model.provider=native",
                key="model.hybrid_layer_pattern",
                value=self.hybrid_layer_pattern,
            )
        check_one_of("model.verify_load", self.verify_load, ("auto", "layers", "off"))
        positions = ("rope", "learned_absolute", "none")  # which decide what else has an effect
        check_one_of("model.position_embedding_type", self.position_embedding_type, positions)
        check_above("model.layernorm_epsilon", self.layernorm_epsilon, 0.0)
        check_at_least("model.init_method_std", self.init_method_std, 0.0)
        if self.rope_scaling_factor is not None:
            check_above("model.rope_scaling_factor", self.rope_scaling_factor, 0.0)
        for name in ("rotary_percent", "attention_dropout", "hidden_dropout"):
            check_between(f"model.{name}", getattr(self, name), 0.0, 1.0)
        if self.lora is not None and not self.train_only:
            reason = "with model.lora, whose adapters alone are trained: model.train_only names weights beside them"
            check_unused(self, ("freeze",), "model.", reason)

    @property
    def prediction_layers(self) -> int:
        """The layers of multi-token prediction that are built."""
        return int(self.transformer.get("mtp_num_layers") or 0)

    @property
    def expert_layers(self) -> list[int]:
        """The indices of the layers that have experts, if the model has any."""
        every = self.transformer.get("moe_layer_freq", 1)
        if isinstance(every, int):
            return list(range(0, self.num_layers, every))
        return [index for index, has_experts in enumerate(every) if has_experts]

    @property
    def names_layers(self) -> bool:
        """Whether patterns of what is trained have numbers of layers, so that layers are not alike."""
        adapted = [] if self.lora is None else [*self.lora.targets, *self.lora.exclude]
        patterns = [*self.freeze, *self.train_only, *adapted]
        return any(re.search(r"(^|\.)[^a-zA-Z.]*[0-9][^a-zA-Z.]*(\.|$)", pattern) for pattern in patterns)

    @property
    def has_states(self) -> bool:
        """Whether layers have a recurrent state; each letter of the pattern is a layer then."""
        return "M" in (self.hybrid_layer_pattern or "")

    @property
    def trains_prediction(self) -> bool:
        """Whether updates train these layers; otherwise they are kept as they are."""
        return self.prediction_layers > 0 and self.transformer.get("mtp_loss_scaling_factor", 0.1) != 0

    @staticmethod
    def find_fields(fields: Mapping[str, Any], missing: Sequence[str], key: str) -> dict[str, Any]:
        """Return the fields that the checkpoint at ``hf_path`` determines; called by ``load_config``.

        Raises:
            ConfigError: fields are missing and ``hf_path`` is not set, or its ``config.json`` cannot be used.
        """
        if not missing and (fields["hf_path"] is None or not describes_model(fields["hf_path"])):
            return {}  # a program builds the model
        if fields["hf_path"] is None:
            raise ConfigError(
                f"{key}hf_path is not set, and neither are {', '.join(key + name for name in missing)}: set the "
                "directory of a Hugging Face checkpoint, or the sizes of the model",
                key=f"{key}hf_path",
                value=None,
                missing=list(missing),
            )
        provider = automatic_provider(fields) if fields["provider"] == "auto" else fields["provider"]
        return model_fields_from_hf(local_directory(fields["hf_path"], f"{key}hf_path"), provider)


def automatic_provider(given: Mapping[str, Any]) -> str:
    """Return what builds a model with ``provider="auto"`` and these fields of ModelConfig."""
    is_changed = any(
        given.get(field.name, field.default) != field.default for field in fields(ModelConfig) if field.name in _NATIVE
    )
    return "bridge" if given["hf_path"] is not None and not is_changed and has_bridge() else "native"


def model_config_from_hf(path: str | os.PathLike[str], **changes: Any) -> ModelConfig:
    """Return the model in a directory in Hugging Face's format, with ``hf_path`` set so that its weights are loaded.

    For random weights: ``dataclasses.replace(config, hf_path=None)``.

    Args:
        path: a directory with a ``config.json`` of a supported model family.
        changes: fields of ModelConfig that replace the checkpoint's. Without ``provider``, it is that of
            ``model.provider=auto``.

    Raises:
        ConfigError: no ``config.json``, an unsupported family, or a key whose value changes the computation and is
            not supported; ``key`` and ``value`` name it.

    Examples:
        >>> model_config_from_hf("/models/Qwen3-0.6B", dtype="bfloat16")
    """
    provider = changes.pop("provider", "auto")
    if provider == "auto":
        provider = automatic_provider({"hf_path": path, **changes})
    given = model_fields_from_hf(path, provider)
    transformer = given.pop("transformer", {}) | changes.pop("transformer", {})
    return replace(ModelConfig(**given, transformer=transformer), **changes)
