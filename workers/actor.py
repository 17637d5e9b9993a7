"""The policy worker: generation, log-probabilities, PPO, supervised training, and a frozen reference policy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from mcontroller.config.checks import check_between
from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError, before_changes
from mcontroller.worker import delegate
from parallel_state.agreement import all_gather_values
from workers.actor_roles import (
    check_engine,
    check_reference_moves,
    parsed_roles,
    require_role,
    serves_engine,
)
from workers.columns import ROUTED_EXPERTS, TOKEN_TEMPERATURES
from workers.config import ActorConfig
from workers.generate.engines import ROLLOUT_ENGINES
from workers.generate.generator import Generator
from workers.generate.rollout_protocol import Rollout
from workers.lora.adapters import adapters_of, changed_beside_adapters, without_adapters
from workers.losses.kl import KL_ESTIMATORS
from workers.losses.masking import inside
from workers.losses.policy import POLICY_LOSSES
from workers.model.build import build_model
from workers.model_worker import ModelWorker
from workers.role_worker import PolicySettings
from workers.router_replay.replay import RouterReplay
from workers.router_replay.routers import ModelRouters
from workers.router_replay.rows import RowExperts
from workers.same_policy import check_same_policy
from workers.train.batch_checks import temperature_of
from workers.train.batches import TokenBatch, tensor_columns
from workers.train.forward import forward_hidden, forward_top, is_last_chunk, takes_distinct_tokens, token_scores
from workers.train.losses import (
    MISMATCH,
    TokenLoss,
    checked_output,
    columns_of_update,
    policy_metrics,
    policy_objective,
    sft_loss,
    weights_of,
)
from workers.train.metrics import Rule, reported
from workers.train.mini_batches import division_of
from workers.train.pipeline import Loss
from workers.train.trainer import Trainer
from workers.weight_sender import WeightSender
from workers.weights.mixing import mix_weights


class ActorRolloutRefWorker(ModelWorker):
    """Actor, rollout and reference policy, or any of them, on one layout.

    Args:
        config: the configuration of the actor and its rollout.
        role: one or more of ``actor``, ``rollout``, ``ref``, joined by ``_``. An actor is trained; a rollout samples
            from the actor's weights, or from its own without an actor; a reference is a frozen copy.

    Attributes:
        rollout: the engine that generates; None without the role ``rollout``.
        generator: generates with the rollout, after its weights were updated.
        sender: sends the weights to another group, or receives them.
        router_replay: what records and replays the experts that routers choose.

    Raises:
        ConfigError: an unknown role; a field that the rollout engine cannot run with.
        LayoutError: the axes do not divide the world size.
    """

    optim_step = delegate("trainer", Trainer.optim_step)
    rollout_weights = delegate("generator", Generator.rollout_weights)
    generation_limits = delegate("generator", Generator.generation_limits)
    engine_addresses = delegate("generator", Generator.engine_addresses)
    sampling_state = delegate("generator", Generator.sampling_state)
    restore_sampling = delegate("generator", Generator.restore_sampling)
    describe_weights = delegate("sender", WeightSender.describe_weights)
    weight_fingerprints = delegate("sender", WeightSender.weight_fingerprints)
    has_weights = delegate("sender", WeightSender.has_weights)
    listen_for_weights = delegate("sender", WeightSender.listen_for_weights)
    connect_weights = delegate("sender", WeightSender.connect_weights)
    send_weights = delegate("sender", WeightSender.send_weights)
    receive_weights = delegate("sender", WeightSender.receive_weights)
    accept_weights = delegate("sender", WeightSender.accept_weights)
    close_weights = delegate("sender", WeightSender.close_weights)

    config_class = ActorConfig
    parts_needed: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **ModelWorker.parts_needed,
        "describe_weights": (),
        "listen_for_weights": (),
        "connect_weights": (),
        "accept_weights": (),
        "close_weights": (),
        "has_weights": (),
        "sampling_state": (),
        "restore_sampling": (),
        "generation_limits": (),
        "send_weights": ("params",),
        "receive_weights": ("params",),
        "weight_fingerprints": ("params",),
        "generate_sequences": ("rollout",),
        "engine_addresses": ("rollout",),
        "rollout_weights": ("params", "rollout"),
        "compute_log_prob": ("params",),
        "compute_top_log_probs": ("params",),
        "compute_ref_log_prob": ("reference",),
        "sync_reference": ("params", "reference"),
        "update_actor": ("params", "grads", "optimizer"),
        "update_sft": ("params", "grads", "optimizer"),
    }

    @classmethod
    def check_init(cls, *args: Any, **kwargs: Any) -> None:
        """Check the constructor's arguments, and that the engine can generate, before any process starts.

        Raises:
            ConfigError: an argument is missing, unknown, or of another type; the engine cannot run with a field.
        """
        super().check_init(*args, **kwargs)
        bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs)
        bound.apply_defaults()
        config, role = bound.arguments.get("config"), bound.arguments.get("role")
        if isinstance(config, ActorConfig) and isinstance(role, str) and "rollout" in role.split("_"):
            check_engine(not cls.overrides(ActorRolloutRefWorker.build_rollout), config, role.split("_"))

    # ---- what RayPPOTrainer reads before it starts and updates (see RoleWorker) --------------------------------------

    @classmethod
    def check_run(cls, config: ActorConfig) -> None:
        """Raise ConfigError if a prompt and its response can be longer than the model's sequences."""
        config.check_lengths()

    @classmethod
    def policy_settings(cls, config: ActorConfig) -> PolicySettings:
        """Return the settings of the policy that the algorithm depends on."""
        return PolicySettings(
            n=config.rollout.n,
            response_length=config.rollout.response_length,
            use_kl_loss=config.use_kl_loss,
            has_adapter=config.model.lora is not None,
            router_replay=config.router_replay,
        )

    @classmethod
    def check_transfer(cls, source: ActorConfig, target: ActorConfig) -> None:
        """Raise ConfigError if the two groups do not have the same policy; see ``check_same_policy``."""
        check_same_policy(source, target)

    @classmethod
    def columns_read(cls, config: ActorConfig) -> Collection[str] | None:
        """Return which columns of the stages of a step ``update_actor`` reads; None if it is overridden."""
        if cls.overrides(ActorRolloutRefWorker.update_actor):
            return None
        read = columns_of_update(config, {"old_log_probs", "importance_weights", "rollout_log_probs"})
        return read if config.router_replay == "none" else [*read, ROUTED_EXPERTS]

    @classmethod
    def updates_once(cls, config: ActorConfig, rows: int, n: int) -> bool:
        """Return whether ``update_actor`` can do without ``old_log_probs``: it makes one optimizer step of a batch.

        The log-probabilities before such a step are computed in the step. A class with a custom loss always needs them.
        """
        mini_batch = config.ppo_mini_batch_prompts * n or config.ppo_mini_batch_size
        return not cls.overrides(ActorRolloutRefWorker.loss) and config.ppo_epochs == 1 and rows <= mini_batch

    def __init__(self, config: ActorConfig, role: str = "actor_rollout_ref") -> None:
        self.roles = parsed_roles(role)
        engine_by_name = not self.overrides(ActorRolloutRefWorker.build_rollout)
        if "rollout" in self.roles:
            check_engine(engine_by_name, config, self.roles)
        POLICY_LOSSES.get_or_raise(config.policy_loss)  # a custom one must be registered in this process as well
        KL_ESTIMATORS.get_or_raise(config.kl_loss_type, key="kl_loss_type")
        super().__init__(
            config.model,
            config.parallel,
            timeout_s=config.timeout_s,
            packed=config.packed,
            share_prompts=config.share_prompts,
        )
        self.config = config
        self.rollout: Rollout | None = None
        self.router_replay = RouterReplay("none", None)
        only_serves = serves_engine(self.roles, engine_by_name, config)
        self.generator = Generator(config, self.state, self.offloader, only_serves)
        self.sender = WeightSender(self.state, config, self.device, self.generator)

    @property
    def reference(self) -> list[Any]:
        """This rank's chunks of the frozen reference; none without the role ``ref``."""
        return self.state.models.get("reference", [])

    # ---- what a user overrides (see ModelWorker) ---------------------------------------------------------------------

    def build_model(self) -> list[nn.Module]:
        """Return this rank's chunks of the policy."""
        return build_model(self.config.model, self.config.parallel, self.context)

    def build_rollout(self) -> Rollout:
        """Return the rollout of the engine that ``rollout.engine`` names (see ``workers.ROLLOUT_ENGINES``)."""
        return ROLLOUT_ENGINES.get_or_raise(self.config.rollout.engine).build(self)

    @takes_distinct_tokens
    def forward_step(self, model: nn.Module, rows: TokenBatch) -> Tensor:
        """Return hidden states, or on the last stage log-probabilities and entropies ``[2, rows, targets]``."""
        hidden = forward_hidden(model, rows, self.context.pg)
        if not is_last_chunk(model):
            return hidden
        return token_scores(
            model,
            hidden,
            rows,
            self.context.pg,
            vocab_size=self.config.model.vocab_size,
            chunk_tokens=self.config.log_prob_chunk_tokens,
        )

    def loss(self, rows: TokenBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the policy loss, with the entropy bonus and the KL penalty of the configuration."""
        log_probs, entropy = _scores_of(rows, output)
        return policy_objective(self.config, rows, log_probs, entropy, self.context.pg.cp)

    def loss_count(self, rows: TokenBatch) -> Tensor:
        """Return what the average of the policy loss counts: tokens or responses."""
        return weights_of(self.config, rows.mask, rows.mask).count

    def metrics(self) -> dict[str, Rule]:
        """Return how the values that ``loss`` reports are reduced."""
        return policy_metrics(self.config)

    # ---- called through the group ------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the models of the role, with the weights of ``model.hf_path`` or of ``model.seed``.

        The reference is built by a second call of ``build_model``. Next to a policy, it is a copy of it; next to one
        with ``model.lora``, a copy without the adapter, or, if updates change nothing but the adapter, the policy
        itself with the adapter switched off. A worker that only serves an engine has no model.
        """
        if self.generator.serves_engine:
            self.state.check_context()
        elif self.roles & {"actor", "rollout"}:
            phases = {"ppo": self.config.optim, "sft": self.config.sft_optim or self.config.optim}
            self.set_up(phases if "actor" in self.roles else {}, self.config.ddp)
            if self.config.router_replay != "none":
                self.router_replay = RouterReplay(self.config.router_replay, ModelRouters(self.model, self.context.pg))
        if "ref" in self.roles and self.model and not self._base_moves():
            self.offloader.needs["compute_ref_log_prob"] = ("params",)
        elif "ref" in self.roles:
            self.state.models["reference"] = self._built_reference()
        if "rollout" in self.roles:  # last: an engine may take what the models have left
            self.rollout = self.build_rollout()
            self.generator.use(self.rollout)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, padding="none", changes_rows=True)
    def generate_sequences(self, prompts: DataProto) -> DataProto | None:
        """Generate ``n`` responses to every prompt.

        Sampling depends on the seed, the prompt's tokens, the number of the sample of that prompt, and the number of
        batches sampled before: not on the layout, nor on the order of the batch, which may have fewer rows than there
        are data-parallel ranks.

        Args:
            prompts: ``input_ids``, ``attention_mask`` int64 ``[rows, prompt]``, padded on the left. ``meta_info`` has
                ``eos_token_id`` (one or several) and ``pad_token_id``, and may set any field of ``RolloutConfig``.
                Optional: ``sample_seed`` int64 ``[rows]``, instead of the seeds above, with ``n`` 1; ``generated``
                int64 ``[rows]``, how many of a prompt's last tokens are of this response: the noise goes on there.
                With ``held_out_batch`` in ``meta_info``, the number of a batch of problems that are not trained on,
                the samples depend on it, and are not counted among the batches sampled before.

        Returns:
            ``prompts`` ``[rows * n, prompt]``; ``responses``, ``response_mask`` (1 up to and including the stop
            token) and ``rollout_log_probs`` ``[rows * n, response]``; ``input_ids``, ``attention_mask`` and
            ``position_ids`` of both; ``policy_version`` int64 ``[rows * n]``, the number of calls that had trained the
            policy which generated the row. Samples of one prompt are next to each other. Log-probabilities are the
            policy's at the temperature, before top-k and top-p. An engine that reports others has them in the column
            ``engine_log_probs`` instead, and ``meta_info`` says what they are (see ``LogProbBasis``). With
            ``router_replay=rollout`` also ``routed_experts``: the experts of each token, int8 or int16
            ``[rows * n, prompt + response, layers with experts, topk]``; -1 for padding and for the last token.
            ``meta_info`` has ``temperature`` and ``n``, so that later calls score at the same temperature. If the
            rollout got new weights first, ``meta_info["metrics"]`` has the cost of that. None off the last stage.

        Raises:
            ConfigError: the role does not include ``rollout``, a setting in ``meta_info`` is invalid, or prompts and
                responses of the configured lengths do not fit into the model's sequences.
            DataError: a column or a token id is missing, a row is padding only or padded on the right, or a prompt is
                longer than ``rollout.prompt_length`` plus what the call leaves of the configured response length.
        """
        require_role(self.roles, "rollout", "generate_sequences")
        self.sender.check_weights_complete("generate_sequences")
        self.state.check_context()
        with before_changes():
            self.config.check_lengths()
        return self.generator.generate(prompts)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto | None:
        """Compute log-probabilities and entropies of the responses under the current policy.

        Args:
            data: ``input_ids``, ``attention_mask`` ``[rows, prompt + response]`` and ``responses``
                ``[rows, response]``, int64. ``token_temperatures`` float32 ``[rows, response]``, or else
                ``meta_info["temperature"]``, or else the rollout's, divides the logits. With ``router_replay=rollout``,
                ``routed_experts`` of ``generate_sequences``.

        Returns:
            ``old_log_probs`` and ``entropys``, float32 ``[rows, response]``, 0 if there is no response token. With
            ``router_replay=old_log_probs`` also ``routed_experts``, as ``generate_sequences`` returns them, with the
            experts of the last token. None off the last stage.

        Raises:
            ConfigError: the role does not include ``actor``, or ``meta_info["temperature"]`` is not above 0.
            DataError: a column is missing or of a wrong shape.
        """
        require_role(self.roles, "actor", "compute_log_prob")
        replay = self.router_replay
        rows = self._rows(data, "compute_log_prob", replay=True)
        recorded = replay.recording(*rows.tokens.shape) if replay.mode == "old_log_probs" else None
        scores = self._scores(rows if recorded is None else replace(rows, experts=recorded), self.model)
        columns = (
            {} if recorded is None else replay.column(recorded, rows.lengths, tensor_columns(data), self.context.pg)
        )
        if scores is None:
            return None
        return DataProto.from_dict({"old_log_probs": scores[0], "entropys": scores[1], **columns})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_top_log_probs(self, data: DataProto, k: int) -> DataProto | None:
        """Compute the ``k`` most likely tokens at every position of the responses, for the loss ``DISTILLATION``.

        Tensor-parallel ranks exchange their ``k`` largest logits, and not the vocabulary.

        Args:
            data: as for ``compute_log_prob``.
            k: from 1 to ``model.vocab_size``, which gives the whole distribution.

        Returns:
            ``top_ids`` int64 and ``top_log_probs`` float32 ``[rows, response, k]``, the most likely first; 0 if there
            is no response token. None off the last stage.

        Raises:
            ConfigError: the role does not include ``actor``, or ``k`` is out of range.
            DataError: as ``compute_log_prob``.
        """
        require_role(self.roles, "actor", "compute_top_log_probs")
        vocabulary = self.config.model.vocab_size
        with before_changes():
            check_between("k", k, 1, vocabulary)
        rows = self._rows(data, "compute_top_log_probs")
        forward = functools.partial(forward_top, k, vocabulary, self.config.log_prob_chunk_tokens, self.context.pg)
        top = self.scorer.score(self.model, rows, self.config.scoring_size, forward)
        if top is None:
            return None
        ids, log_probs = inside(top, rows.mask).movedim(0, -1).split(k, -1)
        return DataProto.from_dict({"top_ids": ids.long(), "top_log_probs": log_probs.contiguous()})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto | None:
        """Compute ``ref_log_prob`` of the reference, with the arguments, shapes and errors of ``compute_log_prob``."""
        require_role(self.roles, "ref", "compute_ref_log_prob")
        rows = self._rows(data, "compute_ref_log_prob")
        if self.reference:
            scores = self._scores(rows, self.reference)
        else:
            with without_adapters(self.model):
                scores = self._scores(rows, self.model)
        return None if scores is None else DataProto.from_dict({"ref_log_prob": scores[0]})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, padding="zero_loss")
    def update_actor(self, data: DataProto) -> DataProto:
        """Train ``ppo_epochs`` of PPO on the batch.

        Mini-batches are drawn from the whole batch in the same way for every data-parallel size: see
        ``draw_mini_batches``.

        Args:
            data: the result of ``generate_sequences``, with ``advantages`` ``[rows, response]``, ``old_log_probs``
                unless the update makes one optimizer step of the batch (see ``updates_once``), ``routed_experts`` if
                ``router_replay`` is ``rollout``, or is ``old_log_probs`` and these are there,
                ``ref_log_prob`` under ``use_kl_loss``, and the columns that the policy loss names.
                ``importance_weights`` ``[rows, response]``, if there, multiply the policy loss of every token.
                ``meta_info["n"]`` is the number of responses to a prompt, under ``ppo_mini_batch_prompts``.

        Returns:
            ``meta_info["metrics"]``, the same on every rank. They include the router losses of the model
            (``moe_aux_loss``, ``moe_seq_aux_loss``, ``moe_global_aux_loss``, ``moe_z_loss``): see
            ``workers.train.router_losses``. If every step was skipped, they are only the learning rate, the number of
            skipped steps, and metrics that are sums.

        Raises:
            ConfigError: the role does not include ``actor``.
            DataError: a column is missing or of a wrong shape, or no row has a valid token.
            NonFiniteGradient: a gradient is NaN or Inf, and ``optim.on_nonfinite`` is ``raise``.
        """
        require_role(self.roles, "actor", "update_actor")
        rows, rules = self._update(data, "update_actor")
        metrics = self.trainer.train(
            "update_actor",
            rows,
            phase="ppo",
            loss=self.loss,
            rules=rules,
            micro_batch_size=self.config.update_size,
            division=division_of(self.config, data, "update_actor"),
        )
        return reported("actor", metrics)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, padding="zero_loss")
    def forward_backward(self, data: DataProto, loss: TokenLoss | None = None, accumulate: bool = False) -> DataProto:
        """Compute the gradients of the whole batch as one mini-batch; ``optim_step`` applies them.

        Args:
            data: as for ``update_actor``; for another loss, responses with the columns that it names, or if it is
                supervised the rows of ``update_sft``.
            loss: ``SFT``, ``DISTILLATION`` or a ``TokenLoss`` of the program; None is the configured policy loss.
            accumulate: add to the gradients of earlier calls that were not applied. Otherwise they are replaced.

        Returns:
            ``meta_info["metrics"]``: the metrics of the loss, the same on every rank.

        Raises:
            ConfigError: the role does not include ``actor``; the loss is none, or its function returns other values.
            DataError: a column is missing or of a wrong shape, or no row has a valid token.
        """
        require_role(self.roles, "actor", "forward_backward")
        if loss is not None and not isinstance(loss, TokenLoss):
            with before_changes():
                raise ConfigError(
                    f"loss is of type {type(loss).__name__}; expected SFT, DISTILLATION, or TokenLoss(name, function)",
                    key="loss",
                )
        function: Loss = self.loss
        if loss is None:
            rows, rules = self._update(data, "forward_backward")
        else:
            function, rules = functools.partial(loss.on_rank, self.context.pg.cp), loss.rules
            read = self.reader.supervised if loss.supervised else functools.partial(self._rows, columns=loss.columns)
            rows = read(data, "forward_backward")
        metrics = self.trainer.compute_gradients(
            "forward_backward",
            rows,
            phase="ppo",
            loss=function,
            rules=rules,
            micro_batch_size=self.config.update_size,
            accumulate=accumulate,
        )
        return reported("actor" if loss is None else loss.name, metrics)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, padding="zero_loss")
    def update_sft(self, batch: DataProto) -> DataProto:
        """Make one optimizer step on the tokens with a ``loss_mask`` of 1.

        It uses the optimizer of ``sft_optim``. If that differs from ``optim``, ``update_actor`` begins with a new one
        afterwards, and no supervised step can follow: only one of them is kept.

        Args:
            batch: ``input_ids``, ``attention_mask``, ``loss_mask`` int64 ``[rows, seq]``; padding on either side.

        Returns:
            ``meta_info["metrics"]``, as ``update_actor``.

        Raises:
            ConfigError: the role does not include ``actor``, or ``update_actor`` has replaced the optimizer of earlier
                supervised steps.
            DataError: a column is missing or of a wrong shape, or no row has a valid token.
            NonFiniteGradient: a gradient is NaN or Inf, and ``on_nonfinite`` of the optimizer is ``raise``.
        """
        require_role(self.roles, "actor", "update_sft")
        rows = self.reader.supervised(batch, "update_sft")
        metrics = self.trainer.train(
            "update_sft",
            rows,
            phase="sft",
            loss=sft_loss,
            count=super().loss_count,
            rules={"loss": Rule.TOKEN_MEAN, "entropy": Rule.TOKEN_MEAN},
            micro_batch_size=self.config.update_size,
        )
        return reported("sft", metrics)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sync_reference(self, mix: float = 1.0) -> None:
        """Move the reference towards the actor: ``mix * actor + (1 - mix) * reference``, weights and buffers.

        From the first ``mix`` below 1 to the next copy, a reference of 16 bits has a copy in float32 (4 bytes for every
        weight), which a checkpoint contains in its place.

        Args:
            mix: share of the actor, 1 for a copy, as after a supervised phase (Gorbatovski et al., 2024,
                arXiv:2404.09656, soft and hard updates).

        Raises:
            ConfigError: the role does not include both ``actor`` and ``ref``, or the reference is the policy without
                its adapter.
        """
        require_role(self.roles, "actor", "sync_reference")
        require_role(self.roles, "ref", "sync_reference")
        check_reference_moves(self.config)
        copies = mix_weights(self.reference, self.model, mix, self.state.float32.get("reference", []))
        self.state.float32 = {"reference": copies} if copies else {}

    def _base_moves(self) -> bool:
        """Return whether the policy without its adapter changes too (a collective): in updates, or as it arrives."""
        if self.config.model.lora is None or "actor" not in self.roles:
            return True
        return any(all_gather_values(changed_beside_adapters(self.model)))

    def _built_reference(self) -> list[Any]:
        """Return chunks of the reference: next to a policy, a copy of it, without its adapter if it has one."""
        reference = self.built_chunks()
        for chunk in reference:
            chunk.requires_grad_(False)
        if self.model:  # a user-defined build_model may return other weights at its second call
            mix_weights(reference, self.model, 1.0, [])
        if self.model and self.config.model.lora is not None:
            self.state.unsaved = frozenset({"reference"})
            for adapters in adapters_of(reference):
                adapters.enabled = False
        return reference

    def _rows(self, data: DataProto, method: str, columns: Sequence[str] = (), *, replay: bool = False) -> TokenBatch:
        """Return the rows of a batch; if ``replay``, with the experts that ``router_replay`` makes routers choose."""
        replayed = replay and self.router_replay.replays(method, data.tensors())

        def experts(batch: Mapping[str, Tensor], rows: TokenBatch) -> RowExperts:
            return self.router_replay.replayed(batch, rows.lengths, rows.tokens.size(1), method)

        if TOKEN_TEMPERATURES in data.tensor_names:
            columns = (*columns, TOKEN_TEMPERATURES)
        temperature = temperature_of(data.meta_info, self.config.rollout.temperature, method)
        return self.reader.responses(
            data, method, columns, temperature=temperature, experts=experts if replayed else None
        )

    def _scores(self, rows: TokenBatch, model: Sequence[nn.Module]) -> Tensor | None:
        """Return log-probabilities and entropies ``[2, rows, response]``; None off the last stage."""
        scores = self.scorer.score(model, rows, self.config.scoring_size)
        return None if scores is None else inside(_scores_of(rows, scores), rows.mask)

    def _update(self, data: DataProto, method: str) -> tuple[TokenBatch, dict[str, Rule]]:
        """Return the rows of an update with the columns that the loss reads, and how its reports are reduced.

        ``old_log_probs`` are read only if there are any, or they are needed.
        """
        tensors = data.tensors()
        columns = columns_of_update(self.config, set(tensors))
        if "old_log_probs" not in tensors:
            counted = int((tensors["response_mask"] != 0).any(1).sum()) if "response_mask" in tensors else len(data)
            rows_of_all = sum(self.batcher.gather(counted))
            if not self.updates_once(self.config, rows_of_all, data.meta_info.get("n", 1)):
                columns = [*columns, "old_log_probs"]  # of the policy before the first of several steps
        rows = self._rows(data, method, columns, replay=True)
        mismatch = "rollout_log_probs" in rows.columns and not self.overrides(ActorRolloutRefWorker.loss)
        return rows, {**self.metric_rules(), **(MISMATCH if mismatch else {})}


def _scores_of(rows: TokenBatch, output: Any) -> Tensor:
    return checked_output(output, (2, *rows.mask.shape), "log-probabilities and entropies of the targets")
