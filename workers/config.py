"""The configurations of the workers. ``load_config`` reads one from files, mappings and overrides, strictly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcontroller.errors import ConfigError
from mcontroller.load_config import load_config
from parallel_state import ParallelLayout
from workers.fit import check_fit, check_generation, check_packing, divided_for

__all__ = [
    "ActorConfig",
    "CriticConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "load_config",
]

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Sizes of the axes for one role; dp is what is left of the world size.

    ``vpp`` is the number of model chunks on each pipeline rank (None: one, without interleaving); ``etp`` is tp
    where None; ``order`` is Megatron's order of the axes, fastest first.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int | None = None
    order: str = "tp-cp-ep-dp-pp"
    sequence_parallel: bool = False

    def layout(self, world_size: int) -> ParallelLayout:
        """The axes over ``world_size`` ranks. Raises LayoutError, with the arithmetic, where they do not divide it."""
        axes = {name: getattr(self, name) for name in ("tp", "pp", "cp", "ep", "etp", "vpp", "order")}
        return ParallelLayout(world_size, **axes)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A GPT model. Sizes are those of the whole model, before any axis divides it.

    ``None`` leaves Megatron's default: as many query groups as heads, a feed-forward width of four times the hidden
    size, a head width of hidden size over heads. ``activation`` is silu, gelu, gelu_tanh, relu, squared_relu or
    quick_gelu. ``rope_scaling_factor`` turns Llama 3's scaling of rotary positions on. ``dtype`` is float32, bfloat16
    or float16. ``transformer_impl`` is auto, transformer_engine or local. ``seed`` alone decides the initial weights,
    whatever the layout, unless they are read from ``hf_path``, a directory in Hugging Face's format (see
    ``workers.model_config_from_hf``). ``load_config`` takes every field that is not given from there too, unless all
    sizes are given. ``family`` is the ``model_type`` that the model is exported as; None: that of the registered family
    that is built like it. ``transformer`` holds any further field of Megatron's TransformerConfig by its own name.
    """

    vocab_size: int
    max_sequence_length: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    normalization: str = "RMSNorm"
    layernorm_epsilon: float = 1e-5
    gated_linear_unit: bool = True
    activation: str = "silu"
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    position_embedding_type: str = "rope"
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    rope_scaling_factor: float | None = None
    tie_embeddings: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    init_method_std: float = 0.02
    num_moe_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    dtype: str = "float32"
    transformer_impl: str = "auto"
    seed: int = 1234
    hf_path: str | None = None
    family: str | None = None
    transformer: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def find_fields(fields: Mapping[str, Any], missing: Sequence[str], key: str) -> dict[str, Any]:
        """What the checkpoint says of the model, where sizes are ``missing`` (see ``load_config``)."""
        from workers.weights.hf.config import model_fields_from_hf  # which imports this file

        if fields["hf_path"] is None:
            raise ConfigError(
                f"{key}hf_path is not set, and neither are {', '.join(key + name for name in missing)}: give the "
                "directory of a Hugging Face checkpoint, or the sizes of the model",
                key=f"{key}hf_path",
                missing=list(missing),
            )
        return model_fields_from_hf(fields["hf_path"])


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """AdamW, its learning rate over the optimizer's steps, and what is done with gradients before a step.

    The rate rises over ``warmup_steps`` from 0 to ``lr``, then falls to ``min_lr`` at ``total_steps`` in the way of
    ``decay_style`` (constant, linear, cosine, inverse-square-root, WSD; the last over its last ``wsd_decay_steps``).
    Gradients are clipped to a norm of ``clip_grad``; 0 leaves them. ``on_nonfinite`` says what a NaN or Inf among
    them does: ``raise`` stops the run, ``skip`` leaves the step out and counts it in the metrics.
    """

    lr: float = 1e-5
    min_lr: float = 0.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip_grad: float = 1.0
    warmup_steps: int = 0
    total_steps: int = 0
    decay_style: str = "constant"
    wsd_decay_steps: int = 0
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    on_nonfinite: str = "raise"

    def __post_init__(self) -> None:
        _at_least("optim.lr", self.lr, self.min_lr)
        _at_least("optim.min_lr", self.min_lr, 0.0)
        _at_least("optim.weight_decay", self.weight_decay, 0.0)
        _at_least("optim.clip_grad", self.clip_grad, 0.0)
        _above("optim.eps", self.eps, 0.0)
        for beta in self.betas:
            _between("optim.betas", beta, 0.0, 1.0)
        _at_least("optim.warmup_steps", self.warmup_steps, 0)
        _one_of("optim.decay_style", self.decay_style, DECAY_STYLES)
        _one_of("optim.on_nonfinite", self.on_nonfinite, ("raise", "skip"))
        if self.decay_style != "constant" and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"optim.total_steps is {self.total_steps}: decay_style={self.decay_style} ends there, which must be "
                f"after the {self.warmup_steps} steps of warm-up",
                key="optim.total_steps",
                value=self.total_steps,
            )
        if self.decay_style == "WSD":
            _between("optim.wsd_decay_steps", self.wsd_decay_steps, 1, self.total_steps - self.warmup_steps)
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ConfigError(
                "optim.overlap_param_gather needs optim.distributed_optimizer and optim.overlap_grad_reduce",
                key="optim.overlap_param_gather",
                value=True,
            )


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """How responses are sampled. A batch's meta_info may set any of the sampling fields for its own call.

    ``prompt_length`` and ``response_length`` are in tokens: no prompt may be longer, and every response is padded to
    the second. ``top_k`` of 0 and ``top_p`` of 1 keep the whole vocabulary; ``n`` is samples per prompt, next to each
    other. ``max_rows`` bounds how many rows a data-parallel rank generates at once (0: all), and with it the cache.
    ``parallel`` is a layout of its own over the same ranks, for a copy of the weights that is brought up to date before
    a generation that follows a change; None generates with the model that is trained, in its layout.
    """

    prompt_length: int = 512
    response_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    do_sample: bool = True
    n: int = 1
    seed: int = 0
    max_rows: int = 0
    parallel: ParallelConfig | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_length", "response_length", "n"):
            _at_least(f"rollout.{name}", getattr(self, name), 1)
        _at_least("rollout.top_k", self.top_k, 0)
        _at_least("rollout.max_rows", self.max_rows, 0)
        _above("rollout.temperature", self.temperature, 0.0)
        _above("rollout.top_p", self.top_p, 0.0)
        _between("rollout.top_p", self.top_p, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class ActorConfig:
    """An actor, its rollout and its reference.

    Attributes:
        ppo_mini_batch_size: rows of the whole batch to one optimizer step, over all data-parallel ranks.
        ppo_micro_batch_size: rows of one data-parallel rank to one pass through the model; for scoring it is
            ``log_prob_micro_batch_size`` (0: the same).
        ppo_max_tokens_per_micro_batch: where not 0, what bounds a pass in place of its rows: rows times the longest
            of them. Rows of similar length go together. A row longer than this goes alone. For scoring it is
            ``log_prob_max_tokens_per_micro_batch`` (0: the same).
        packed: whether the rows of a pass become one sequence without padding between them, in training and scoring.
            It then costs the sum of their lengths, which ``ppo_max_tokens_per_micro_batch`` bounds.
        shuffle: whether every epoch draws its own mini-batches, from ``seed``.
        clip_ratio_low, clip_ratio_high: in place of ``clip_ratio`` on one side.
        clip_ratio_c: the dual clip for negative advantages; None is without.
        kl_loss_type: k1, k2, k3 or abs.
        sft_optim: for ``update_sft``; None is ``optim``.
        log_prob_chunk_tokens: logits exist for this many tokens at once.
    """

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sft_optim: OptimConfig | None = None
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ppo_mini_batch_size: int = 256
    ppo_micro_batch_size: int = 8
    ppo_max_tokens_per_micro_batch: int = 0
    log_prob_micro_batch_size: int = 0
    log_prob_max_tokens_per_micro_batch: int = 0
    packed: bool = False
    ppo_epochs: int = 1
    shuffle: bool = True
    seed: int = 0
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float | None = None
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "k3"
    log_prob_chunk_tokens: int = 4096
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_fit(self.model, self.parallel)
        if self.rollout.parallel is not None:
            copy = divided_for(self.model, self.rollout.parallel, self.parallel)
            check_fit(copy, self.rollout.parallel, "rollout.parallel")
            check_generation(self.rollout.parallel, "rollout.parallel")
        if self.packed:
            check_packing(self.model)
        _check_batches(self)
        for name in ("log_prob_micro_batch_size", "log_prob_max_tokens_per_micro_batch"):
            _at_least(name, getattr(self, name), 0)
        _at_least("log_prob_chunk_tokens", self.log_prob_chunk_tokens, 1)
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            if getattr(self, name) is not None:
                _above(name, getattr(self, name), 0.0)
        if self.clip_ratio_c is not None:
            _above("clip_ratio_c", self.clip_ratio_c, 1.0)
        _one_of("kl_loss_type", self.kl_loss_type, ("k1", "k2", "k3", "abs"))
        for name in ("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
            if self.sft_optim is not None and getattr(self.sft_optim, name) != getattr(self.optim, name):
                raise ConfigError(
                    f"sft_optim.{name} is {getattr(self.sft_optim, name)}, optim.{name} {getattr(self.optim, name)}: "
                    "both phases train in the same gradient buffers; set them alike",
                    key=f"sft_optim.{name}",
                    value=getattr(self.sft_optim, name),
                )
        longest = self.rollout.prompt_length + self.rollout.response_length
        if longest > self.model.max_sequence_length:
            raise ConfigError(
                f"rollout.prompt_length {self.rollout.prompt_length} + rollout.response_length "
                f"{self.rollout.response_length} = {longest} is more than model.max_sequence_length "
                f"{self.model.max_sequence_length}",
                key="model.max_sequence_length",
                value=self.model.max_sequence_length,
            )


@dataclass(frozen=True, slots=True)
class CriticConfig:
    """A critic: the model with a value head. Batch sizes and ``packed`` as in ``ActorConfig``.

    ``cliprange_value`` is how far a value moves from its old one before it stops to pay; None leaves it free.
    """

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ppo_mini_batch_size: int = 256
    ppo_micro_batch_size: int = 8
    ppo_max_tokens_per_micro_batch: int = 0
    forward_micro_batch_size: int = 0
    forward_max_tokens_per_micro_batch: int = 0
    packed: bool = False
    ppo_epochs: int = 1
    shuffle: bool = True
    seed: int = 0
    cliprange_value: float | None = 0.5
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_fit(self.model, self.parallel)
        if self.packed:
            check_packing(self.model)
        _check_batches(self)
        for name in ("forward_micro_batch_size", "forward_max_tokens_per_micro_batch"):
            _at_least(name, getattr(self, name), 0)
        if self.cliprange_value is not None:
            _above("cliprange_value", self.cliprange_value, 0.0)


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """A reward model: the model with a value head, whose output at the last token of a response is its score.

    Batch sizes and ``packed`` as in ``ActorConfig``.
    """

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    micro_batch_size: int = 8
    max_tokens_per_micro_batch: int = 0
    packed: bool = False
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_fit(self.model, self.parallel)
        if self.packed:
            check_packing(self.model)
        _at_least("micro_batch_size", self.micro_batch_size, 1)
        _at_least("max_tokens_per_micro_batch", self.max_tokens_per_micro_batch, 0)
        _above("timeout_s", self.timeout_s, 0.0)


def _check_batches(config: ActorConfig | CriticConfig) -> None:
    for name in ("ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_epochs"):
        _at_least(name, getattr(config, name), 1)
    _at_least("ppo_max_tokens_per_micro_batch", config.ppo_max_tokens_per_micro_batch, 0)
    _above("timeout_s", config.timeout_s, 0.0)


def _at_least(key: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{key} is {value}; it must be at least {least}", key=key, value=value)


def _above(key: str, value: float, bound: float) -> None:
    if not value > bound:
        raise ConfigError(f"{key} is {value}; it must be more than {bound}", key=key, value=value)


def _between(key: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{key} is {value}; it must lie between {least} and {most}", key=key, value=value)


def _one_of(key: str, value: str, possible: tuple[str, ...]) -> None:
    if value not in possible:
        raise ConfigError(f"{key} is {value!r}; possible: {', '.join(possible)}", key=key, value=value)
