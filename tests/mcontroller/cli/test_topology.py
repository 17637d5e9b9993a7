"""``mcontroller topology`` draws the grid, and who gets which shard and who returns."""

from __future__ import annotations

import pytest

from mcontroller.cli.main import main


def test_the_grid_and_the_shards_of_a_mode_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--world-size", "16", "--tp", "2", "--pp", "2"]
    assert main(["topology", *layout, "--mode", "MEGATRON_COMPUTE_PROTO"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "16 ranks = tp 2 x cp 1 x dp 4 x pp 2"
    assert "dp 1   2-3       10-11" in lines
    assert "MEGATRON_COMPUTE_PROTO: rows split over dp; 16 ranks run, 4 of them return (concat)" in lines
    assert lines[-4:] == [
        "0       0-1, 8-9     8",
        "1       2-3, 10-11   10",
        "2       4-5, 12-13   12",
        "3       6-7, 14-15   14",
    ]


def test_arguments_that_are_not_split_are_one_shard(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--world-size", "8", "--pp", "2", "--mode", "MEGATRON_PP_ONLY"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0       0-7     0, 4"


def test_long_tables_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--world-size", "64", "--mode", "DP_COMPUTE", "--max-rows", "4"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-5:]] == ["0", "1", "2", "..", "63"]


@pytest.mark.parametrize("mode", ["megatron_compute", "something", "DIRECT_ROLLOUT_METHOD"])
def test_a_mode_without_a_plan_is_rejected(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--world-size", "2", "--mode", mode]) == 1
    printed = capsys.readouterr()
    assert mode in printed.err and printed.out == ""


def test_axes_that_cross_nodes_are_reported_without_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--world-size", "12", "--tp", "4"]
    assert main(["topology", *layout, "--gpus-per-node", "4"]) == 0
    assert "crosses" not in capsys.readouterr().out
    assert main(["topology", *layout, "--gpus-per-node", "6"]) == 0
    assert "axis tp crosses nodes in 1 of 3 groups, such as ranks 4-7 on node0, node1" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--gpus-per-node", "--max-rows"])
@pytest.mark.parametrize("value", ["0", "-3"])
def test_a_count_below_one_is_rejected_with_its_option(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["topology", "--world-size", "8", f"{option}={value}"])
    assert ended.value.code == 2 and f"argument {option}: {value}" in capsys.readouterr().err
