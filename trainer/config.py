"""Configuration of the controller program; the configurations of the workers are passed to them unchanged."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from mcontroller.config.checks import check_above, check_at_least, check_between, check_one_of
from mcontroller.config.fields import check_unused, strict_fields, unknown_field, unused_if, used_if
from mcontroller.errors import ConfigError
from trainer.estimators.built_in import (
    GAEOptions,
    GPGOptions,
    GRPOOptions,
    ReinforcePlusPlusBaselineOptions,
    ReinforcePlusPlusOptions,
    RLOOOptions,
)
from trainer.estimators.registry import ADVANTAGE_ESTIMATORS, KLInReward
from trainer.kl import KLControlConfig
from workers.config.sampling import check_setting
from workers.losses.kl import KL_ESTIMATORS

OLD_LOG_PROBS = ("auto", "policy", "rollout")
OFFLOAD_CHOICES = ("auto", "always", "never")

SCORE = "score"
"""The metric that stands for the scores to train on."""
TAKES = ("completed", "in_order")
STALE = ("finish", "drop")
PARTIAL = ("continue", "finish", "stop")
SCHEDULES = ("live", "simulated")
LEVELS = ("none", "token", "sequence", "geometric")
MODES = ("truncate", "mask", "decoupled")


@strict_fields
@dataclass(frozen=True, slots=True)
class FilterGroupsConfig:
    """Dynamic sampling: draw other prompts in place of prompts whose responses all have the same score."""

    enable: bool = False
    """Draw again."""
    metric: str = unused_if(SCORE, enable=False)
    """Values that must differ in a group: score (with length penalties), or a column of the reward such as accuracy."""
    max_batches: int = unused_if(10, enable=False)
    """[batches] Most batches of prompts that one step generates. Groups of equal scores then fill the rest of it."""

    def __post_init__(self) -> None:
        check_at_least("algorithm.filter_groups.max_batches", self.max_batches, 1)


@strict_fields
@dataclass(frozen=True, slots=True)
class OverlongConfig:
    """DAPO's soft penalty for responses that are almost, or exactly, as long as the longest possible one."""

    buffer: int = unused_if(0, penalty=0.0)
    """[tokens] Tokens before ``rollout.response_length`` in which the penalty grows from 0. 0: no penalty."""
    penalty: float = unused_if(1.0, buffer=0)
    """Penalty of a response of the full length, subtracted from its score."""

    def __post_init__(self) -> None:
        check_at_least("algorithm.overlong.buffer", self.buffer, 0)
        check_at_least("algorithm.overlong.penalty", self.penalty, 0.0)


@strict_fields
@dataclass(frozen=True, slots=True)
class MultiTurnConfig:
    """Responses of several turns, between which tools, a simulated world or an agent reply."""

    episode: str | None = None
    """Import path of an async function or class that makes a response, such as ``my_module:episode``; see
    docs/rollout.md. None: one turn."""
    options: dict[str, Any] = unused_if(dict, episode=None)
    """Other keyword arguments of the episode."""
    processes: int = unused_if(1, episode=None)
    """[processes] In which episodes run; 0: in the controller, in a fixed order."""
    concurrency: int = unused_if(256, episode=None)
    """[episodes] Most of them at a time."""
    timeout_s: float = unused_if(60.0, episode=None)
    """[s] Longest time that an episode may take between two turns of the policy."""

    def __post_init__(self) -> None:
        check_at_least("multi_turn.processes", self.processes, 0)
        check_at_least("multi_turn.concurrency", self.concurrency, 1)
        check_above("multi_turn.timeout_s", self.timeout_s, 0.0)


@strict_fields
@dataclass(frozen=True, slots=True)
class ImportanceConfig:
    """Importance weights ``policy / rollout`` of the sampled tokens in the policy loss; see docs/rollout.md."""

    level: str = "none"
    """Weight of a token: its own ratio (token), the product of the ratios of its response (sequence), their geometric
    mean (geometric), or none."""
    mode: str = unused_if("truncate", level="none")
    """Limit of the weights: truncate to threshold, mask the tokens whose weight is outside of the limits, or none as in
    decoupled PPO (decoupled)."""
    threshold: float = unused_if(2.0, level="none", mode="decoupled")
    """Highest weight. Not with mode=decoupled."""
    least: float = used_if(0.0, mode="mask")
    """Lowest weight that is not masked; 0 keeps all. Only with mode=mask."""
    off_policy_mask: float | None = None
    """[nats per token] Leave responses with a negative advantage out of the loss if the rollout gave their tokens
    a log-probability that is higher by more than this, in the mean, than the policy's. None: keep all."""

    def __post_init__(self) -> None:
        check_one_of("algorithm.importance.level", self.level, LEVELS)
        check_one_of("algorithm.importance.mode", self.mode, MODES)
        check_above("algorithm.importance.threshold", self.threshold, 0.0)
        if self.off_policy_mask is not None:
            check_at_least("algorithm.importance.off_policy_mask", self.off_policy_mask, 0.0)

    @property
    def is_on(self) -> bool:
        """Whether a correction reads the log-probabilities of the policy."""
        return self.level != "none" or self.off_policy_mask is not None


@strict_fields
@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """The computation of advantages from scores."""

    adv_estimator: str = "gae"
    """Name of the advantage estimator: gae (needs a critic), grpo, rloo, opo, gpg, reinforce_plus_plus,
    reinforce_plus_plus_baseline, remax, or one that you registered."""
    gamma: float = 1.0
    """Discount factor per token, 0 to 1."""
    lam: float = 1.0
    """Lambda of generalized advantage estimation, 0 to 1."""
    gae: GAEOptions = field(default_factory=GAEOptions)
    """Options of gae."""
    grpo: GRPOOptions = field(default_factory=GRPOOptions)
    """Options of grpo."""
    rloo: RLOOOptions = field(default_factory=RLOOOptions)
    """Options of rloo."""
    gpg: GPGOptions = field(default_factory=GPGOptions)
    """Options of gpg."""
    reinforce_plus_plus: ReinforcePlusPlusOptions = field(default_factory=ReinforcePlusPlusOptions)
    """Options of reinforce_plus_plus."""
    reinforce_plus_plus_baseline: ReinforcePlusPlusBaselineOptions = field(
        default_factory=ReinforcePlusPlusBaselineOptions
    )
    """Options of reinforce_plus_plus_baseline."""
    custom: dict[str, Any] = field(default_factory=dict)
    """Options of an estimator that you registered: fields of its class of options."""
    use_kl_in_reward: bool | None = None
    """Subtract a KL penalty to the reference policy from the scores. None: for gae and reinforce_plus_plus only.

    The other estimators have the KL divergence in the loss by default (``actor_rollout_ref.use_kl_loss``). grpo and gpg
    reject the penalty in the reward: a group of equal scores would learn from differences of the KL.
    """
    kl_penalty: str = "k1"
    """Name of the KL estimator in the penalty: k1, k2, k3, abs, or one registered with ``register_kl_estimator``."""
    kl_clip: float | None = None
    """[nats] Limit of the KL estimate of a token in the penalty, on both sides of 0. None: no limit."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    """Weight of the KL penalty."""
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)
    """Correction of the mismatch between the policy that generated and the one that trains."""
    old_log_probs: str = "auto"
    """Log-probabilities in the denominator of the ratio: policy, rollout or auto.

    policy: of the policy before the update, computed in a separate pass. rollout: the ones with which the
    responses were sampled. auto: policy, without the pass if the update makes one optimizer step and nothing else reads
    them.
    """
    reward_clip: float | None = None
    """Limit of the score of a response, on both sides of 0, before advantages are computed; metrics have scores without
    it. None: no limit."""
    advantage_clip: float | None = None
    """Limit of the advantage of a token, on both sides of 0, after the estimator's normalization. None: no limit."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Dynamic sampling."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """Penalty of responses that are almost as long as the longest possible one."""
    mask_truncated: bool = False
    """Leave responses that were cut off, for lack of room or turns, out of the losses. Their scores still count in the
    group."""

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            check_between(f"algorithm.{name}", getattr(self, name), 0.0, 1.0)
        estimator = ADVANTAGE_ESTIMATORS.get_or_raise(self.adv_estimator)
        KL_ESTIMATORS.get_or_raise(self.kl_penalty, key="algorithm.kl_penalty")
        for name in ("kl_clip", "reward_clip", "advantage_clip"):
            if getattr(self, name) is not None:
                check_above(f"algorithm.{name}", getattr(self, name), 0.0)
        if self.use_kl_in_reward and estimator.kl_in_reward is KLInReward.REJECTED:
            raise ConfigError(
                f"algorithm.use_kl_in_reward is true with adv_estimator={self.adv_estimator}: differences of the KL "
                "inside a group of equal scores would be trained on. Set algorithm.use_kl_in_reward=false and "
                "actor_rollout_ref.use_kl_loss=true",
                key="algorithm.use_kl_in_reward",
                value=True,
            )
        check_one_of("algorithm.old_log_probs", self.old_log_probs, OLD_LOG_PROBS)
        if self.old_log_probs == "rollout" and self.importance.is_on:
            raise ConfigError(
                f"algorithm.importance.level is {self.importance.level!r} with algorithm.old_log_probs='rollout': "
                "every weight would be 1. Set algorithm.old_log_probs=policy, or algorithm.importance.level=none and "
                "off_policy_mask=null",
                key="algorithm.old_log_probs",
                value="rollout",
            )
        self.options()
        self._check_unused()

    def _check_unused(self) -> None:
        """Raise ConfigError if an option is set that the estimator, or the reward without a KL, does not read."""
        estimator = ADVANTAGE_ESTIMATORS[self.adv_estimator]
        chosen = f"with algorithm.adv_estimator={self.adv_estimator}"
        others = [
            name
            for name, other in ADVANTAGE_ESTIMATORS.items()
            if other is not estimator and isinstance(getattr(self, name, None), other.options or ())
        ]
        check_unused(self, others, "algorithm.", f"{chosen}: these are options of another estimator")
        if not self.kl_in_reward:
            reason = f"without a KL in the reward ({chosen}): set algorithm.use_kl_in_reward=true, or kl_loss_type and "
            reason += "kl_loss_coef of actor_rollout_ref for a KL in the loss"
            check_unused(self, ("kl_penalty", "kl_ctrl", "kl_clip"), "algorithm.", reason)
        unused = [name for name in ("gamma", "lam") if name not in estimator.reads]
        if self.kl_in_reward:
            unused = [name for name in unused if name != "gamma"]  # it discounts the penalty
        check_unused(self, unused, "algorithm.", chosen)

    @property
    def kl_in_reward(self) -> bool:
        """Whether a KL penalty is part of the reward, with the default of the estimator resolved."""
        default = ADVANTAGE_ESTIMATORS[self.adv_estimator].kl_in_reward is KLInReward.DEFAULT
        return default if self.use_kl_in_reward is None else self.use_kl_in_reward

    def options(self) -> Any:
        """Return the options of the chosen estimator; None if it has none.

        Raises:
            ConfigError: ``custom`` has a key that is not an option of the estimator.
        """
        expected = ADVANTAGE_ESTIMATORS[self.adv_estimator].options
        if isinstance(section := getattr(self, self.adv_estimator, None), expected or ()):
            chosen = section
        elif expected is None:
            chosen = None
        else:
            known = {option.name for option in dataclasses.fields(expected)}
            for name in self.custom:
                if name not in known:
                    raise unknown_field(expected, name, "algorithm.custom.")
            return expected(**self.custom)
        if self.custom:
            raise ConfigError(
                f"algorithm.custom has {', '.join(self.custom)}; adv_estimator={self.adv_estimator} reads no custom "
                "options",
                key="algorithm.custom",
                value=self.custom,
            )
        return chosen


@strict_fields
@dataclass(frozen=True, slots=True)
class DataConfig:
    """Batches of problems."""

    train_batch_size: int = 256
    """[problems] Problems of one step."""
    val_batch_size: int = 0
    """[problems] Held-out problems that are generated at once. 0: all."""
    seed: int = 0
    """Seed of the order of the problems."""

    def __post_init__(self) -> None:
        check_at_least("data.train_batch_size", self.train_batch_size, 1)
        check_at_least("data.val_batch_size", self.val_batch_size, 0)


@strict_fields
@dataclass(frozen=True, slots=True)
class ValidationConfig:
    """How the responses to held-out problems are sampled."""

    n: int = 1
    """[responses] Responses to each problem. With more than one, the best and the mean of each problem are reported."""
    do_sample: bool = False
    """Sample; False takes the most likely token."""
    temperature: float = unused_if(1.0, do_sample=False)
    """Temperature of the samples."""
    top_p: float = unused_if(1.0, do_sample=False)
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: int = unused_if(0, do_sample=False)
    """[tokens] Sample from the most likely tokens. 0: all."""
    response_length: int | None = None
    """[tokens] Longest response, at most ``rollout.response_length``. None: that."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value is not None:
                check_setting(f"validation.{name}", name, value)
        if self.n > 1 and not self.do_sample:
            raise ConfigError(
                f"validation.n is {self.n} with validation.do_sample=false, which generates {self.n} equal responses: "
                "set validation.do_sample=true, or validation.n=1",
                key="validation.n",
                value=self.n,
            )

    def sampling(self) -> dict[str, Any]:
        """Return the settings of the rollout."""
        length = {} if self.response_length is None else {"response_length": self.response_length}
        if not self.do_sample:
            return {"do_sample": False, "n": 1, **length}
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@strict_fields
@dataclass(frozen=True, slots=True)
class WarmUpConfig:
    """A supervised phase before PPO."""

    steps: int = 0
    """[optimizer steps] Length of the phase. 0: none."""
    batch_size: int = unused_if(256, steps=0)
    """[demonstrations] Demonstrations of one step."""

    def __post_init__(self) -> None:
        check_at_least("warm_up.steps", self.steps, 0)
        check_at_least("warm_up.batch_size", self.batch_size, 1)


@strict_fields
@dataclass(frozen=True, slots=True)
class AsynchronousConfig:
    """Generation by trajectory beside training, with ``trainer.max_staleness`` of 2 or more."""

    take: str = "completed"
    """Groups of responses that a step trains on: completed (those that ended first), or in_order (of the data)."""
    stale: str = "finish"
    """Groups that would become older than max_staleness: finish (the step waits for them), or drop (their tokens are
    thrown away, and their problems begin again)."""
    partial: str = "continue"
    """Responses in flight when the weights move: continue (with the new weights), finish (before the weights move), or
    stop (they wait until the responses that begin with the new weights have their tokens)."""
    schedule: str = "live"
    """Order in which responses arrive: live (as it happens), or simulated (a random legal order, the same for one
    seed)."""
    seed: int = unused_if(0, schedule="live")
    """Seed of the simulated schedule."""
    replay: str | None = None
    """Directory of a run whose recorded responses this run trains on, in their order. None: it generates."""
    check_replay: bool = unused_if(False, replay=None)
    """Generate the recorded tokens again, and end at the first one that differs; not with episodes."""

    def __post_init__(self) -> None:
        check_one_of("trainer.asynchronous.take", self.take, TAKES)
        check_one_of("trainer.asynchronous.stale", self.stale, STALE)
        check_one_of("trainer.asynchronous.partial", self.partial, PARTIAL)
        check_one_of("trainer.asynchronous.schedule", self.schedule, SCHEDULES)


@strict_fields
@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """Steps and ranks that profilers record; the files are in ``profiles`` of ``trainer.default_local_dir``."""

    steps: tuple[int, ...] = ()
    """Steps of PPO that the actor and the critic are profiled in. Empty: none."""
    at: dict[str, int] = unused_if(dict, steps=())
    """Coordinates of the ranks, such as {tp: 0, pp: 1}; axes that are not given have all. Empty: all ranks."""
    nsys: bool = unused_if(False, steps=())
    """Mark the window and the methods for `nsys profile --capture-range=cudaProfilerApi` in place of torch.profiler."""
    memory: bool = False
    """Record the allocations of GPUs; an out-of-memory error writes a snapshot for https://pytorch.org/memory_viz."""


@strict_fields
@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Length of the run, and when it is validated and saved."""

    total_training_steps: int = 100
    """[steps] Steps of PPO."""
    epochs: int = 0
    """[passes] Train until the training data has been read so often, in place of ``total_training_steps``; with dynamic
    sampling, a step reads more than one batch. 0: ``total_training_steps``."""
    critic_warmup: int = 0
    """[steps] Steps at the start in which only the critic is trained."""
    val_before_train: bool = True
    """Validate before the first step as well."""
    test_freq: int = 0
    """[steps] Validate every so many steps and after the last one. 0: only after the last one. -1: never."""
    save_freq: int = 0
    """[steps] Save a checkpoint every so many steps. 0: as save_minutes says, and after the last one. -1: never."""
    save_minutes: float = used_if(10.0, save_freq=0)
    """[minutes] With save_freq=0, save after the first step that ends so long after the last save. 0: never."""
    memory_save_freq: int = unused_if(0, max_restarts=0)
    """[steps] Copy the state of every rank to the memory of its node and another one every so many steps; recovery from
    a failure then loads it if it is newer than the last checkpoint. 0: never. See docs/reliability.md."""
    max_to_keep: int | None = 3
    """[checkpoints] Newest checkpoints that are kept. None: all."""
    keep_best: int = unused_if(0, max_to_keep=None)
    """[checkpoints] Checkpoints with the best values of best_metric that are kept besides the newest. 0: none."""
    best_metric: str = unused_if("held_out/score", keep_best=0)
    """Metric of validation that keep_best compares."""
    best_mode: str = unused_if("max", keep_best=0)
    """Best value of best_metric: max or min."""
    save_reshardable: bool = False
    """Save distributed optimizers for any layout in every save, not only in the last one of a run.

    For that, every data-parallel rank gathers the whole state of its weights into host memory. Other saves need no
    communication, and can be loaded with the same axes but dp and cp.
    """
    default_local_dir: str = "checkpoints"
    """Directory of the checkpoints."""
    resume: bool = False
    """Continue from the last checkpoint in default_local_dir."""
    max_seconds: float = 0.0
    """[s] Save and end with exit code 75 before the run has taken so long. 0: no limit."""
    ref_sync_steps: int = 0
    """[steps] Move the reference towards the policy every so many steps. 0: the reference does not change."""
    ref_sync_mix: float = unused_if(1.0, ref_sync_steps=0)
    """Share of the policy in the new reference, above 0, at most 1: ``mix * policy + (1 - mix) * reference``.

    Below 1, a reference of 16 bits has a copy in float32, 4 bytes for every weight, which checkpoints contain.
    """
    export_hf: str | None = None
    """New or empty directory for the trained policy as a Hugging Face model, after the last step. None: none."""
    offload: str = "auto"
    """Hand over memory around stages: auto (groups that share GPUs), always (all groups, on CPUs too), or never.

    A group that is not called moves its weights and its optimizer to host memory. A group that is called keeps what the
    method needs: an update all of its parts, generation and scoring the weights.
    """

    offload_communicators: bool = unused_if(False, offload="never")
    """Free the buffers of NCCL too when a group hands over its memory. It takes time, and NCCL 2.29.7."""
    weight_timeout: float = 600.0
    """[s] A transfer of weights from Role.Actor to Role.Rollout fails if it has not ended by then."""
    patience: float = 0.0
    """[s] Report who waits for whom in a stage that takes longer; if the ranks wait for the same twice as long after
    that, or after ten times as long in any case, the step fails. 0: report after 60 s, and fail after ``timeout_s`` of
    the role."""
    patience_factor: float = unused_if(10.0, patience=0.0)
    """Times the slowest run of the stage so far, in place of ``patience`` if it is more."""
    max_restarts: int = 3
    """[restarts in an hour] Go on after a process died, hung or was lost: restart the groups that broke, and load the
    last checkpoint; without one, begin again. Counted for each cause. 0: end the run at the first failure."""
    restart_on: tuple[str, ...] = unused_if((), max_restarts=0)
    """Types of exceptions of the workers' own code after which the run goes on too, such as OutOfMemoryError."""
    elastic: bool = False
    """Go on with fewer data-parallel replicas and the same global batch after the loss of a node, until there is room
    again. Checkpoints are then always reshardable. See docs/reliability.md."""
    max_staleness: int = 0
    """[batches] 1: generate the next batch while the policy learns from this one. 2 or more: generate by trajectory, so
    that each step trains on responses that began at most so many updates before. 0: do not; see docs/rollout.md.
    """
    asynchronous: AsynchronousConfig = unused_if(AsynchronousConfig, max_staleness=0)
    """Generation by trajectory, with max_staleness of 2 or more."""
    balance_tokens: bool = True
    """Give every data-parallel rank about as many tokens as the others, in scoring and in each mini-batch of an update.

    Mini-batches have the same rows either way. Rows of a prompt stay together if their passes share it.
    """
    trace: bool = True
    """Have `mcontroller train` record what every process does in the run's directory, for `mcontroller trace`."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Windows of profilers."""

    def __post_init__(self) -> None:
        check_one_of("trainer.offload", self.offload, OFFLOAD_CHOICES)
        for name in ("max_staleness", "total_training_steps", "epochs", "critic_warmup", "memory_save_freq"):
            check_at_least(f"trainer.{name}", getattr(self, name), 0)
        for name in ("max_restarts", "ref_sync_steps", "keep_best"):
            check_at_least(f"trainer.{name}", getattr(self, name), 0)
        for name in ("save_minutes", "max_seconds", "patience", "patience_factor"):
            check_at_least(f"trainer.{name}", getattr(self, name), 0.0)
        for name in ("test_freq", "save_freq"):
            check_at_least(f"trainer.{name}", getattr(self, name), -1)
        if self.max_to_keep is not None:
            check_at_least("trainer.max_to_keep", self.max_to_keep, 1)
        check_above("trainer.weight_timeout", self.weight_timeout, 0.0)
        if self.asynchronous.replay is not None and self.max_staleness < 1:
            raise ConfigError(
                f"trainer.asynchronous.replay is set with trainer.max_staleness={self.max_staleness}, which has one "
                "order of events: start the run again with the same configuration",
                key="trainer.asynchronous.replay",
                value=self.asynchronous.replay,
            )
        check_above("trainer.ref_sync_mix", self.ref_sync_mix, 0.0)
        check_between("trainer.ref_sync_mix", self.ref_sync_mix, 0.0, 1.0)
        check_one_of("trainer.best_mode", self.best_mode, ("max", "min"))
        if self.keep_best and (self.save_freq < 1 or self.test_freq < 1 or self.save_freq % self.test_freq):
            raise ConfigError(
                f"trainer.keep_best is {self.keep_best}, save_freq {self.save_freq}, test_freq {self.test_freq}: it "
                "compares metrics of validation. Set save_freq to a multiple of test_freq, and both to 1 or more",
                key="trainer.keep_best",
                value=self.keep_best,
            )


@strict_fields
@dataclass(frozen=True, slots=True)
class PPOConfig:
    """Everything that ``RayPPOTrainer`` reads. Derive from it to declare the types of the workers' configurations."""

    actor_rollout_ref: Any
    """The ``config`` argument of the actor's worker class."""
    critic: Any = None
    """The ``config`` argument of the critic's worker class. None: no critic."""
    ref: Any = None
    """The ``config`` argument of the reference's worker class. None: the reference is in the actor's workers."""
    reward_model: Any = None
    """The ``config`` argument of the reward model's worker class. None: no reward model."""
    data: DataConfig = field(default_factory=DataConfig)
    """Batches of problems."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """The computation of advantages from scores."""
    warm_up: WarmUpConfig = field(default_factory=WarmUpConfig)
    """A supervised phase before PPO."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """How the responses to held-out problems are sampled."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Length of the run, and when it is validated and saved."""
    rollout: Any = None
    """The ``config`` argument of the worker class of ``Role.Rollout``. None: generation is in the actor's workers."""
    imports: list[str] = field(default_factory=list)
    """Modules, or files that end in .py, that are imported first, by the workers on every node too: they register your
    own losses, engines, tokenizers, etc."""
