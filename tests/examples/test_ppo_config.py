from __future__ import annotations

import io
import re

import pytest
import ray
from rich.console import Console

from examples.ppo.config import check_vocabulary, read_config
from examples.ppo.main import main
from mcontroller.errors import ConfigError


def test_one_seed_and_one_model_reach_every_part():
    config = read_config(["seed=7", "model.hidden_size=32"])
    seeds = [
        config.problems.seed,
        config.data.seed,
        config.actor_rollout_ref.seed,
        config.actor_rollout_ref.rollout.seed,
    ]
    assert seeds == [7] * 4 and config.critic.seed == 7
    assert config.actor_rollout_ref.model == config.critic.model == config.model
    assert config.model.hidden_size == 32 and config.model.seed == 7


@pytest.mark.parametrize(("layout", "places"), [(4, [4]), (8, [8])])
def test_the_layout_switch_is_the_number_of_places_in_the_pool(layout, places):
    config = read_config([f"layout={layout}"])
    assert config.pool.process_on_nodes == places and config.pool.max_colocate_count == 2
    assert (config.actor_rollout_ref.parallel.tp, config.actor_rollout_ref.parallel.pp) == (2, 2)
    assert (config.critic.parallel.tp, config.critic.parallel.pp) == (1, 1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "trainer.total_trainings_steps=3",
            "ConfigError: .*total_trainings_steps.*did you mean trainer.total_training_steps",
        ),
        ("layout=6", "LayoutError: actor_rollout_ref on a pool of 6 places: tp 2 x pp 2 x cp 1 = 4 does not divide"),
        ("model.vocab_size=18", "ConfigError: .*vocab_size is 18; the tokenizer of chain_sum has 17 tokens"),
        ("algorithm.adv_estimator=gea", "ConfigError: .*'gea' does not exist: it is one of gae, grpo, rloo"),
        ("trackers=[jsonlines]", "ConfigError: tracker 'jsonlines' does not exist"),
        ("data.train_batch_size=4000", "DataError: train_dataset has 3600 rows, less than one batch of 4000"),
        ("problems.task=chain_sums", "ConfigError: reasoning-gym has no task 'chain_sums'"),
    ],
)
def test_bad_input_is_told_in_words_before_any_process_is_started(override, message, tmp_path):
    out = io.StringIO()
    status = main([override, f"run_dir={tmp_path}"], Console(file=out, width=400, color_system=None))
    assert status == 1 and not ray.is_initialized()
    assert re.search(message, out.getvalue()), out.getvalue()


def test_another_vocabulary_than_the_tokenizers_says_what_to_set():
    with pytest.raises(ConfigError, match=r"set model.vocab_size=33"):
        check_vocabulary(read_config(), 33)


def test_a_run_is_not_written_over_another_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    out = io.StringIO()
    assert main([f"run_dir={tmp_path}"], Console(file=out, width=400, color_system=None)) == 1
    assert "holds a run already: name another, or go on with it by trainer.resume=true" in out.getvalue()
    assert not ray.is_initialized()
