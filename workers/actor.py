"""The policy: it generates, scores its samples, is trained by PPO or on given tokens, and keeps a frozen reference."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from mcontroller.data.protocol import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError, DataError
from mcontroller.ppo.kl import KL_ESTIMATORS, estimate_kl
from mcontroller.ppo.policy_losses import POLICY_LOSSES
from parallel_state import LayoutError
from parallel_state.megatron import MegatronContext
from workers.checkpoint.checkpoint import Training
from workers.config import ActorConfig, ParallelConfig
from workers.fit import check_generation, divided_for
from workers.generate.generation import generate_batch
from workers.generate.megatron_rollout import MegatronRollout, RefitRollout
from workers.generate.rollout import PolicyWeights, Rollout
from workers.model.build import build_model
from workers.model_worker import ModelWorker, reported
from workers.train.batches import TokenBatch, require_columns, response_rows, supervised_rows, tensor_columns
from workers.train.forward import forward_hidden, token_scores
from workers.train.losses import masked_sum
from workers.train.metrics import TOKENS, Rule
from workers.train.micro_batches import MicroBatchSize
from workers.weights.offload import Sleeper

__all__ = ["ActorRolloutRefWorker"]

_ROLES = ("actor", "rollout", "ref")
_BUILDS = ("build_model", "build_rollout_model", "build_rollout")


class ActorRolloutRefWorker(ModelWorker):
    """Any of actor, rollout and reference policy on one layout.

    Args:
        config: of the actor and its rollout.
        role: which of ``actor``, ``rollout``, ``ref`` this worker is, joined by ``_``. An actor is trained; a rollout
            samples from the actor's weights, or from its own without an actor; a reference is a frozen copy.

    Raises:
        ConfigError: another role; a rollout of Megatron's over the cp axis; ``rollout.parallel`` where a subclass says
            how its model is built, and not how a copy of it is.
        LayoutError: axes, those of the rollout among them, that do not divide the world size.
    """

    config_class = ActorConfig
    parts_needed: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **ModelWorker.parts_needed,
        "generate_sequences": ("rollout",),
        "rollout_weights": ("params",),
        "compute_log_prob": ("params",),
        "compute_ref_log_prob": ("reference",),
        "sync_reference": ("params", "reference"),
        "update_actor": ("params", "grads", "optimizer"),
        "update_sft": ("params", "grads", "optimizer"),
    }

    def __init__(self, config: ActorConfig, role: str = "actor_rollout_ref") -> None:
        self.roles = _parsed_roles(role)
        if "rollout" in self.roles:
            _check_rollout(config, self)
        POLICY_LOSSES.get_or_raise(config.policy_loss)  # a custom one must be registered in this process as well
        KL_ESTIMATORS.get_or_raise(config.kl_loss_type, key="kl_loss_type")
        super().__init__(config.model, config.parallel, timeout_s=config.timeout_s, packed=config.packed)
        self.config = config
        self.reference: list[nn.Module] = []
        self.rollout: Rollout | None = None
        self.rollout_version: int | None = None
        self.sampled_batches = 0

    # ---- what a user overrides (see ModelWorker) ---------------------------------------------------------------------

    def build_model(self) -> list[nn.Module]:
        return build_model(self.config.model, self.config.parallel, self.context)

    def build_rollout(self) -> Rollout:
        """What generates: Megatron, with the model that is trained or with a copy in ``rollout.parallel``.

        Another engine takes its place by overriding this; its weights come to it by ``Rollout.update_weights``.
        """
        config = self.config
        if config.rollout.parallel is None:
            check_generation(config.parallel, "parallel")
            return MegatronRollout(self.model, self.context, config.model.vocab_size, config.rollout.max_rows)
        layout = config.rollout.parallel.layout(self.world_size)
        context = MegatronContext(layout, config.model.seed, timeout_s=config.timeout_s)
        copy = self.build_rollout_model(config.rollout.parallel, context)
        rollout = MegatronRollout(copy, context, config.model.vocab_size, config.rollout.max_rows)
        return RefitRollout(rollout, self.context)

    def build_rollout_model(self, parallel: ParallelConfig, context: MegatronContext) -> list[nn.Module]:
        """This rank's chunks of the copy that generates, in the axes of ``rollout.parallel``.

        The same model as ``build_model``'s: who overrides that one overrides this one as well. Weights need not be
        filled, those of the policy are put in their place by name.
        """
        model = divided_for(self.config.model, parallel, self.config.parallel)
        return build_model(model, parallel, context, initialize=False)

    def forward_step(self, model: nn.Module, rows: TokenBatch) -> Tensor:
        """Hidden states, or on the last stage ``[2, rows, targets]``: log-probabilities and entropies."""
        hidden = forward_hidden(model, rows, self.context.pg)
        if not unwrap_model(model).post_process:
            return hidden
        return token_scores(
            model,
            hidden,
            rows,
            self.context.pg,
            vocab_size=self.config.model.vocab_size,
            temperature=rows.temperature,
            chunk_tokens=self.config.log_prob_chunk_tokens,
        )

    def loss(self, rows: TokenBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """PPO's clipped loss, with an entropy bonus and a KL penalty where the configuration has them."""
        config = self.config
        log_probs, entropy = output
        old = rows.columns["old_log_probs"]
        mask = rows.mask
        policy = POLICY_LOSSES[config.policy_loss](
            log_probs,
            old,
            rows.columns["advantages"],
            mask,
            clip_low=config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low,
            clip_high=config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
            dual_clip=config.clip_ratio_c,
        )
        per_token = policy.loss - config.entropy_coeff * entropy
        token_means = {
            "pg_loss": policy.loss,
            "pg_clipfrac": policy.clipped,
            "ppo_kl": old - log_probs,
            "entropy": entropy,
        }
        if config.use_kl_loss:
            kl = estimate_kl(log_probs, rows.columns["ref_log_prob"], config.kl_loss_type)
            per_token = per_token + config.kl_loss_coef * kl
            token_means["kl_loss"] = kl
        count = mask.sum()
        report = {name: masked_sum(values.detach(), mask) for name, values in token_means.items()}
        report["ratio_max"] = (policy.ratio.detach() * mask).max()
        return masked_sum(per_token, mask), count, report | {TOKENS: count}

    def metrics(self) -> dict[str, Rule]:
        means = ["pg_loss", "pg_clipfrac", "ppo_kl", "entropy"] + ["kl_loss"] * self.config.use_kl_loss
        return dict.fromkeys(means, Rule.TOKEN_MEAN) | {"ratio_max": Rule.MAX}

    def sft_loss(self, rows: TokenBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Cross entropy of the targets."""
        log_probs, entropy = output
        mask = rows.mask
        total, count = masked_sum(-log_probs, mask), mask.sum()
        return total, count, {"loss": total.detach(), "entropy": masked_sum(entropy.detach(), mask), TOKENS: count}

    # ---- called through the group ------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build what the role needs: the weights are those of ``model.seed``, the same for every layout."""
        if self.roles & {"actor", "rollout"}:
            phases = {"ppo": self.config.optim, "sft": self.config.sft_optim or self.config.optim}
            self.set_up(phases if "actor" in self.roles else {})
        if "rollout" in self.roles:
            self.rollout = self.build_rollout()
        if "ref" in self.roles:
            self.reference = self.build_model()
            for chunk in self.reference:
                chunk.requires_grad_(False)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, padding="none")
    def generate_sequences(self, prompts: DataProto) -> DataProto | None:
        """``n`` responses to every prompt, samples of one prompt next to each other; None off the last stage.

        Args:
            prompts: ``input_ids``, ``attention_mask`` ``[rows, prompt]``, padded on the left. ``meta_info`` holds
                ``eos_token_id`` (one or several) and ``pad_token_id``, and may set any field of ``RolloutConfig``.

        Returns:
            ``prompts`` ``[rows * n, prompt]``; ``responses``, ``response_mask`` (1 up to and including the stop
            token) and ``rollout_log_probs`` ``[rows * n, response]``; ``input_ids``, ``attention_mask`` and
            ``position_ids`` of both. Log-probabilities are the policy's at the temperature, before top-k and top-p.
            Where the rollout was given new weights first, ``meta_info["metrics"]`` say what that cost.

        Sampling depends on the seed, the prompt's tokens, which sample of that prompt it is, and how many batches
        were sampled before: not on the layout, nor on the order of the batch, which may have fewer rows than there
        are data-parallel ranks.

        Raises:
            DataError: a column or a token id missing, a row of padding only or padded on the right, a prompt longer
                than ``rollout.prompt_length``.
        """
        self._need("rollout", "generate_sequences")
        call = self.sampled_batches
        self.sampled_batches += bool(prompts.meta_info.get("do_sample", self.config.rollout.do_sample))
        rollout, metrics = self._current_rollout()
        generated = generate_batch(
            rollout,
            prompts,
            self.config.rollout,
            vocab_size=self.config.model.vocab_size,
            call=call,
            dp_group=self.context.pg.dp,
        )
        if generated is not None and metrics:
            generated.meta_info["metrics"] = {f"rollout/{name}": value for name, value in metrics.items()}
        return generated

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def rollout_weights(self) -> PolicyWeights:
        """The policy's weights as they are now, for the engine that generates: a stream of named tensors."""
        return PolicyWeights(self.model, self.context)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto | None:
        """``old_log_probs`` and ``entropys``, float32 ``[rows, response]``, of the policy as it is.

        They are 0 where there is no response token; None off the last stage. The temperature is ``meta_info``'s or
        the rollout's.
        """
        self._need("actor", "compute_log_prob")
        scores = self._response_scores(self.model, data, "compute_log_prob")
        return None if scores is None else DataProto.from_dict({"old_log_probs": scores[0], "entropys": scores[1]})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto | None:
        """``ref_log_prob``, as ``compute_log_prob``, of the reference."""
        self._need("ref", "compute_ref_log_prob")
        scores = self._response_scores(self.reference, data, "compute_ref_log_prob")
        return None if scores is None else DataProto.from_dict({"ref_log_prob": scores[0]})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, padding="zero_loss")
    def update_actor(self, data: DataProto) -> DataProto:
        """``ppo_epochs`` of PPO over the batch; ``meta_info["metrics"]`` are the same on every rank.

        Args:
            data: what ``generate_sequences`` gave, with ``old_log_probs`` and ``advantages`` ``[rows, response]``,
                and ``ref_log_prob`` under ``use_kl_loss``.

        Mini-batches are drawn from the whole batch in the same way for every data-parallel size: see
        ``batches.mini_batch_rows``. Where every step was skipped, means and largest values are no metrics, but for the
        learning rate and sums. Router losses that the model has are among the metrics (``moe_aux_loss``,
        ``moe_seq_aux_loss``, ``moe_global_aux_loss``, ``moe_z_loss``): see ``workers.train.router_losses``.
        """
        self._need("actor", "update_actor")
        config = self.config
        needed = ["old_log_probs", "advantages"] + ["ref_log_prob"] * config.use_kl_loss
        rows = self._response_rows(data, "update_actor", needed)
        self.use_phase("ppo")
        metrics = self.train(
            "update_actor",
            rows,
            loss=self.loss,
            rules=self.metrics(),
            mini_batch_size=config.ppo_mini_batch_size,
            micro_batch_size=MicroBatchSize(config.ppo_micro_batch_size, config.ppo_max_tokens_per_micro_batch),
            epochs=config.ppo_epochs,
            shuffle_seed=config.seed if config.shuffle else None,
        )
        return reported("actor", metrics)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, padding="zero_loss")
    def update_sft(self, batch: DataProto) -> DataProto:
        """One optimizer step on the tokens with a ``loss_mask`` of 1; ``meta_info["metrics"]`` as ``update_actor``'s.

        Args:
            batch: ``input_ids``, ``attention_mask``, ``loss_mask`` ``[rows, seq]``; padding on either side.

        It trains with ``sft_optim``; going over to ``update_actor`` starts a fresh optimizer if ``optim`` differs.
        """
        self._need("actor", "update_sft")
        rows = self.rows_of_every_rank(
            lambda: supervised_rows(
                tensor_columns(batch),
                method="update_sft",
                vocab_size=self.config.model.vocab_size,
                max_length=self.config.model.max_sequence_length,
                multiple=self.sequence_multiple,
            )
        )
        self.use_phase("sft")
        metrics = self.train(
            "update_sft",
            rows,
            loss=self.sft_loss,
            rules={"loss": Rule.TOKEN_MEAN, "entropy": Rule.TOKEN_MEAN},
            micro_batch_size=MicroBatchSize(
                self.config.ppo_micro_batch_size, self.config.ppo_max_tokens_per_micro_batch
            ),
        )
        return reported("sft", metrics)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @torch.no_grad()
    def sync_reference(self) -> None:
        """The reference becomes a copy of the actor as it is now, for instance after a supervised phase."""
        self._need("actor", "sync_reference")
        self._need("ref", "sync_reference")
        for frozen, chunk in zip(self.reference, self.model, strict=True):
            frozen.load_state_dict(unwrap_model(chunk).state_dict())

    def training(self) -> Training:
        """The model with what trains it, and the reference."""
        training = super().training()
        models = {"model": self.model, "reference": self.reference}
        training.models = {part: chunks for part, chunks in models.items() if chunks}
        training.counters["sampled_batches"] = self.sampled_batches
        return training

    def restore(self, counters: Mapping[str, Any]) -> None:
        super().restore(counters)
        self.sampled_batches = counters["sampled_batches"]

    def parts(self) -> dict[str, Iterable[Tensor] | Sleeper]:
        """Those of every model, and ``rollout`` where it holds weights of its own."""
        held: dict[str, Iterable[Tensor] | Sleeper] = {}
        if self.rollout is not None and self.rollout.holds_weights:
            held["rollout"] = self.rollout
        return super().parts() | held

    def before_call(self, method: str) -> None:
        if "rollout" in self._offload.away:  # without its weights
            self.rollout_version = None
        super().before_call(method)

    # ---- how ---------------------------------------------------------------------------------------------------------

    def _current_rollout(self) -> tuple[Rollout, Mapping[str, float]]:
        """The rollout with the policy's weights as they are, and what it reports of having been given them."""
        assert self.rollout is not None
        metrics: Mapping[str, float] = {}
        if not self.rollout.holds_weights or self.rollout_version != self.weights_version:
            metrics = self.rollout.update_weights(self.rollout_weights())
            self.rollout_version = self.weights_version
        return self.rollout, metrics

    def _need(self, role: str, method: str) -> None:
        if role not in self.roles:
            raise ConfigError(
                f"{method} needs the role {role!r}; this worker is {'_'.join(sorted(self.roles))!r}",
                key="role",
                value="_".join(sorted(self.roles)),
            )

    def _response_rows(self, data: DataProto, method: str, columns: list[str]) -> TokenBatch:
        temperature = data.meta_info.get("temperature", self.config.rollout.temperature)
        if not isinstance(temperature, numbers.Real) or not float(temperature) > 0:
            raise ConfigError(
                f"{method}: meta_info['temperature'] is {temperature!r}; it must be a number above 0",
                key="temperature",
                value=temperature,
            )
        divisor = float(temperature)
        return self.rows_of_every_rank(lambda: self._checked_rows(tensor_columns(data), method, columns, divisor))

    def _checked_rows(
        self, batch: Mapping[str, Tensor], method: str, columns: list[str], temperature: float
    ) -> TokenBatch:
        longest = self.config.rollout.response_length
        require_columns(batch, ("input_ids", "responses"), method)
        if batch["responses"].size(1) > longest:
            raise DataError(
                f"{method}: responses are {batch['responses'].size(1)} tokens wide, more than "
                f"rollout.response_length, which is {longest}",
                method=method,
                column="responses",
                length=batch["responses"].size(1),
            )
        return response_rows(
            batch,
            columns,
            method=method,
            vocab_size=self.config.model.vocab_size,
            max_length=self.config.model.max_sequence_length,
            multiple=self.sequence_multiple,
            temperature=temperature,
        )

    def _response_scores(self, model: list[Any], data: DataProto, method: str) -> Tensor | None:
        rows = self._response_rows(data, method, [])
        config = self.config
        size = MicroBatchSize(
            config.log_prob_micro_batch_size or config.ppo_micro_batch_size,
            config.log_prob_max_tokens_per_micro_batch or config.ppo_max_tokens_per_micro_batch,
        )
        scores = self.score(model, rows, size)
        return None if scores is None else scores * rows.mask


def _check_rollout(config: ActorConfig, worker: ActorRolloutRefWorker) -> None:
    """What can be told before any rank joins another."""
    if config.rollout.parallel is not None:
        try:
            config.rollout.parallel.layout(worker.world_size)
        except LayoutError as error:
            raise LayoutError(f"rollout.parallel: {error}", **error.fields, key="rollout.parallel") from error
        own = {name for name in _BUILDS if getattr(type(worker), name) is not getattr(ActorRolloutRefWorker, name)}
        if own == {"build_model"}:
            raise ConfigError(
                f"{type(worker).__name__} builds a model of its own, and rollout.parallel asks for a copy of it in "
                "another layout: override build_rollout_model as well, or leave rollout.parallel out",
                key="rollout.parallel",
                value=config.rollout.parallel,
            )
    elif type(worker).build_rollout is ActorRolloutRefWorker.build_rollout:
        check_generation(config.parallel, "parallel")


def _parsed_roles(role: str) -> frozenset[str]:
    roles = role.split("_")
    if len(set(roles)) != len(roles) or not set(roles) <= set(_ROLES):
        raise ConfigError(
            f"role is {role!r}; it is one or more of {', '.join(_ROLES)}, joined by '_'", key="role", value=role
        )
    return frozenset(roles)
