"""The configuration of a run: everything that is wrong is reported together, before anything starts."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import pytest
import ray

from mcontroller.cli.main import main
from mcontroller.errors import ConfigError, DataError, LayoutError, MControllerError
from tests.workers.weights.test_hf_fields import QWEN_3_CODER
from trainer.roles import role_workers
from trainer.run import check_verb
from trainer.run.config import read_run_config
from trainer.run.model_roles import role_calls
from trainer.run.parts import make_parts, roles_of
from workers.planning import planning

RUN = """
imports: [examples.ppo.tokenizer]
tokenizer: {kind: characters}
data:
  train: {path: ROWS}
  train_batch_size: 2
rewards:
  functions:
    exact: {function: "trainer.rewards.functions:exact_match"}
algorithm: {adv_estimator: grpo}
pool: {process_on_nodes: [2, 2]}
actor_rollout_ref:
  model: {vocab_size: 32, max_sequence_length: 16, num_layers: 2, hidden_size: 64, num_attention_heads: 4}
  parallel: {tp: 4}
  rollout: {prompt_length: 8, response_length: 4, n: 2}
"""
ROWS = [{"prompt": "Add: 1 + 2 =", "answer": "3"}, {"prompt": "Add: 2 + 2 =", "answer": "4"}]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    rows = tmp_path / "rows.jsonl"
    long = {"prompt": "Add: 1 + 1 + 1 + 1 + 1 =", "answer": "5"}
    rows.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, long]))
    file = tmp_path / "run.yaml"
    file.write_text(RUN.replace("ROWS", str(rows)))
    return file


@pytest.mark.simulated
def test_check_prints_data_layout_locality_resources_and_memory(config_file, capsys):
    assert main(["check", str(config_file)]) == 0
    printed = capsys.readouterr().out
    assert "data.train: 2 prompts, 1 dropped: longer than 8 tokens" in printed
    assert "actor_rollout_ref: 4 ranks, tp 4 x dp 1" in printed
    assert "actor_rollout_ref: tp crosses nodes" in printed or "tp" in printed.split("locality")[0]
    assert "pool: 4 bundles of 1 CPU on 2 nodes, 4 slots for processes" in printed and "this machine" in printed
    assert "GB (2**30 bytes)" in printed
    assert not ray.is_initialized()


def test_all_errors_of_fields_are_reported_together_with_near_names(config_file):
    wrong = [
        "seeed=3",
        "trainer.total_training_step=3",
        "trainer.offload=sometimes",
        "actor_rollout_ref.rollout.temperature=hot",
        "rewards.functions.exact.wieght=2",
        "data.train_batch_size=0",
    ]
    with pytest.raises(ConfigError) as raised:
        read_run_config(config_file, wrong)
    assert {error.key for error in raised.value.errors} == {
        "seeed",
        "trainer.total_training_step",
        "trainer.offload",
        "actor_rollout_ref.rollout.temperature",
        "rewards.functions.exact.wieght",
        "data.train_batch_size",
    }
    assert raised.value.errors[0].close_matches == ["seed"]


def test_all_errors_of_the_parts_are_reported_together(config_file):
    config = read_run_config(
        config_file,
        [
            "trackers=[jsonlines]",
            "pool.process_on_nodes=[3]",
            "actor_rollout_ref.rollout.n=1",
            "actor_rollout_ref.model.vocab_size=4",
            "rewards.functions.exact.function=trainer.rewards.functions:exact_macth",
            "data.val.path=missing.jsonl",
            "data.train_batch_size=50",
            f"trainer.export_hf={config_file.parent}",
        ],
    )
    with pytest.raises(ConfigError) as raised:
        make_parts(config)
    errors = raised.value.errors
    assert Counter(map(type, errors)) == {ConfigError: 5, DataError: 2, LayoutError: 1}
    assert {error.key for error in errors if isinstance(error, ConfigError)} == {
        "trackers",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.model.vocab_size",
        "rewards.functions.exact.function",
        "path",
    }


def check(file: Path, *overrides: str) -> None:
    parser = argparse.ArgumentParser()
    check_verb.add_arguments(parser)
    check_verb.run(parser.parse_args([str(file), *overrides]))


@pytest.mark.parametrize(
    ("mistake", "key"),
    [
        ("algorithm.adv_estimator=grop", "algorithm.adv_estimator"),
        ("actor_rollout_ref.rollout.n=0", "actor_rollout_ref.rollout.n"),
        ("data.train_batch_size=many", "data.train_batch_size"),
        ("actor_rollout_ref.optim.lr=-1", "actor_rollout_ref.optim.lr"),
        ("actor_rollout_ref.model.transformer.nope=1", "actor_rollout_ref.model.transformer.nope"),
        ("actor_rollout_ref.model=3", "actor_rollout_ref.model"),
        ("pool.process_on_nodes=[0]", "pool.process_on_nodes"),
        ("pool.process_on_nodes=[x]", "pool.process_on_nodes[0]"),
        ("pool.process_on_nodes=4", "pool.process_on_nodes"),
        ("rewards.functions.exact=3", "rewards.functions.exact"),
    ],
)
def test_one_mistake_is_one_error_with_the_whole_key(config_file, mistake, key):
    with pytest.raises(ConfigError) as raised:
        check(config_file, mistake)
    assert raised.value.key == key and "errors" not in raised.value.fields


@pytest.mark.parametrize(
    ("setting", "is_used"),
    [
        ("data.seed=${seed}", True),
        ("data.seed=${..seed}", True),
        ("data.seed=${oc.select:seed,3}", True),
        ("run_dir='the \\${seed}'", False),
        ("run_dir=${data.seed}", False),
    ],
)
def test_a_seed_that_nothing_refers_to_is_rejected(config_file: Path, setting: str, is_used: bool) -> None:
    if is_used:
        assert read_run_config(config_file, ["seed=3", setting]).data.seed == 3
        return
    with pytest.raises(ConfigError) as caught:
        read_run_config(config_file, ["seed=3", setting])
    assert (caught.value.key, caught.value.value) == ("seed", 3)


def test_an_override_may_replace_the_reference_to_a_seed(config_file: Path) -> None:
    config_file.write_text(config_file.read_text().replace("data:", "seed: 3\ndata:\n  seed: ${seed}"))
    assert read_run_config(config_file).data.seed == 3
    assert read_run_config(config_file, ["data.seed=4"]).data.seed == 4


@pytest.mark.parametrize("setting", ["tokenizer.path=somewhere", "tokenizer.chat_template_kwargs={a: 1}"])
def test_a_setting_that_the_tokenizer_does_not_read_is_rejected(config_file: Path, setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_parts(read_run_config(config_file, [setting]))
    assert caught.value.key == setting.partition("=")[0]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["actor_rollout_ref.sft_optim.lr=1e-3"], "actor_rollout_ref.sft_optim"),
        (["ref.model=${actor_rollout_ref.model}", "ref.optim.lr=1e-3"], "ref.optim"),
        (["rollout.entropy_coeff=0.1"], "rollout.entropy_coeff"),
        (["pool.spare_bundles=1", "trainer.max_restarts=0"], "pool.spare_bundles"),
        (["data.chat_template=false", "tokenizer.chat_template_kwargs={a: 1}"], "tokenizer.chat_template_kwargs"),
        (["actor_rollout_ref.rollout.vllm.tp=2"], "actor_rollout_ref.rollout.vllm"),
        (
            ["actor_rollout_ref.model.rotary_base=7", "actor_rollout_ref.model.position_embedding_type=none"],
            "actor_rollout_ref.model.rotary_base",
        ),
        (
            ["actor_rollout_ref.model.transformer.moe_aux_loss_coeff=0.1"],
            "actor_rollout_ref.model.transformer.moe_aux_loss_coeff",
        ),
        (
            ["actor_rollout_ref.model.transformer.mtp_loss_scaling_factor=0.1"],
            "actor_rollout_ref.model.transformer.mtp_loss_scaling_factor",
        ),
        (
            ["actor_rollout_ref.model.lora={rank: 2, alpha: 4.0}", "actor_rollout_ref.model.freeze=['*']"],
            "actor_rollout_ref.model.freeze",
        ),
    ],
)
def test_a_setting_that_another_one_switches_off_is_rejected_with_the_whole_key(
    config_file: Path, settings: list[str], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run_config(config_file, settings)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["rollout.engine=vllm", "rollout.vllm.pause=abort"], "actor_rollout_ref.rollout.vllm.pause"),
        (["kl_loss_coef=0.1"], "actor_rollout_ref.kl_loss_coef"),
    ],
)
def test_a_setting_that_the_trainer_makes_is_rejected_with_the_whole_key(
    config_file: Path, settings: list[str], key: str
) -> None:
    rule = ["algorithm.adv_estimator=rloo", "algorithm.use_kl_in_reward=true"]
    config = read_run_config(config_file, [*rule, *(f"actor_rollout_ref.{setting}" for setting in settings)])
    with pytest.raises(ConfigError) as caught:
        role_workers(config, roles_of(config))
    assert caught.value.key == key


def test_references_and_rollouts_may_refer_to_the_whole_actor(config_file: Path) -> None:
    section = "${actor_rollout_ref}"
    settings = ["actor_rollout_ref.optim.lr=1e-3", f"ref={section}", f"rollout={section}"]
    config = read_run_config(config_file, settings)
    assert config.rollout == config.ref == config.actor_rollout_ref


@pytest.mark.parametrize("file", ["metrics.jsonl", "summary.json"])
def test_check_rejects_the_directory_of_another_run_as_train_does(config_file, tmp_path, file):
    (tmp_path / file).touch()
    with pytest.raises(ConfigError) as raised:
        check(config_file, f"run_dir={tmp_path}")
    assert raised.value.key == "run_dir"


def test_a_file_that_is_not_yaml_is_rejected_with_its_line(tmp_path):
    (tmp_path / "run.yaml").write_text("trainer: {total\n  a: b: c\n")
    with pytest.raises(ConfigError) as caught:
        read_run_config(tmp_path / "run.yaml")
    assert caught.value.value is None


def test_paths_of_a_run_do_not_depend_on_the_working_directory(config_file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    overrides = [
        "data.train.path=rows.jsonl",
        "rewards.functions.exact.function=mine.py:score",
        "imports=[]",
        "tokenizer.path=tok",
    ]
    config = read_run_config(config_file, overrides).within(tmp_path / "run")
    assert config.data.train.path == str(tmp_path / "rows.jsonl")
    assert config.rewards.functions["exact"].function == f"{tmp_path}/mine.py:score"
    assert config.tokenizer.path == str(tmp_path / "tok")
    assert config.trainer.default_local_dir == str(tmp_path / "run" / "checkpoints")


def test_a_shared_pool_of_gpus_is_rejected_one_step_off_policy(config_file: Path) -> None:
    settings = ["rollout=${actor_rollout_ref}", "trainer.max_staleness=1", "algorithm.importance.level=token"]
    parts = make_parts(read_run_config(config_file, settings))
    assert len(parts.roles) == 2
    with pytest.raises(ConfigError) as caught:
        make_parts(read_run_config(config_file, [*settings, "pool.use_gpu=true"]))
    assert (caught.value.key, caught.value.value) == ("role_worker_mapping", None)
    with pytest.raises(ConfigError) as caught:
        make_parts(read_run_config(config_file, settings[1:]))
    assert (caught.value.key, caught.value.value) == ("trainer.max_staleness", 1)


def test_a_timeout_of_collectives_ends_no_start_of_an_engine(config_file):
    short = ["actor_rollout_ref.rollout.engine=vllm", "actor_rollout_ref.timeout_s=600"]
    with pytest.raises(ConfigError) as caught:
        read_run_config(config_file, short)
    assert (caught.value.key, caught.value.value) == ("actor_rollout_ref.timeout_s", 600.0)
    assert read_run_config(config_file, short[:1]).actor_rollout_ref.timeout_s == 7200


@pytest.mark.processes
def test_a_run_of_other_machines_is_checked_without_weights_and_packages(config_file, tmp_path, capsys):
    """A model of 30e9 parameters by its config.json, engines of vLLM and layers of Transformer Engine, on no GPU."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN_3_CODER))
    actor = f"""
actor_rollout_ref:
  model: {{hf_path: {model}, transformer_impl: transformer_engine, dtype: bfloat16}}
  parallel: {{tp: 2, ep: 2, etp: 1, sequence_parallel: true}}
  rollout: {{engine: vllm, prompt_length: 8, response_length: 4, n: 2}}
"""
    config_file.write_text(config_file.read_text().partition("actor_rollout_ref:")[0] + actor)
    planned = ["pool={process_on_nodes: [8, 8], use_gpu: true}"]
    assert main(["check", str(config_file), *planned]) == 0
    printed = capsys.readouterr().out
    assert f"actor_rollout_ref: {model} has no weights on this machine: not checked" in printed
    update = next(line.split() for line in printed.splitlines() if "update_actor" in line)
    weights = 29.0e9 / 2 + 1.54e9 / 2  # of experts, and others
    assert float(update[2]) == pytest.approx(2 * 2 * weights / 2**30, rel=0.01)  # of the policy and its reference
    with pytest.raises(MControllerError) as caught:
        make_parts(read_run_config(config_file, planned))
    not_installed, no_weights = caught.value.errors
    assert (not_installed.key, not_installed.value) == ("actor_rollout_ref.rollout.engine", "vllm")
    assert no_weights.path == str(model)


@pytest.mark.simulated
def test_an_engine_that_crosses_nodes_is_placed_and_gets_whole_weights_on_each(config_file, capsys):
    engine = ["pool.use_gpu=true", "actor_rollout_ref.rollout={engine: vllm, vllm: {tp: 4}, n: 2}"]
    small = ["actor_rollout_ref.parallel.tp=2", "actor_rollout_ref.rollout.prompt_length=8"]
    assert main(["check", str(config_file), *engine, *small, "actor_rollout_ref.rollout.response_length=4"]) == 0
    printed = capsys.readouterr().out
    assert "actor_rollout_ref: 4 of 4 GPUs generate: 1 engine of 4, beside the policy" in printed
    assert "actor_rollout_ref: engine 0: ranks 0-1 on node0, ranks 2-3 on node1" in printed
    with planning():
        call = role_calls(read_run_config(config_file, [*engine, *small]))["actor_rollout_ref.rollout_weights"]
        outcome = call.outcome(every_rank=True)
    assert call.receivers == (0, 2) and not outcome.failure
    buckets = {rank: use.peak - sum(use.idle.values()) for rank, use in outcome.uses.items()}
    (use, *_) = outcome.uses.values()
    assert min(buckets[0], buckets[2]) > use.weights * 2 * 2 > max(buckets[1], buckets[3])
