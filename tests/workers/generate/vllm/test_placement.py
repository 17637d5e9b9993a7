"""As many engines as fit the ranks of a data-parallel shard, each on one node."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcontroller.cli.main import main
from mcontroller.errors import ConfigError
from workers.generate.vllm.placement import engines_of_shards

NODES = [f"node{rank // 8}" for rank in range(32)]


@pytest.mark.parametrize(("tp", "engines"), [(1, 32), (2, 16), (8, 4)])
def test_a_shard_of_32_gpus_has_engines_on_all_of_them(tp: int, engines: int) -> None:
    [found] = engines_of_shards([0] * 32, NODES, tp)
    assert len(found) == engines
    assert [rank for ranks in found for rank in ranks] == list(range(32))
    assert all(len({NODES[rank] for rank in ranks}) == 1 for ranks in found)


def test_an_engine_has_ranks_of_one_shard_on_one_node() -> None:
    nodes = ["a", "a", "a", "b", "b", "b"]
    assert engines_of_shards([0, 1, 0, 1, 0, 1], nodes, 1) == [[(0,), (2,), (4,)], [(1,), (3,), (5,)]]
    assert engines_of_shards([0, 0, 0, 0, 0, 0], nodes, 2) == [[(0, 1), (3, 4)]]  # ranks 2 and 5 have none


def test_a_shard_without_room_for_an_engine_on_a_node_is_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        engines_of_shards([0, 0, 0, 0, 1, 1, 1, 1], ["a"] * 6 + ["b"] * 2, 4)
    assert (caught.value.key, caught.value.value) == ("rollout.vllm.tp", 4)


ROLE = """
model: {vocab_size: 131072, max_sequence_length: 4096, num_layers: 32, hidden_size: 4096, num_attention_heads: 32,
  num_query_groups: 8, ffn_hidden_size: 14336, dtype: bfloat16}
parallel: {tp: 8, pp: 4}
"""


@pytest.mark.parametrize(
    ("rollout", "used"),
    [("{engine: vllm}", 64), ("{engine: vllm, vllm: {tp: 8}}", 64), ("{engine: megatron}", 64)],
    ids=["tp1", "tp8", "megatron"],
)
def test_check_prints_how_many_gpus_generate(
    rollout: str, used: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "actor.yaml"
    file.write_text(f"{ROLE}rollout: {rollout}\n")
    assert main(["check", str(file), "--role", "actor_rollout_ref", "--world-size", "64"]) == 0
    assert f"actor_rollout_ref: {used} of 64 GPUs generate\n" in capsys.readouterr().out


def test_check_counts_the_gpus_that_no_engine_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "actor.yaml"
    file.write_text(
        ROLE.replace("{tp: 8, pp: 4}", "{tp: 2, pp: 3, sequence_parallel: true}").replace("32, hidden", "33, hidden")
        + "rollout: {engine: vllm, vllm: {tp: 4}}\n"
    )
    assert main(["check", str(file), "--role", "actor_rollout_ref", "--world-size", "12"]) == 0
    assert "actor_rollout_ref: 8 of 12 GPUs generate\n" in capsys.readouterr().out
