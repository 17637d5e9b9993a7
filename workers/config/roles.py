"""ActorConfig, CriticConfig and RewardConfig: the configurations of the workers, one for each role.

A configuration is checked as a whole when it is created: sizes against axes, lengths against the model, names against
registries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mcontroller.config.checks import check_above, check_at_least, check_one_of
from mcontroller.config.fields import check_unused, strict_fields, unused_if, used_if
from mcontroller.errors import ConfigError
from workers.config.fit import check_fit, check_packing
from workers.config.model import ModelConfig
from workers.config.optim import OptimConfig, check_ddp
from workers.config.parallel import ParallelConfig
from workers.config.rollout import RolloutConfig
from workers.losses.kl import check_kl_loss
from workers.losses.policy import AGGREGATIONS, POLICY_LOSSES


class MicroBatchSize(NamedTuple):
    """The most that one data-parallel rank takes at a time: ``rows``, or ``tokens`` if that is not 0.

    Tokens are rows times length, padding included, or the sum of lengths if rows are packed.
    """

    rows: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class TrainedConfig:
    """What an actor and a critic have in common."""

    model: ModelConfig
    """Architecture and initial weights."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Layout of training and scoring."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer of the updates."""
    ppo_mini_batch_size: int = used_if(256, ppo_mini_batch_prompts=0)
    """[rows] Responses of the whole batch in one optimizer step, over all data-parallel ranks."""
    ppo_mini_batch_prompts: int = 0
    """[prompts] The same in prompts: their responses are ``rollout.n`` times as many. 0: ppo_mini_batch_size."""
    ppo_micro_batch_size: int = 8
    """[rows] Rows of one data-parallel rank in one pass through the model."""
    ppo_max_tokens_per_micro_batch: int = 0
    """[tokens] Limit of a training pass, in place of rows: rows x longest row (packed: sum of lengths). 0: no limit.

    Rows of similar length are passed together. A row longer than the limit is passed alone.
    """
    packed: bool = False
    """Concatenate the rows of a pass into one sequence without padding, in training and scoring."""
    share_prompts: bool = True
    """Compute a prompt once for the rows of a pass that begin with it, and no padding, in training and scoring.

    Not done with experts, dropout, context parallelism or packed rows, or in custom models: the result would differ.
    """
    ppo_epochs: int = 1
    """[epochs] Passes over the batch in one update."""
    shuffle: bool = True
    """Draw new mini-batches from the seed in every epoch."""
    seed: int = 0
    """Seed of the mini-batches."""
    timeout_s: float = 7200.0
    """[seconds] Timeout of the rendezvous, of collectives, and of the calls of a run, longer than any stage of a step.

    Ranks wait in a collective while others of their group generate, start an engine or read files.
    """
    ddp: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's DistributedDataParallelConfig, under Megatron's names, except the ones that optim sets."""

    @property
    def update_size(self) -> MicroBatchSize:
        """The size of a training pass."""
        return MicroBatchSize(self.ppo_micro_batch_size, self.ppo_max_tokens_per_micro_batch)

    def _size_of_passes(self, rows: int, tokens: int) -> MicroBatchSize:
        """Return the size of a pass with these fields of its own, or if both are 0 that of a training pass."""
        return MicroBatchSize(rows, tokens) if rows or tokens else self.update_size

    def check_training(self) -> None:
        """Check the fields of this class against each other and against the model.

        Raises:
            ConfigError: a field does not fit; ``key`` names it.
        """
        check_fit(self.model, self.parallel)
        if self.packed:
            check_packing(self.model)
        for name in ("ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_epochs"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("ppo_mini_batch_prompts", self.ppo_mini_batch_prompts, 0)
        check_at_least("ppo_max_tokens_per_micro_batch", self.ppo_max_tokens_per_micro_batch, 0)
        check_above("timeout_s", self.timeout_s, 0.0)
        check_ddp(self.ddp)


@strict_fields
@dataclass(frozen=True, slots=True)
class ActorConfig(TrainedConfig):
    """An actor, its rollout and its reference policy."""

    sft_optim: OptimConfig | None = None
    """Optimizer of ``update_sft``. None: the same as optim.

    With other settings than optim, one optimizer replaces the other, so supervised steps and PPO cannot alternate: a
    call that goes back to a phase that has ended is rejected.
    """
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How responses are sampled."""
    log_prob_micro_batch_size: int = 0
    """[rows] Rows of one data-parallel rank in one scoring pass. 0, as the next field: as in training."""
    log_prob_max_tokens_per_micro_batch: int = 0
    """[tokens] Limit of a scoring pass, in place of rows."""
    router_replay: str = "none"
    """What chooses the experts of tokens in ``update_actor``: its own routers (none), or those of an earlier pass.

    old_log_probs: the pass that computed the old log-probabilities. rollout: generation, whose choices are replayed for
    the old log-probabilities too. The weights of the chosen experts are always computed from their present logits, so
    routers are trained.
    """
    policy_loss: str = "ppo"
    """Name of the policy loss: ppo (clipped), cispo, gpg, gspo, gmpo, or one of ``register_policy_loss``."""
    loss_agg_mode: str | None = None
    """Average of the loss: token-mean, seq-mean-token-mean, seq-mean-token-sum, or seq-mean-token-sum-norm.

    None: the policy loss's own, which is seq-mean-token-mean for gspo and gmpo, and token-mean for the others.
    """
    clip_ratio: float | None = None
    """Clip range of the probability ratio: 1 - clip_ratio to 1 + clip_ratio. None: the policy loss's own.

    ppo: 0.2. gspo: 3e-4 below 1, 4e-4 above. gmpo: 0.4, of the logarithm. cispo: no limit below 1, 0.2 above. gpg does
    not clip. One of ``register_policy_loss``: 0.2, or what it declares.
    """
    clip_ratio_low: float | None = None
    """Clip range below 1; 1 is no limit. None: clip_ratio."""
    clip_ratio_high: float | None = None
    """Clip range above 1. None: clip_ratio."""
    clip_ratio_c: float | None = None
    """Dual clip: bound of the loss of a negative advantage, as a multiple of it, above 1. None: no dual clip."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus in the loss."""
    use_kl_loss: bool | None = None
    """Add the KL divergence to the reference policy to the loss.

    None: ``RayPPOTrainer`` adds it if there is a reference and the KL is not in the reward; without a trainer, no.
    """
    kl_loss_coef: float = unused_if(0.001, use_kl_loss=False)
    """Weight of the KL divergence in the loss."""
    kl_loss_type: str = unused_if("k3", use_kl_loss=False)
    """Name of the KL estimator in the loss: k1+, k2, k3, k3+, abs, or one registered with ``register_kl_estimator``.

    k1+ and k3+ have the values of k1 and k3 and the gradient of k2, which is the gradient of the divergence. k1 is
    rejected: its gradient is zero in expectation.
    """
    kl_loss_clip: float | None = unused_if(None, use_kl_loss=False)
    """[nats] Limit of the KL estimate of a token in the loss, on both sides of 0; beyond it the token has no gradient
    of the KL. None: no limit."""
    log_prob_chunk_tokens: int = 4096
    """[tokens] Tokens whose logits exist at the same time."""

    def __post_init__(self) -> None:
        self.check_training()
        for name in ("log_prob_micro_batch_size", "log_prob_max_tokens_per_micro_batch"):
            check_at_least(name, getattr(self, name), 0)
        check_at_least("log_prob_chunk_tokens", self.log_prob_chunk_tokens, 1)
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            if getattr(self, name) is not None:
                check_above(name, getattr(self, name), 0.0)
        if self.kl_loss_clip is not None:
            check_above("kl_loss_clip", self.kl_loss_clip, 0.0)
        if self.clip_ratio_c is not None:
            check_above("clip_ratio_c", self.clip_ratio_c, 1.0)
        unused = POLICY_LOSSES.get_or_raise(self.policy_loss).unused
        check_unused(self, unused, "actor_rollout_ref.", f"with policy_loss={self.policy_loss}, which does not read it")
        if self.clip_ratio_low is not None and self.clip_ratio_high is not None:
            reason = "beside clip_ratio_low and clip_ratio_high, which replace it"
            check_unused(self, ("clip_ratio",), "actor_rollout_ref.", reason)
        if self.loss_agg_mode is not None:
            AGGREGATIONS.get_or_raise(self.loss_agg_mode)
        check_kl_loss(self.kl_loss_type)
        _check_buffers(self)
        _check_router_replay(self)
        starting = self.rollout.vllm.start_timeout_s
        if self.rollout.engine == "vllm" and self.timeout_s <= starting:
            raise ConfigError(
                f"timeout_s is {self.timeout_s:g} s, and rollout.vllm.start_timeout_s {starting:g} s: other ranks wait "
                "in a collective while an engine starts; set a longer timeout_s",
                key="timeout_s",
                value=self.timeout_s,
            )

    @property
    def scoring_size(self) -> MicroBatchSize:
        """The size of a scoring pass."""
        return self._size_of_passes(self.log_prob_micro_batch_size, self.log_prob_max_tokens_per_micro_batch)

    def clip_limits(self) -> tuple[float, float]:
        """Return the clip range below and above 1 in force: from the configuration, or else from the policy loss."""
        loss = POLICY_LOSSES[self.policy_loss]
        low, high = (loss.clip_low, loss.clip_high) if self.clip_ratio is None else (self.clip_ratio, self.clip_ratio)
        return (
            low if self.clip_ratio_low is None else self.clip_ratio_low,
            high if self.clip_ratio_high is None else self.clip_ratio_high,
        )

    def check_lengths(self) -> None:
        """Check that a prompt and its response fit into the model's sequences, for an actor that generates.

        Raises:
            ConfigError: together they can be longer.
        """
        prompt, response = self.rollout.prompt_length, self.rollout.response_length
        longest = self.model.max_sequence_length
        if prompt + response > longest:
            raise ConfigError(
                f"rollout.prompt_length {prompt} + rollout.response_length {response} = {prompt + response} is more "
                f"than model.max_sequence_length {longest}",
                key="model.max_sequence_length",
                value=longest,
            )


@strict_fields
@dataclass(frozen=True, slots=True)
class CriticConfig(TrainedConfig):
    """A critic: the model with a value head."""

    forward_micro_batch_size: int = 0
    """[rows] Rows of one data-parallel rank in one pass of ``compute_values``. 0, as the next field: as in training."""
    forward_max_tokens_per_micro_batch: int = 0
    """[tokens] Limit of a pass of ``compute_values``, in place of rows."""
    cliprange_value: float | None = 0.5
    """Clip range of a value around its old value in the loss. None: no clipping."""

    @property
    def scoring_size(self) -> MicroBatchSize:
        """The size of a pass of ``compute_values``."""
        return self._size_of_passes(self.forward_micro_batch_size, self.forward_max_tokens_per_micro_batch)

    def __post_init__(self) -> None:
        self.check_training()
        for name in ("forward_micro_batch_size", "forward_max_tokens_per_micro_batch"):
            check_at_least(name, getattr(self, name), 0)
        if self.cliprange_value is not None:
            check_above("cliprange_value", self.cliprange_value, 0.0)


@strict_fields
@dataclass(frozen=True, slots=True)
class RewardConfig:
    """A reward model: the model with a value head, whose output at the last token of a response is its score."""

    model: ModelConfig
    """Architecture and initial weights."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Layout of scoring."""
    micro_batch_size: int = 8
    """[rows] Rows of one data-parallel rank in one pass through the model."""
    max_tokens_per_micro_batch: int = 0
    """[tokens] Limit of a pass, in place of rows: rows x longest row (packed: sum of lengths). 0: no limit."""
    packed: bool = False
    """Concatenate the rows of a pass into one sequence without padding."""
    timeout_s: float = 7200.0
    """[seconds] Timeout of the rendezvous, of collectives, and of the calls of a run, longer than any stage of a step.

    Ranks wait in a collective while others of their group generate, start an engine or read files.
    """

    @property
    def scoring_size(self) -> MicroBatchSize:
        """The size of a scoring pass."""
        return MicroBatchSize(self.micro_batch_size, self.max_tokens_per_micro_batch)

    def __post_init__(self) -> None:
        check_fit(self.model, self.parallel)
        if self.packed:
            check_packing(self.model)
        check_at_least("micro_batch_size", self.micro_batch_size, 1)
        check_at_least("max_tokens_per_micro_batch", self.max_tokens_per_micro_batch, 0)
        check_above("timeout_s", self.timeout_s, 0.0)


OF_UPDATES = (
    *("optim", "sft_optim", "ppo_mini_batch_size", "ppo_mini_batch_prompts", "ppo_epochs", "shuffle", "seed", "ddp"),
    *("policy_loss", "loss_agg_mode", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    *("entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type", "kl_loss_clip"),
)
"""The fields of ActorConfig that only its updates read."""
RoleConfig = ActorConfig | CriticConfig | RewardConfig
"""The configuration of the workers of any role."""


def _check_buffers(config: ActorConfig) -> None:
    """Raise ConfigError if the optimizers of PPO and SFT need different gradient buffers."""
    if config.sft_optim is None:
        return
    for name in ("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
        sft, ppo = getattr(config.sft_optim, name), getattr(config.optim, name)
        if sft != ppo:
            raise ConfigError(
                f"sft_optim.{name} is {sft}, optim.{name} is {ppo}: both use the same gradient buffers; set both "
                "to the same value",
                key=f"sft_optim.{name}",
                value=sft,
            )


def _check_router_replay(config: ActorConfig) -> None:
    """Raise ConfigError if there are no routers, or none whose choice can be recorded."""
    mode, model = config.router_replay, config.model
    check_one_of("router_replay", mode, ("none", "old_log_probs", "rollout"))
    if mode == "none":
        return
    if model.num_moe_experts is None:
        text = f"router_replay is {mode!r}, but the model has no experts: set it to none"
        raise ConfigError(text, key="router_replay", value=mode)
    if model.transformer.get("moe_router_fusion"):
        key = "model.transformer.moe_router_fusion"
        raise ConfigError(
            f"{key} is True with router_replay={mode!r}: the fused kernel does not report its choice, nor takes one; "
            "leave it out",
            key=key,
            value=True,
        )
