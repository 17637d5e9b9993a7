"""The parts of a run that exist before any process starts: data sets, tokenizer, rewards and roles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mcontroller.config.load import CollectedErrors
from mcontroller.errors import ConfigError
from mcontroller.ppo.agents.episodes import Episodes
from mcontroller.ppo.agents.turns import Demonstrating, MultiTurnRollout, make_environment, make_episodes
from mcontroller.ppo.config import TrainerConfig
from mcontroller.ppo.data import BatchStream
from mcontroller.ppo.datasets.prompts import Demonstrations, PromptRows
from mcontroller.ppo.datasets.sources import Records, load_records
from mcontroller.ppo.datasets.tokenizers import TOKENIZERS, TextTokenizer, TokenizerSource
from mcontroller.ppo.estimators.registry import ADVANTAGE_ESTIMATORS
from mcontroller.ppo.losses.registry import POLICY_LOSSES
from mcontroller.ppo.rewards.configured import TRIED, FunctionRewards, check_functions
from mcontroller.ppo.rewards.processes import LoadedFunction
from mcontroller.ppo.rewards.reward import CombineRewards, weighted_sum
from mcontroller.ppo.roles import Role, check_generates_alone, check_roles, role_workers
from mcontroller.trackers import TRACKERS
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, ModelConfig
from workers.critic import CriticWorker
from workers.planning import is_planned
from workers.reward import RewardModelWorker
from workers.run import hf_tokenizer  # noqa: F401  # registers its tokenizer
from workers.run.config import RunConfig
from workers.run.conversion import check_new_directory
from workers.run.pools import check_layout, pool_errors, pools_of, role_layouts
from workers.weights.hf.checkpoint import check_checkpoint_files
from workers.weights.hf.files import WeightFiles, has_weights


@dataclass(frozen=True)
class RunParts:
    """The arguments of ``RayPPOTrainer``, built from a configuration.

    Attributes:
        tokenizer: the tokenizer.
        train: problems to train on.
        val: held-out problems, if there are any.
        warm_up: demonstrations, if there is a supervised phase.
        rewards: the reward functions, if there are any.
        rollout_fn: generates responses of several turns, if there is an environment or an episode.
        combine: makes one score of the functions' and the reward model's, if there are both.
        roles: the worker class of every role.
    """

    tokenizer: TextTokenizer
    train: PromptRows
    val: PromptRows | None
    warm_up: Demonstrations | None
    rewards: FunctionRewards | None
    rollout_fn: Episodes | None
    combine: CombineRewards | None
    roles: dict[Role, Any]

    def problem_lines(self) -> list[str]:
        """Return a line for each data set, with the number of prompts that were dropped."""
        lines = []
        for name, prompts in (("data.train", self.train), ("data.val", self.val)):
            if prompts is not None:
                dropped = f", {prompts.dropped} dropped: longer than {prompts.prompt_length} tokens"
                lines.append(f"{name}: {len(prompts)} prompts{dropped if prompts.dropped else ''}")
        return lines

    def try_rewards(self, *, in_process: bool = False) -> None:
        """Call every reward function with the first problems and their right answers as responses.

        Args:
            in_process: call them in this process, without a deadline, instead of in processes.

        Raises:
            DataError: a function fails, or none applies and there is no reward model; with the problem.
        """
        if self.rewards is None:
            return
        samples = []
        for row in map(self.train.__getitem__, range(min(len(self.train), TRIED))):
            answer = row["answer"]
            response = answer if isinstance(answer, str) else ""
            samples.append({**row["record"], "prompt": row["prompt"], "answer": answer, "response": response})
        self.rewards.check(samples, must_apply=self.combine is None, in_process=in_process)


def chosen_lines(config: RunConfig) -> list[str]:
    """Return what follows from defaults: the policy loss, the mini-batches, and when a run is saved, with the keys."""
    return [policy_loss_line(config.actor_rollout_ref), *_mini_batch_lines(config), _saving_line(config.trainer)]


def _mini_batch_lines(config: RunConfig) -> Iterator[str]:
    """Yield a line for each trained role whose optimizer steps do not have the rows that it sets."""
    n = config.actor_rollout_ref.rollout.n if config.rollout is None else config.rollout.rollout.n
    rows = config.data.train_batch_size * n
    critic = config.critic if ADVANTAGE_ESTIMATORS[config.algorithm.adv_estimator].needs_critic else None
    for key, role in (("actor_rollout_ref", config.actor_rollout_ref), ("critic", critic)):
        if role is None or rows % (size := role.ppo_mini_batch_prompts * n or role.ppo_mini_batch_size) == 0:
            continue
        steps = -(-rows // size)
        each = f"{rows // steps} or {-(-rows // steps)}" if rows % steps else str(rows // steps)
        yield (
            f"{key}: the {rows} responses of a step ({config.data.train_batch_size} problems x {n}) are divided into "
            f"{steps} mini-batch{'es' if steps > 1 else ''} of {each}: ppo_mini_batch_size={size} does not divide them"
        )


def _saving_line(trainer: TrainerConfig) -> str:
    """Return when a run is saved, what is lost at most, and how many checkpoints are kept."""
    if trainer.save_freq > 0:
        when = f"every {trainer.save_freq} steps (trainer.save_freq)"
    elif trainer.save_freq == 0 and trainer.save_minutes:
        when = f"after the step that ends {trainer.save_minutes:g} minutes after the last (trainer.save_minutes)"
    else:
        when = "at the end alone (trainer.save_freq, trainer.save_minutes): a run that is killed loses everything"
    kept = "all are kept" if trainer.max_to_keep is None else f"the last {trainer.max_to_keep} are kept"
    return f"checkpoints: {when}; {kept} (trainer.max_to_keep)"


def policy_loss_line(config: ActorConfig) -> str:
    """Return the policy loss of a run, with its average and its limits, also if they are the loss's own."""
    low, high = config.clip_limits()
    average = config.loss_agg_mode or POLICY_LOSSES[config.policy_loss].loss_agg_mode
    limits = f"clip_ratio_low={low:g}, clip_ratio_high={high:g}"
    line = f"policy_loss={config.policy_loss}: loss_agg_mode={average}, {limits}"
    return line if config.clip_ratio_c is None else f"{line}, clip_ratio_c={config.clip_ratio_c:g}"


def models_without_weights(config: RunConfig) -> dict[str, str]:
    """Return the directories of models that have no weights on this machine, by the key of the role."""
    roles = ("actor_rollout_ref", "critic", "ref", "reward_model")
    sections = {key: getattr(config, key) for key in roles}
    paths = {key: section.model.hf_path for key, section in sections.items() if section is not None}
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
    for placed in role_layouts(config):
        attempt(partial(check_layout, placed))
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
    train = attempt(lambda: load_records(config.data.train, "data.train"))
    val = attempt(lambda: None if config.data.val is None else load_records(config.data.val, "data.val"))
    tokenizer = None if train is None else attempt(lambda: make_tokenizer(config, train, val))
    rollout = config.actor_rollout_ref.rollout

    def prompts(records: Records | None) -> PromptRows | None:
        if records is None or tokenizer is None:
            return None
        return attempt(lambda: PromptRows(records, config.data, tokenizer, rollout.prompt_length))

    problem_rows, held_out = prompts(train), prompts(val)
    environment, episodes = None, None
    if tokenizer is not None:
        attempt(partial(check_vocabulary, config, tokenizer))
        environment = attempt(partial(make_environment, config.multi_turn, tokenizer))
        episodes = attempt(partial(make_episodes, config.multi_turn, tokenizer))
        if environment is not None:
            episodes = MultiTurnRollout(environment, config.multi_turn.max_turns)
    attempt(lambda: check_generates_alone(config, roles, pools_of(config, roles), episodes))
    if problem_rows is not None:
        attempt(partial(BatchStream, problem_rows, config.data.train_batch_size, config.data.seed, "data.train"))
    if config.reward_model is None:
        attempt(lambda: check_functions(config.rewards))
    demonstrate = environment.demonstrate if isinstance(environment, Demonstrating) else None
    demonstrations = None
    if config.warm_up.steps and problem_rows is not None:
        demonstrations = attempt(partial(Demonstrations, problem_rows, rollout.response_length, demonstrate))
    errors.raise_any()
    assert tokenizer is not None and problem_rows is not None
    rewards = FunctionRewards(config.rewards, tokenizer) if config.rewards.functions else None
    combine = weighted_sum() if config.reward_model is not None and rewards is not None else None
    return RunParts(tokenizer, problem_rows, held_out, demonstrations, rewards, episodes, combine, roles)


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
    """Return whether the reference is what the policy is without its adapter: then no second model is built."""
    if policy.lora is None or (reference.lora is not None and reference.lora.path is not None):
        return False
    return replace(reference, lora=None, freeze=[], train_only=[]) == replace(
        policy, lora=None, freeze=[], train_only=[]
    )


def make_tokenizer(config: RunConfig, train: Records, val: Records | None) -> TextTokenizer:
    """Return the tokenizer of the configuration."""
    path = config.tokenizer.path or config.actor_rollout_ref.model.hf_path
    keys = config.data.prompt_key, config.data.answer_key
    rows = [*train.rows, *(val.rows if val is not None else [])]

    def texts() -> tuple[list[str], list[str]]:
        prompts, answers = ([row[key] for row in rows if isinstance(row.get(key), str)] for key in keys)
        return prompts, answers

    return TOKENIZERS.get_or_raise(config.tokenizer.kind)(
        TokenizerSource(path, texts, config.tokenizer.chat_template_kwargs)
    )


def check_vocabulary(config: RunConfig, tokenizer: TextTokenizer) -> None:
    """Raise ConfigError if a model has fewer token ids than the tokenizer."""
    sections = (("actor_rollout_ref", config.actor_rollout_ref), ("critic", config.critic), ("ref", config.ref))
    for role, section in sections:
        if section is not None and section.model.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"{role}.model.vocab_size is {section.model.vocab_size}; the tokenizer has {tokenizer.vocab_size} "
                f"tokens: set {role}.model.vocab_size={tokenizer.vocab_size}, or the model that it refers to",
                key=f"{role}.model.vocab_size",
                value=section.model.vocab_size,
            )
