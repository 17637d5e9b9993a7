"""The parts of a run that exist before any process starts: data sets, tokenizer, rewards and roles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mcontroller.config.checks import close_names
from mcontroller.config.fields import check_unused
from mcontroller.config.load import CollectedErrors
from mcontroller.errors import ConfigError
from mcontroller.files import check_new_directory
from trainer.config import SCORE, MultiTurnConfig, ValidationConfig
from trainer.data.config import ProblemsConfig
from trainer.data.hf_tokenizer import check_tokens, has_tokenizer
from trainer.data.prompts import Demonstrations, PromptRows, answer_of, demonstrations_of
from trainer.data.sources import Records, load_records
from trainer.data.stream import BatchStream, Mixture
from trainer.data.tokenizers import TOKENIZERS, TextTokenizer, TokenizerSource
from trainer.estimators.registry import ADVANTAGE_ESTIMATORS
from trainer.rewards.configured import FunctionRewards, check_functions
from trainer.rewards.processes import LoadedFunction, Sample
from trainer.rewards.reward import CombineRewards, weighted_sum
from trainer.rewards.trial import right_response
from trainer.roles import Role, check_generates_alone, check_roles, role_workers
from trainer.rollout.episodes import Demonstrating, Episodes
from trainer.rollout.server.tool_calls import TOOL_FORMATS, tool_format
from trainer.run.config import RunConfig
from trainer.run.pools import check_layout, pool_errors, pools_of
from trainer.run.recorded_rows import check_recorded_rows
from trainer.trackers import TRACKERS
from trainer.validation import VALIDATION, Evaluation, evaluations_by_prefix, held_out_metrics
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, ModelConfig, RolloutConfig
from workers.config.trained_weights import base_is_frozen
from workers.critic import CriticWorker
from workers.generate.vllm.interpreter import interpreter_of, is_present
from workers.losses.policy import POLICY_LOSSES
from workers.planning import is_planned
from workers.reward import RewardModelWorker
from workers.weights.hf.checkpoint import check_checkpoint_files
from workers.weights.hf.files import WeightFiles, has_weights


@dataclass(frozen=True)
class RunParts:
    """The arguments of ``RayPPOTrainer``, built from a configuration.

    Attributes:
        tokenizer: the tokenizer.
        train: problems to train on, which may be of several data sets.
        val: the held-out problems of ``data.val``, if there are any.
        evaluations: those of ``data.evaluations`` by name.
        prompts: the problems of all data sets by their keys in the configuration.
        warm_up: demonstrations, if there is a supervised phase.
        rewards: the reward functions, if there are any.
        rollout_fn: makes responses of several turns, if there is an episode.
        combine: makes one score of the functions' and the reward model's, if there are both.
        roles: the worker class of every role.
    """

    tokenizer: TextTokenizer
    train: PromptRows | Mixture
    val: PromptRows | None
    evaluations: Mapping[str, Evaluation]
    warm_up: Demonstrations | Mixture | None
    rewards: FunctionRewards | None
    rollout_fn: Episodes | None
    combine: CombineRewards | None
    roles: dict[Role, Any]
    prompts: Mapping[str, PromptRows]

    def steps(self, config: RunConfig) -> int:
        """Return the steps of ``trainer.epochs`` passes over the problems, each of one batch."""
        return BatchStream(self.train, config.data.train_batch_size, 0).batches_of(config.trainer.epochs)

    def problem_lines(self) -> list[str]:
        """Return a line for each data set, with the number of prompts that are dropped or truncated."""
        lines = []
        for name, prompts in self.prompts.items():
            long = f"longer than {prompts.prompt_length} tokens"
            dropped = f", {prompts.dropped} dropped: {long}" if prompts.dropped else ""
            truncated = f", {prompts.truncated} without their beginning: {long}" if prompts.truncated else ""
            lines.append(f"{name}: {len(prompts)} prompts{dropped}{truncated}")
        return lines

    def close(self) -> None:
        """End the processes of the reward functions."""
        if self.rewards is not None:
            self.rewards.close()

    def try_rewards(self, config: RunConfig) -> list[str]:
        """Call every reward function with problems of each kind and their right answers as responses.

        Returns:
            A line for each training set whose right answers do not get the best score.

        Raises:
            ConfigError: a metric that the run reads is none of the reward.
            DataError: a function fails or reads what a problem does not have, or none applies and there is no reward
                model; with the problem.
        """
        lines, reported = list[str](), set[str]()
        has_episodes = config.multi_turn.episode is not None
        if self.rewards is not None:
            held_out = {key: self._samples(rows) for key, rows in self.prompts.items()}
            training = {key: held_out.pop(key) for key in config.data.training_sets()}
            lines, reported = self.rewards.check(training, held_out=held_out, must_apply=self.combine is None)
            reported |= {"episode_score"} if has_episodes else set()
        if config.reward_model is not None and (has_episodes or self.rewards is not None):
            reported |= {"rule_score", "model_score"}
        self._check_metrics(config, reported)
        return lines

    def _check_metrics(self, config: RunConfig, reported: Set[str]) -> None:
        """Raise ConfigError if ``filter_groups.metric`` or ``best_metric`` is none of a run whose reward has columns.

        Args:
            config: the configuration of the run.
            reported: the columns of the reward.
        """
        algorithm, best = config.algorithm, config.trainer.best_metric
        overlong = {"overlong_penalty"} if algorithm.overlong.buffer else set()
        known = {SCORE} | reported | overlong
        chosen = {"algorithm.filter_groups.metric": (algorithm.filter_groups.metric, known)}
        if config.trainer.keep_best and not best.startswith(f"{VALIDATION}/"):  # of the rollout
            held_out = evaluations_by_prefix(self.val, self.evaluations, config.validation)
            chosen["trainer.best_metric"] = best, held_out_metrics(held_out, reported)
        for key, (name, known) in chosen.items():
            if name not in known:
                text = f"{key} is {name!r}{close_names(name, known)}; there are {', '.join(sorted(known))}"
                raise ConfigError(text, key=key, value=name)

    @staticmethod
    def _samples(prompts: PromptRows) -> list[Sample]:
        return [
            {
                **row["record"],
                "prompt": row["prompt"],
                "answer": row["answer"],
                "response": right_response(row["answer"]),
            }
            for row in map(prompts.__getitem__, range(len(prompts)))
        ]


def chosen_lines(config: RunConfig) -> list[str]:
    """Return a line each for the policy loss with its limits, and for uneven mini-batches."""
    return [policy_loss_line(config.actor_rollout_ref), *_mini_batch_lines(config)]


def _mini_batch_lines(config: RunConfig) -> Iterator[str]:
    """Yield a line for each trained role whose optimizer steps do not have the rows that it sets."""
    n = config.actor_rollout_ref.rollout.n if config.rollout is None else config.rollout.rollout.n
    rows = config.data.train_batch_size * n
    critic = config.critic if ADVANTAGE_ESTIMATORS[config.algorithm.adv_estimator].needs_critic else None
    for key, role in (("actor_rollout_ref", config.actor_rollout_ref), ("critic", critic)):
        if role is None or rows % (size := role.ppo_mini_batch_prompts * n or role.ppo_mini_batch_size) == 0:
            continue
        steps = -(-rows // size)
        sizes = f"{rows // steps} or {-(-rows // steps)}" if rows % steps else str(rows // steps)
        yield (
            f"{key}: the {rows} responses of a step ({config.data.train_batch_size} problems x {n}) are divided into "
            f"{steps} mini-batch{'es' if steps > 1 else ''} of {sizes}: ppo_mini_batch_size={size} does not divide them"
        )


def policy_loss_line(config: ActorConfig) -> str:
    """Return the policy loss of a run, with its average and its limits, also if they are the loss's own."""
    low, high = config.clip_limits()
    average = config.loss_agg_mode or POLICY_LOSSES[config.policy_loss].loss_agg_mode
    limits = f"clip_ratio_low={low:g}, clip_ratio_high={high:g}"
    line = f"policy_loss={config.policy_loss}: loss_agg_mode={average}, {limits}"
    return line if config.clip_ratio_c is None else f"{line}, clip_ratio_c={config.clip_ratio_c:g}"


def models_without_weights(config: RunConfig) -> dict[str, str]:
    """Return the directories of models that have no weights on this machine, by the key of the role."""
    paths = {key: section.model.hf_path for key, section in config.sections().items() if key != "rollout"}
    return {key: path for key, path in paths.items() if path and Path(path).is_dir() and not has_weights(Path(path))}


def make_parts(config: RunConfig) -> RunParts:
    """Return the parts of a run: files are read, prompts encoded, and reward functions imported.

    All errors are reported together.

    Raises:
        ConfigError: the configuration does not fit the data, the tokenizer or the reward functions.
        LayoutError: the axes of a role do not divide the pool.
        DataError: a file cannot be used, with the file and the line or row; the directory of the export is not empty.
    """
    errors = CollectedErrors()
    attempt = errors.attempt
    for key in config.sections():
        attempt(partial(check_layout, config, key))
    roles = roles_of(config)
    errors.errors += pool_errors(config, roles)
    attempt(lambda: check_roles(config, roles, pools_of(config, roles)))
    attempt(lambda: role_workers(config, roles))
    for section in (config.actor_rollout_ref, config.critic, config.ref, config.reward_model):
        if section is not None:
            attempt(partial(check_checkpoint_files, section.model))
    for path in models_without_weights(config).values() if not is_planned() else ():
        attempt(partial(WeightFiles, Path(path)))
    if config.trainer.export_hf is not None:
        attempt(partial(check_new_directory, config.trainer.export_hf))
    for name in config.trackers:
        attempt(partial(TRACKERS.get_or_raise, name))
    for name, function in config.rewards.functions.items():
        attempt(partial(LoadedFunction, function, f"rewards.functions.{name}"))
    tokenizer, prompts = read_prompts(config, errors)
    attempt(lambda: check_recorded_rows(config, prompts))
    problem_rows, evaluations = training_rows(config.data, prompts), read_evaluations(config, prompts, errors)
    episodes = None
    if tokenizer is not None:
        attempt(lambda: check_vocabulary(config, tokenizer))
        episodes = attempt(partial(make_episodes, config.multi_turn, tokenizer, _vllm_python(config)))
    attempt(lambda: check_generates_alone(config, roles, pools_of(config, roles), episodes))
    if problem_rows is not None:
        name = "data.mixture" if config.data.mixture else "data.train"
        attempt(partial(BatchStream, problem_rows, config.data.train_batch_size, config.data.seed, name))
    if config.reward_model is None and config.multi_turn.episode is None:
        attempt(lambda: check_functions(config.rewards))
    demonstrate, demonstrations = None, None
    if episodes is not None and isinstance(episodes.function, Demonstrating):
        demonstrate = partial(episodes.function.demonstrate, tokenizer=tokenizer)
    if config.warm_up.steps and problem_rows is not None:
        shown = [prompts[key] for key in config.data.training_sets()]
        longest = config.actor_rollout_ref.rollout.response_length
        demonstrations = attempt(partial(demonstrations_of, shown, longest, demonstrate))
    if demonstrations is not None:
        attempt(partial(BatchStream, demonstrations, config.warm_up.batch_size, config.data.seed, "warm_up"))
    errors.raise_any()
    assert tokenizer is not None and problem_rows is not None
    rewards = FunctionRewards(config.rewards, tokenizer) if config.rewards.functions else None
    combine = weighted_sum() if config.reward_model is not None and rewards is not None else None
    return RunParts(
        tokenizer=tokenizer,
        train=problem_rows,
        val=prompts.get("data.val"),
        evaluations=evaluations,
        warm_up=demonstrations,
        rewards=rewards,
        rollout_fn=episodes,
        combine=combine,
        roles=roles,
        prompts=prompts,
    )


def make_episodes(config: MultiTurnConfig, tokenizer: Any, vllm_python: str | None = None) -> Episodes | None:
    """Return the episodes of a configuration, if it names a function.

    Args:
        config: of turns and episodes.
        tokenizer: of the policy.
        vllm_python: the interpreter of the engines if they are vLLM's.

    Raises:
        ConfigError: the function cannot be imported, is not async, or does not take the options; vLLM has no such
            parser of tool calls.
    """
    if config.episode is None:
        return None
    options, parser = dict(config.options), config.options.get("tool_calls")
    if parser is not None and parser not in TOOL_FORMATS:
        python = options.setdefault("vllm_python", vllm_python)
        if python is None or (is_present(python) and not is_planned()):
            tool_format(parser, tokenizer, python)
    return Episodes(
        config.episode,
        options,
        tokenizer=tokenizer,
        processes=config.processes,
        concurrency=config.concurrency,
        timeout_s=config.timeout_s,
    )


def _vllm_python(config: RunConfig) -> str | None:
    """Return the interpreter of the engines if they are vLLM's."""
    generates = config.rollout or config.actor_rollout_ref
    return interpreter_of(generates) if generates.rollout.engine == "vllm" else None


def roles_of(config: RunConfig) -> dict[Role, Any]:
    """Return the worker class of every role of the run: a critic if the estimator needs one."""
    roles: dict[Role, Any] = {}
    separate = config.ref is not None and not _is_base(config.ref.model, config.actor_rollout_ref.model)
    if config.rollout is not None:
        roles |= {Role.Actor: ActorRolloutRefWorker, Role.Rollout: ActorRolloutRefWorker}
    else:
        roles[Role.ActorRollout if separate else Role.ActorRolloutRef] = ActorRolloutRefWorker
    if separate:
        roles[Role.RefPolicy] = ActorRolloutRefWorker
    if ADVANTAGE_ESTIMATORS[config.algorithm.adv_estimator].needs_critic:
        roles[Role.Critic] = CriticWorker
    if config.reward_model is not None:
        roles[Role.RewardModel] = RewardModelWorker
    return roles


def _is_base(reference: ModelConfig, policy: ModelConfig) -> bool:
    """Return whether the reference stays what the policy is without its adapter: then no second model is built."""
    if not base_is_frozen(policy) or (reference.lora is not None and reference.lora.path is not None):
        return False
    return replace(reference, lora=None, freeze=[], train_only=[]) == replace(
        policy, lora=None, freeze=[], train_only=[]
    )


def read_prompts(config: RunConfig, errors: CollectedErrors) -> tuple[TextTokenizer | None, dict[str, PromptRows]]:
    """Read the data sets of a run, and encode their prompts.

    Args:
        config: the configuration of the run.
        errors: gets the errors.

    Returns:
        The tokenizer, None after an error, and the problems of each data set by its key in the configuration.
    """
    data, attempt = config.data, errors.attempt
    configured = data.training_sets() | data.held_out_sets()
    loaded = {key: attempt(partial(load_records, dataset, key)) for key, dataset in configured.items()}
    records = {key: value for key, value in loaded.items() if value is not None}
    if not data.training_sets().keys() <= records.keys():
        return None, {}
    tokenizer = attempt(lambda: make_tokenizer(config, [*records.values()]))
    if tokenizer is None:
        return None, {}
    length = config.actor_rollout_ref.rollout.prompt_length
    encoded = {key: attempt(partial(PromptRows, record, data, tokenizer, length)) for key, record in records.items()}
    return tokenizer, {key: rows for key, rows in encoded.items() if rows is not None}


def training_rows(data: ProblemsConfig, prompts: Mapping[str, PromptRows]) -> PromptRows | Mixture | None:
    """Return the problems to train on; None if one of their data sets could not be read."""
    if not data.training_sets().keys() <= prompts.keys():
        return None
    if not data.mixture:
        return prompts["data.train"]
    mixed = {name: prompts[f"data.mixture.{name}"] for name in data.mixture}
    return Mixture(mixed, {name: part.weight for name, part in data.mixture.items()})


def read_evaluations(
    config: RunConfig, prompts: Mapping[str, PromptRows], errors: CollectedErrors
) -> dict[str, Evaluation]:
    """Return the evaluations of ``data.evaluations`` by name, and check how responses to held-out problems are sampled.

    Args:
        config: the configuration of the run.
        prompts: the problems of each data set by its key in the configuration.
        errors: gets the errors.
    """
    rollout, attempt = (config.rollout or config.actor_rollout_ref).rollout, errors.attempt
    attempt(partial(check_held_out_length, config.validation, rollout, "validation"))
    evaluations = {}
    for name, dataset in config.data.evaluations.items():
        key = f"data.evaluations.{name}"
        sampling = attempt(partial(dataset.sampling, config.validation, key))
        if sampling is not None:
            attempt(partial(check_held_out_length, sampling, rollout, key))
            if key in prompts:
                evaluations[name] = Evaluation(prompts[key], sampling)
    return evaluations


def check_held_out_length(sampling: ValidationConfig, rollout: RolloutConfig, key: str) -> None:
    """Raise ConfigError if responses to held-out problems are longer than the rollout can generate."""
    if sampling.response_length is not None and sampling.response_length > rollout.response_length:
        raise ConfigError(
            f"{key}.response_length is {sampling.response_length}; the rollout generates at most "
            f"rollout.response_length={rollout.response_length} tokens: reduce it, or increase that",
            key=f"{key}.response_length",
            value=sampling.response_length,
        )


def make_tokenizer(config: RunConfig, records: Sequence[Records]) -> TextTokenizer:
    """Return the tokenizer of the configuration.

    Args:
        config: the configuration of the run.
        records: of all data sets, for a tokenizer that is made from their texts.

    Raises:
        ConfigError: there is none, or it does not read a setting.
    """
    path = config.tokenizer.path or config.actor_rollout_ref.model.hf_path
    data, rows = config.data, [row for record in records for row in record.rows]

    def texts() -> tuple[list[str], list[str]]:
        values = ((row.get(data.prompt_key) for row in rows), (answer_of(row, data.answer_key) for row in rows))
        prompts, answers = ([value for value in column if isinstance(value, str)] for column in values)
        return prompts, answers

    source = TokenizerSource(path, texts, config.tokenizer.chat_template_kwargs)
    tokenizer = TOKENIZERS.get_or_raise(config.tokenizer.kind)(source)
    keys = {"path": "path", "template_arguments": "chat_template_kwargs"}
    unread = [key for name, key in keys.items() if name not in source.read]
    reason = f"with tokenizer.kind={config.tokenizer.kind}, which does not read it"
    check_unused(config.tokenizer, unread, "tokenizer.", reason)
    return tokenizer


def check_vocabulary(config: RunConfig, tokenizer: TextTokenizer) -> None:
    """Raise ConfigError if a model has fewer token ids than the tokenizer, or ids that it cannot decode.

    Args:
        config: the configuration.
        tokenizer: of the policy, whose token ids all models get.
    """
    policy = config.actor_rollout_ref.model
    try:
        tokenizer.decode([policy.vocab_size - 1])
    except Exception as error:
        raise ConfigError(
            f"actor_rollout_ref.model.vocab_size is {policy.vocab_size}, so token id {policy.vocab_size - 1} can be "
            f"sampled, and decode of the tokenizer fails for it ({type(error).__name__}: {error}): set it to the "
            f"{tokenizer.vocab_size} tokens of the tokenizer, or let decode skip other ids",
            key="actor_rollout_ref.model.vocab_size",
            value=policy.vocab_size,
        ) from error
    for role, section in config.sections().items():
        key, size, path = f"{role}.model.vocab_size", section.model.vocab_size, section.model.hf_path
        if size < tokenizer.vocab_size:
            raise ConfigError(
                f"{key} is {size}; the tokenizer has {tokenizer.vocab_size} tokens: set "
                f"{key}={tokenizer.vocab_size}, or the model that it refers to",
                key=key,
                value=size,
            )
        if role == "actor_rollout_ref" or (path is not None and path in (config.tokenizer.path, policy.hf_path)):
            continue
        if path is not None and has_tokenizer(path):
            check_tokens(path, f"{role}.model.hf_path", tokenizer)
        elif role in ("ref", "reward_model") and size not in (policy.vocab_size, tokenizer.vocab_size):
            raise ConfigError(
                f"{key} is {size}, and that of the policy, whose token ids {role} gets, {policy.vocab_size}. Use a "
                "model with the same vocabulary; if only the padding of the sizes differs, put its tokenizer into the "
                f"directory {role}.model.hf_path",
                key=key,
                value=size,
            )
