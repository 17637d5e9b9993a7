from __future__ import annotations

import io
import re

import pytest
import ray
from rich.console import Console

from examples.ppo.main import CONFIG, main
from mcontroller.errors import ConfigError
from trainer.run.config import read_run_config


def test_one_seed_and_one_model_reach_every_part():
    config = read_run_config(CONFIG, ["seed=7", "model.hidden_size=32"])
    seeds = [
        config.data.train.seed,
        config.data.val.seed,
        config.data.seed,
        config.actor_rollout_ref.seed,
        config.actor_rollout_ref.rollout.seed,
    ]
    assert seeds == [7] * 5 and config.critic.seed == 7
    assert config.actor_rollout_ref.model == config.critic.model == config.model
    assert config.model.hidden_size == 32 and config.model.seed == 7


def test_every_command_of_the_demo_is_a_valid_configuration():
    page = (CONFIG.parents[2] / "docs/results.md").read_text(encoding="utf-8")
    commands = re.findall(r'(?<!\$ )make demo [^`\n]*ARGS="([^"]+)"', page)  # those after a $ show errors
    assert commands
    for command in commands:
        read_run_config(CONFIG, command.split())


def test_the_held_out_questions_come_before_those_to_train_on():
    data = read_run_config(CONFIG, ["data.val.size=100"]).data
    assert (data.val.skip, data.val.size, data.train.skip) == (0, 100, 100)
    assert (data.val.task, data.val.options, data.val.seed) == (data.train.task, data.train.options, data.train.seed)


@pytest.mark.parametrize(("layout", "bundles"), [(4, [4]), (8, [8])])
def test_the_layout_switch_is_the_number_of_bundles_in_the_pool(layout, bundles):
    config = read_run_config(CONFIG, [f"layout={layout}"])
    assert config.pool.process_on_nodes == bundles
    assert (config.actor_rollout_ref.parallel.tp, config.actor_rollout_ref.parallel.pp) == (2, 2)
    assert (config.critic.parallel.tp, config.critic.parallel.pp) == (1, 1)


def test_bad_input_is_reported_before_any_process_starts(tmp_path):
    out = io.StringIO()
    status = main(["layout=6", f"run_dir={tmp_path}"], Console(file=out, width=400, color_system=None))
    assert status == 1 and not ray.is_initialized()
    assert "LayoutError: actor_rollout_ref on a pool of 6 bundles" in out.getvalue()


def test_a_run_does_not_overwrite_another_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    out = io.StringIO()
    assert main([f"run_dir={tmp_path}"], Console(file=out, width=400, color_system=None)) == 1
    assert "contains a run already: set another one, or resume it with mcontroller resume" in out.getvalue()
    assert not ray.is_initialized()


def test_an_error_that_several_sections_find_is_reported_once_as_it_is():
    with pytest.raises(ConfigError) as caught:
        read_run_config(CONFIG, ["actor_rollout_ref.parallel.tp=3"])
    assert (caught.value.key, caught.value.value) == ("actor_rollout_ref.model.num_attention_heads", 2)
