"""The launch file of Slurm on a real Slurm: two nodes of four fake GPUs each, on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Job, SlurmCluster, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TRAIN = ("python", "tests/slurm/train.py")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    cluster.start()
    yield cluster
    cluster.stop()


def test_a_job_on_ranks_of_both_nodes_computes_what_one_rank_computes(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path / "job", *TRAIN, "steps=3")
    assert job.wait()["JobState"] == "COMPLETED", job.log
    assert "node n1 at 127.0.1.1: 8 CPUs, 4 GPUs" in job.log
    assert "node n2 at 127.0.1.2: 8 CPUs, 4 GPUs" in job.log
    assert "ranks run on nodes 127.0.1.1, 127.0.1.1, 127.0.1.2, 127.0.1.2" in job.log
    assert job.log.count("group actor: axis tp crosses nodes in 2 of 2 groups, such as ranks 0, 2 on 127.0.1.1, ") == 1
    difference, fall = map(float, re.findall(r"from one rank (\S+); the loss fell by (\S+)", job.log)[0])
    assert difference < 1e-5
    assert fall > 0.1
    assert "Ray runtime started" in (job.directory / "ray-n2.log").read_text()
    assert nothing_is_left_of(job)


def test_a_job_whose_node_dies_ends_with_an_error_that_names_the_node(cluster: SlurmCluster, tmp_path: Path) -> None:
    # On a busy machine Slurm may notice the node before the launch file has ended, and would start the job again.
    job = cluster.submit(tmp_path / "job", *TRAIN, "steps=0", SBATCH_NO_REQUEUE="1")
    job.wait_for_log("step 1 ")
    cluster.kill_node("n2", job)
    record = job.wait()
    assert record["JobState"] in ("FAILED", "NODE_FAIL"), job.log
    assert re.search(r"WorkerDied: actor rank [23] .* on 127\.0\.1\.2", job.log)
    assert "after the loss of node n2 (127.0.1.2)" in job.log
    assert nothing_is_left_of(job)
    cluster.start_node("n2")


def test_a_job_at_its_time_limit_lets_the_driver_end_and_starts_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    settings = {"MAX_RESTARTS": "1", "RESTART_ARGS": "steps=1"}
    job = cluster.submit(tmp_path / "job", *TRAIN, "steps=0", **settings)
    job.wait_for_log("step 1 ")
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)  # as Slurm does before the time limit
    job.start_again()
    record = job.wait()
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "1"), job.log
    assert "the driver got SIGTERM" in job.log
    assert "after the time limit\nslurm.sbatch: requeue, restart 1 of 1" in job.log
    assert nothing_is_left_of(job)


def test_a_cancelled_job_lets_the_driver_end(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path / "job", *TRAIN, "steps=0")
    job.wait_for_log("step 1 ")
    cluster.run("scancel", "--batch", "--signal=TERM", job.number)
    assert job.wait()["JobState"] == "FAILED"
    assert "the driver got SIGTERM" in job.log
    assert nothing_is_left_of(job)


def test_a_missing_command_is_reported(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path / "job")
    assert job.wait()["JobState"] == "FAILED"
    assert job.log.startswith("usage: sbatch launch/slurm.sbatch COMMAND")


def nothing_is_left_of(job: Job) -> bool:
    """Whether all processes of the job end, and with them the secret of its cluster."""
    until(lambda: not job.processes(), f"end of the processes of job {job.number}", lambda: str(job.processes()))
    return not (job.directory / "ray-token").exists()
