"""Several nodes: the order of ranks, their rendezvous, and errors about a process or a node that died."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Any]]:
    """What the driver saw; its cluster writes its address into a separate directory, where no other program looks."""
    directory = tempfile.mkdtemp(prefix="nodes")  # a short name: Ray puts its sockets there
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": directory}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "tests.mcontroller.ray.several_nodes"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    [line_of_results] = [
        line for line in done.stdout.splitlines() if line.startswith('{"where"')
    ]  # Ray prints after it
    yield json.loads(line_of_results)
    shutil.rmtree(directory, ignore_errors=True)


def test_ranks_follow_the_nodes_by_address_and_count_what_is_there(results: dict[str, Any]) -> None:
    ranks = results["where"]
    on = [rank["node"] for rank in ranks]
    assert on in (["127.0.0.9"] * 3 + ["127.0.0.10"], ["127.0.0.9"] + ["127.0.0.10"] * 3)
    assert [rank["RANK"] for rank in ranks] == ["0", "1", "2", "3"]
    assert [rank["LOCAL_RANK"] for rank in ranks] == [str(on[:place].count(node)) for place, node in enumerate(on)]
    assert [rank["LOCAL_WORLD_SIZE"] for rank in ranks] == [str(on.count(node)) for node in on]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"4"}
    assert {rank["MASTER_ADDR"] for rank in ranks} == {"127.0.0.9"}


def test_ranks_of_two_nodes_meet_and_batches_pass_between_them(results: dict[str, Any]) -> None:
    assert results["total"] == [6, 6, 6, 6]
    assert results["same"]


def test_a_death_on_another_node_is_reported_with_the_last_lines_of_its_log(results: dict[str, Any]) -> None:
    death = results["death"]
    assert (death["rank"], death["node"], death["method"]) == (3, "127.0.0.10", "die_on")
    assert death["log_tail"].endswith("the last words of a rank")


def test_a_pool_larger_than_any_node_is_rejected_with_the_existing_resources(results: dict[str, Any]) -> None:
    assert "asks for 4 bundles of 1 CPU on one node" in results["rejected"]
    assert "3 CPU; 3 CPU" in results["rejected"]


def of_the_device(ranks: list[dict[str, str]]) -> list[tuple[str, ...]]:
    names = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RAY_LOCAL_RANK", "RAY_LOCAL_WORLD_SIZE")
    return [tuple(rank[name] for name in names) for rank in ranks]


def test_processes_see_the_uuids_of_their_gpus_and_one_mig_device_each(results: dict[str, Any]) -> None:
    assert of_the_device(results["gpus, isolated=False"]) == [
        ("MIG-80", "0", "1", "0", "2"),
        ("MIG-81", "0", "1", "1", "2"),
        ("GPU-70,GPU-71", "0", "2", "0", "2"),
        ("GPU-70,GPU-71", "1", "2", "1", "2"),
    ]


def test_an_isolated_process_sees_its_own_gpu_only(results: dict[str, Any]) -> None:
    assert of_the_device(results["gpus, isolated=True"]) == [
        ("MIG-80", "0", "1", "0", "2"),
        ("MIG-81", "0", "1", "1", "2"),
        ("GPU-70", "0", "1", "0", "2"),
        ("GPU-71", "0", "1", "1", "2"),
    ]


def test_the_table_of_a_pool_has_the_names_of_its_gpus(results: dict[str, Any]) -> None:
    assert [line.split()[:3] for line in results["table"].splitlines()[2:]] == [
        ["0", "127.0.0.9", "MIG-80"],
        ["1", "127.0.0.9", "MIG-81"],
        ["2", "127.0.0.10", "GPU-70"],
        ["3", "127.0.0.10", "GPU-71"],
    ]


def test_the_record_of_a_stopped_rank_is_read_on_its_node(results: dict[str, Any]) -> None:
    stopped = results["stopped"]
    assert stopped["cause"] == "rank 3 is stopped by a signal, and rank 0 waits for it"
    assert "ranks [0, 1, 2]: all_reduce(float32[2], op=SUM), call 1 on group" in stopped["report"]
    assert "its last on this group: all_reduce, call 0, at " in stopped["report"]


def test_the_death_of_a_node_breaks_the_group_before_ray_reports_it(results: dict[str, Any]) -> None:
    death = results["node_death"]
    assert (death["rank"], death["node"], death["method"]) == (1, "127.0.0.10", "wait")
    assert "neither the process nor Ray's raylet there accepts connections" in death["exit_cause"]
    assert death["seconds"] < 10  # Ray needs 14


def test_a_restart_places_the_ranks_of_a_lost_node_in_spare_bundles(results: dict[str, Any]) -> None:
    replaced = results["replaced"]
    assert [rank["node"] for rank in replaced["where"]] == ["127.0.0.9", "127.0.0.9"]
    assert [(rank["RANK"], rank["LOCAL_RANK"]) for rank in replaced["where"]] == [("0", "0"), ("1", "1")]
    assert replaced["total"] == [1, 1]
    assert replaced["seconds"] < 20  # on a busy machine too; Ray notices the loss after 14 s, and places them then
    assert "pool 'pair' has lost the bundles of ranks 0, 1 with their nodes, and has 0 spare" in results["no_spares"]
