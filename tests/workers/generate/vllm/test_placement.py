"""As many engines as fit the ranks of a group, on as few nodes as possible, in any layout of the group."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from mcontroller.cli.main import main
from mcontroller.errors import ConfigError
from workers.generate.vllm.placement import place_engines


@pytest.mark.parametrize(
    ("counts", "tp", "engines", "spanned"),
    [
        ([8], 1, 8, 1),
        ([8], 4, 2, 1),
        ([8] * 4, 1, 32, 1),
        ([8] * 4, 8, 4, 1),
        ([8] * 4, 16, 2, 2),
        ([8] * 8, 32, 2, 4),
        ([8] * 8, 64, 1, 8),
        ([8] * 5, 16, 2, 2),
        ([6] * 2, 4, 2, 1),
        ([6] * 2, 8, 1, 2),
        ([4, 8, 4], 8, 1, 1),
        ([5, 3], 3, 2, 1),
        ([3, 5, 4], 6, 1, 2),
        ([8] * 2, 12, 1, 2),
        ([1] * 4, 2, 2, 2),
        ([1] * 3, 3, 1, 3),
        ([8] * 512, 8, 512, 1),
        ([8] * 512, 32, 128, 4),
    ],
)
def test_all_engines_have_one_shape_and_share_no_rank(counts: list[int], tp: int, engines: int, spanned: int) -> None:
    nodes = [f"node{node}" for node, count in enumerate(counts) for _ in range(count)]
    placed = place_engines(nodes, tp)
    assert len(placed) == engines
    ranks = [rank for engine in placed for rank in engine.ranks]
    assert len(set(ranks)) == len(ranks) == engines * tp and set(ranks) <= set(range(len(nodes)))
    for engine in placed:
        assert [len(part) for part in engine.parts] == [tp // spanned] * spanned
        on = [{nodes[rank] for rank in part} for part in engine.parts]
        assert all(len(names) == 1 for names in on) and len(set.union(*on)) == spanned
        assert engine.caller == min(engine.ranks) and engine.starters == tuple(min(part) for part in engine.parts)
    assert [engine.caller for engine in placed] == sorted(engine.caller for engine in placed)


def test_ranks_of_a_node_need_not_follow_each_other() -> None:
    assert [engine.parts for engine in place_engines(["a", "b", "a", "b", "a", "b"], 2)] == [((0, 2),), ((1, 3),)]
    assert [engine.parts for engine in place_engines(["a", "b", "a", "b"], 4)] == [((0, 2), (1, 3))]


@pytest.mark.parametrize(("counts", "tp"), [([8], 16), ([8, 4], 16), ([6, 6], 9), ([8] * 3, 32), ([1], 2)])
def test_a_group_without_room_for_an_engine_is_rejected_with_its_ranks(counts: list[int], tp: int) -> None:
    nodes = [f"node{node}" for node, count in enumerate(counts) for _ in range(count)]
    with pytest.raises(ConfigError) as caught:
        place_engines(nodes, tp)
    assert (caught.value.key, caught.value.value) == ("rollout.vllm.tp", tp)
    assert list(caught.value.ranks.values()) == counts


@pytest.mark.processes
@pytest.mark.parametrize(
    ("pool", "beside"), [("pools.rollout", "no other role"), ("pool", "actor_rollout_ref")], ids=["separate", "shared"]
)
def test_check_prints_the_nodes_of_engines_and_the_roles_beside_them(
    pool: str, beside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if find_spec("reasoning_gym") is None:
        pytest.skip("environments for one release do not have the task of the example")
    file, text = tmp_path / "run.yaml", Path("examples/ppo/one_step_off.yaml").read_text()
    file.write_text(text if pool == "pools.rollout" else text.replace("pools:\n  rollout: {process_on_nodes: [1]}", ""))
    changes = [f"{pool}.process_on_nodes=[4, 4, 4]", "trainer.max_staleness=0"]
    changes += ["rollout.rollout.engine=vllm", "rollout.rollout.vllm={python: /vllm/python, tp: 8}"]
    sizes = ["actor_rollout_ref.model.num_attention_heads=8", "actor_rollout_ref.model.num_query_groups=8"]
    assert main(["check", str(file), *changes, *sizes]) == 0
    printed = capsys.readouterr().out
    assert f"rollout: 8 of 12 processes generate: 1 engine of 8, beside {beside}\n" in printed
    assert "rollout: engine 0: ranks 0-3 on node0, ranks 4-7 on node1\n" in printed
