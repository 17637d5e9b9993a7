"""Other pools of a run: which roles they have, what is checked and printed about them, and who a rollout is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray

from mcontroller.cli.main import main
from mcontroller.errors import ConfigError, MControllerError
from tests.trainer.run.test_check_run import config_file  # noqa: F401 - a fixture
from trainer import Role
from trainer.run.config import RunConfig, read_run_config
from trainer.run.parts import make_parts, roles_of
from trainer.run.pools import pools_of
from workers.config import ModelConfig, ParallelConfig, load_config
from workers.same_policy import check_same_policy

MODEL = "{vocab_size: 32, max_sequence_length: 16, num_layers: 2, hidden_size: 64, num_attention_heads: 4}"
CRITIC = ["algorithm.adv_estimator=gae", f"critic.model={MODEL}"]
ROLLOUT = ["rollout.parallel.tp=2", "pools.rollout.process_on_nodes=[2]"]
SHARED = ["pools.scores.process_on_nodes=[1, 1]", "pools.scores.roles=[ref, reward_model]"]
SCORES = [f"ref.model={MODEL}", f"reward_model.model={MODEL}", *SHARED]


def read(file: Path, *overrides: str) -> RunConfig:
    return read_run_config(file, list(overrides))


def errors_of_run(file: Path, *overrides: str) -> list[MControllerError]:
    """Return the errors of the parts of a run, without errors of the data."""
    with pytest.raises(MControllerError) as raised:
        make_parts(read(file, *overrides))
    return getattr(raised.value, "errors", [raised.value])


def test_every_role_is_in_its_pool_with_a_slot_for_each_role(config_file: Path) -> None:  # noqa: F811
    config = read(config_file, *CRITIC, *ROLLOUT, *SCORES)
    manager = pools_of(config, roles_of(config))
    assert manager.mapping == {
        Role.Actor: "pool",
        Role.Critic: "pool",
        Role.Rollout: "rollout",
        Role.RefPolicy: "scores",
        Role.RewardModel: "scores",
    }
    assert manager.resource_pool_spec == {"pool": [2, 2], "rollout": [2], "scores": [1, 1]}
    assert [manager.slots_of(name) for name in ("pool", "rollout", "scores")] == [2, 1, 2]
    assert manager.get_n_slots() == 4 * 2 + 2 + 2 * 2 and manager.get_n_gpus() == 8
    make_parts(config)
    chosen = read(config_file, *CRITIC, *ROLLOUT, "pool.max_colocate_count=3")
    manager = pools_of(chosen, roles_of(chosen))
    assert [manager.slots_of(name) for name in ("pool", "rollout")] == [3, 1]


def test_a_rollout_has_the_values_of_the_actor_that_it_does_not_set(config_file: Path) -> None:  # noqa: F811
    of_actor = ["actor_rollout_ref.rollout.temperature=0.5", "actor_rollout_ref.model.transformer={init_method: a}"]
    of_actor += ["actor_rollout_ref.parallel={tp: 2, pp: 2}"]
    of_rollout = ["rollout.parallel.tp=4", "rollout.model.dtype=bfloat16", "rollout.rollout.max_rows=7"]
    config = read(config_file, *of_actor, *of_rollout)
    actor, rollout = config.actor_rollout_ref, config.rollout
    assert rollout is not None and rollout.parallel == ParallelConfig(tp=4) != actor.parallel
    assert (rollout.model.dtype, actor.model.dtype) == ("bfloat16", "float32")
    assert rollout.model.transformer == actor.model.transformer and rollout.model.num_layers == 2
    assert (rollout.rollout.n, rollout.rollout.temperature, rollout.rollout.max_rows) == (2, 0.5, 7)
    assert read(config_file, "rollout={}").rollout == read(config_file).actor_rollout_ref
    assert read(config_file, "rollout=null").rollout is None


MISTRAL = {
    "model_type": "mistral",
    "vocab_size": 32,
    "max_position_embeddings": 16,
    **{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"head_dim": 16, "intermediate_size": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
    **{"rope_theta": 1e6, "sliding_window": 8, "tie_word_embeddings": False},
}


def test_mappings_of_a_rollout_are_those_of_the_actor_by_key(config_file: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(MISTRAL))
    engine = "{enable_prefix_caching: true, compilation_config: {level: 3, mode: a}}"
    config = read(
        config_file,
        *(f"model={{hf_path: {tmp_path / 'base'}}}", "actor_rollout_ref.model=${model}", "tokenizer.kind=characters"),
        "model.transformer={apply_rope_fusion: true, softmax_scale: 0.5}",
        "actor_rollout_ref.rollout.engine=vllm",
        f"actor_rollout_ref.rollout.vllm.options={engine}",
        "rollout.model.transformer={apply_rope_fusion: false}",
        "rollout.rollout.vllm.options={compilation_config: {level: 0}}",
    )
    actor, rollout = config.actor_rollout_ref, config.rollout
    assert rollout is not None
    assert actor.model.transformer == {"window_size": [7, 0], "apply_rope_fusion": True, "softmax_scale": 0.5}
    assert rollout.model.transformer == {"window_size": [7, 0], "apply_rope_fusion": False, "softmax_scale": 0.5}
    options = {"enable_prefix_caching": True, "compilation_config": {"level": 0, "mode": "a"}}
    assert rollout.rollout.vllm.options == options
    check_same_policy(actor, rollout)


def test_sizes_that_are_given_leave_the_rest_of_a_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL))
    sizes = {"vocab_size": 32, "max_sequence_length": 16, "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    expected = load_config(ModelConfig, {"hf_path": str(tmp_path)})
    assert (expected.rotary_base, expected.ffn_hidden_size, expected.transformer) == (1e6, 128, {"window_size": [7, 0]})
    assert load_config(ModelConfig, {"hf_path": str(tmp_path)}, sizes) == expected
    assert load_config(ModelConfig, {"hf_path": str(tmp_path / "absent")}, sizes).rotary_base == 10000


def test_a_rollout_without_a_model_of_the_actor_is_reported_as_that(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rollout: {parallel: {tp: 1}}\nactor_rollout_ref: {seed: 3}\n")
    with pytest.raises(ConfigError) as caught:
        read_run_config(file)
    assert (caught.value.key, caught.value.value) == ("actor_rollout_ref.model", None)
    sizes = "{num_layers: 2, vocab_size: 12}"
    file.write_text(f"rollout: {{parallel: {{tp: 1}}}}\nactor_rollout_ref: {{model: {sizes}}}\n")
    with pytest.raises(ConfigError) as raised:
        read_run_config(file)
    assert raised.value.key == "actor_rollout_ref.model.hf_path"
    assert "rollout.model" not in str(raised.value).replace("actor_rollout_ref", "")


def test_the_axes_of_each_role_divide_its_own_pool(config_file: Path) -> None:  # noqa: F811
    wide = [*ROLLOUT, "rollout.parallel={tp: 4}", "pools.rollout.process_on_nodes=[4]", "pool.process_on_nodes=[4]"]
    make_parts(read(config_file, *wide))
    (error,) = errors_of_run(config_file, *wide, "pools.rollout.process_on_nodes=[2]")
    assert "rollout on the pool 'rollout'" in str(error) and (error.world_size, error.product) == (2, 4)
    (error,) = errors_of_run(config_file, *wide, "pool.process_on_nodes=[2]")
    assert "actor_rollout_ref" in str(error) and (error.world_size, error.product) == (2, 4)


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["pools.rollout.process_on_nodes=[1]"], "pools.rollout", "rollout"),
        (["pools.ref.process_on_nodes=[1]"], "pools.ref", "ref"),
        ([*CRITIC[1:], "pools.critic.process_on_nodes=[1]"], "pools.critic", "critic"),
        (["pools.reward_model.process_on_nodes=[1]"], "pools.reward_model", "reward_model"),
        (["pools.rolout.process_on_nodes=[1]"], "pools.rolout", "rolout"),
        ([*SHARED[:1], "pools.scores.roles=[actor_rollout_ref]"], "pools.scores.roles", "actor_rollout_ref"),
        ([*SCORES, "pools.ref.process_on_nodes=[1]"], "pools.ref", "ref"),
        (["pools.pool.process_on_nodes=[1]"], "pools.pool", "pool"),
        ([*CRITIC, "pool.max_colocate_count=1"], "pool.max_colocate_count", 1),
    ],
)
def test_a_pool_that_does_not_fit_the_run_is_an_error_with_its_key(
    config_file: Path,  # noqa: F811
    overrides: list[str],
    key: str,
    value: object,
) -> None:
    (error,) = errors_of_run(config_file, *overrides)
    assert (error.key, error.value) == (key, value)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("pools.rollout.process_on_node=[1]", "pools.rollout.process_on_node"),
        ("pools.rollout.process_on_nodes=[]", "pools.rollout.process_on_nodes"),
        ("pools.rollout.process_on_nodes=[1, 0]", "pools.rollout.process_on_nodes"),
        ("pools.rollout={}", "pools.rollout.process_on_nodes"),
    ],
)
def test_a_pool_with_a_wrong_field_is_named(config_file: Path, override: str, key: str) -> None:  # noqa: F811
    with pytest.raises(ConfigError) as raised:
        read(config_file, override)
    assert raised.value.key == key


def test_generation_ahead_says_which_section_and_which_pool_to_set(config_file: Path) -> None:  # noqa: F811
    ahead = ["trainer.max_staleness=1", "algorithm.importance.level=token"]
    (error,) = errors_of_run(config_file, *ahead)
    assert "rollout={}" in str(error) and "pools.rollout.process_on_nodes" in str(error)
    (error,) = errors_of_run(config_file, *ahead, "rollout={}", "pool.use_gpu=true", "pool.process_on_nodes=[4]")
    assert "pools.rollout.process_on_nodes" in str(error)
    make_parts(read(config_file, *ahead, *ROLLOUT, "pool.use_gpu=true"))


@pytest.mark.simulated
def test_check_prints_every_role_and_resource_by_pool(
    config_file: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", str(config_file), *CRITIC, *ROLLOUT, *SCORES, "pool.use_gpu=true", "ref.parallel.tp=2"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    for line in (
        "actor_rollout_ref: 4 ranks, tp 4 x dp 1 x pp 1",
        "rollout: 2 ranks, tp 2 x dp 1 x pp 1",
        "ref: 2 ranks, tp 2 x dp 1 x pp 1",
        "pool: 4 bundles of 1 GPU on 2 nodes, 8 slots for processes",
        "pool rollout: 2 bundles of 1 GPU on 1 nodes, 2 slots for processes",
        "pool scores: 2 bundles of 1 GPU on 2 nodes, 4 slots for processes",
    ):
        assert line in lines, printed
    crossing = {line.partition(":")[0] for line in lines if "axis tp crosses nodes" in line}
    assert crossing == {"actor_rollout_ref", "ref"}
    start, end = (next(at for at, line in enumerate(lines) if line.startswith(text)) for text in ("GB (2", "GiB on"))
    table, section = set(), ""
    for line in filter(None, lines[start + 2 : end]):
        if line.startswith(" "):
            table.add(f"{section}.{line.split()[0]}")
        else:
            section = line.removesuffix(":")
    assert table == {
        *("actor_rollout_ref.update_actor", "actor_rollout_ref.compute_log_prob", "ref.compute_ref_log_prob"),
        *("critic.update_critic", "critic.compute_values", "reward_model.compute_rm_score"),
        "rollout.generate_sequences",
    }
    rows = [line.split() for line in lines[end + 2 :]]
    phases = {(row[0], row[1].partition(".")[0]) for row in rows if row[1:] and "_" in row[1]}
    assert phases == {
        *(("pool", "actor_rollout_ref"), ("pool", "critic"), ("rollout", "rollout")),
        *(("scores", "ref"), ("scores", "reward_model")),
    }
    assert not ray.is_initialized()


@pytest.mark.simulated
def test_check_adds_up_what_the_pools_need(
    config_file: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ["pool.use_gpu=true", *ROLLOUT, "pools.rollout.process_on_nodes=[5000, 5000]"]
    assert main(["check", str(config_file), *more]) == 0
    keys = "pool.process_on_nodes, pools.rollout.process_on_nodes"
    assert f"the pools need 10004 GPUs: reduce {keys}" in capsys.readouterr().out.splitlines()


@pytest.mark.simulated
def test_memory_is_that_of_the_ranks_of_the_roles_own_pool(
    config_file: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    big = ["actor_rollout_ref.model.hidden_size=4096", "actor_rollout_ref.parallel.tp=1"]

    def activations(nodes: str) -> float:
        pool = f"pools.rollout.process_on_nodes={nodes}"
        batch = ["data.train_batch_size=2"]
        batch += ["actor_rollout_ref.rollout.n=1024", "actor_rollout_ref.rollout.max_rows=2048"]
        assert main(["check", str(config_file), *big, *batch, "rollout.parallel.tp=1", pool]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        header = next(line for line in lines if line[:2] == ["call", "stage"])
        row = next(line for line in lines if line[:1] == ["generate_sequences"])
        return float(row[header.index("activations")])

    assert activations("[1]") == pytest.approx(2 * activations("[2]"), rel=0.01)  # of half of the rows


def test_groups_that_share_gpus_of_several_nodes_are_rejected(config_file: Path) -> None:  # noqa: F811
    colocated = ["rollout={}", "pool.use_gpu=true"]
    (error,) = errors_of_run(config_file, *colocated)
    assert (error.key, error.value) == ("role_worker_mapping", "pool")
    for fits in (["pool.process_on_nodes=[4]"], [*ROLLOUT, "rollout.parallel.tp=2"], ["pool.use_gpu=false"]):
        make_parts(read(config_file, *colocated, *fits))
