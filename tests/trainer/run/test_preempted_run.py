"""A run goes on to the same weights after SIGTERM and the deaths of a rank and its driver; its files are private."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.trainer.run.test_verbs import ENVIRONMENT, folder, shards  # noqa: F401 - a fixture
from trainer.saving.recovery import FAILURES

pytest.importorskip("transformers", reason="the extra hf: no transformers")
SECRET = "planted-zq81-secret"
SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD")
VERBS = """
import os
import signal
import subprocess
import sys
import time
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table
from mcontroller.cli.main import main
from trainer.loop import RayPPOTrainer

os.umask(0o077)
small = ["trainer.total_training_steps=4", "data.train_batch_size=4"]
step = RayPPOTrainer.train_step

def signalled(self, *args, **kwargs):
    global sent
    sent = time.monotonic()
    os.killpg(os.getpgrp(), signal.SIGTERM)  # as a scheduler does: to every process of the job
    return step(self, *args, **kwargs)

RayPPOTrainer.train_step = signalled
stopped = main(["train", "run.yaml", "run_dir=out", *small])
print("ended after", time.monotonic() - sent)
RayPPOTrainer.train_step = step

cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=4, include_dashboard=False))
on = "cluster.address=" + cluster.address
died = subprocess.run([sys.executable, "-c", os.environ["DIES"], on], stdout=subprocess.DEVNULL).returncode

def killed(self, *args, **kwargs):
    if self.global_steps == 3 and not self.recovery.failures:
        os.kill(self.actor.executor.processes.handles.infos[-1].pid, signal.SIGKILL)
    elif self.recovery.failures:
        print("again after step", self.global_steps)
    return step(self, *args, **kwargs)

RayPPOTrainer.train_step = killed
# At once after the death of the driver: its cluster goes on without it.
healed = main(["resume", "out", on, "trainer.memory_save_freq=1"])
RayPPOTrainer.train_step = step

whole = main(["train", "run.yaml", on, "run_dir=whole", *small])
ray.init(cluster.address, log_to_driver=False)
total, deadline = ray.cluster_resources(), time.monotonic() + 10
while ray.available_resources() != total and time.monotonic() < deadline:
    time.sleep(0.1)
states = {actor["State"] for actor in ray._private.state.actors().values()}
placements = {placement["state"] for placement in placement_group_table().values()}
print("left", states, placements, {**total, **ray.available_resources()} == total)
ray.shutdown()
cluster.shutdown()
print("codes", stopped, died, healed, whole)
"""
DIES = """
import os
import signal
import sys
from mcontroller.cli.main import main
from trainer.loop import RayPPOTrainer

step = RayPPOTrainer.train_step
RayPPOTrainer.train_step = lambda self, batch: os.kill(os.getpid(), signal.SIGKILL) if self.global_steps == 2 else step(
    self, batch
)
main(["resume", "out", "trainer.save_freq=1", *sys.argv[1:]])
"""


def names_in_shared_folders() -> set[str]:
    return {str(path) for shared in (tempfile.gettempdir(), "/dev/shm") for path in Path(shared).glob("*mcontroller*")}


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_stopped_and_killed_a_run_goes_on_to_the_same_weights(
    folder: Path,  # noqa: F811
) -> None:
    """One run is stopped in step 1, loses its driver in step 3, and a rank in step 4."""
    before = names_in_shared_folders()
    environment = os.environ | ENVIRONMENT | {"DIES": DIES} | dict.fromkeys(SECRETS, SECRET)
    command = [sys.executable, "-c", VERBS]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, start_new_session=True)
    assert "codes 75 -9 0 0" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert "SIGTERM: the run has ended" in done.stdout
    assert float(done.stdout.split("ended after ")[1].split()[0]) < 30  # a step, a save, and the end of Ray
    resume = f"python -m mcontroller resume {folder / 'out'}"
    assert f"step 1 of 4 is saved, 0 later steps are lost; continue with: {resume}\n" in done.stdout
    assert re.search(r"resuming from step [12] of 4, saved \d+ min ago", done.stdout)  # the save of step 2 may be lost
    assert "again after step 3\n" in done.stdout  # from memory: no later step than 2 is on the disk
    assert shards(folder / "out", 4) == shards(folder / "whole", 4) != {}
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert (summary["global_step"], summary["saved_step"], summary["restarts"]) == (4, 4, 1)
    assert len(summary["processes"]) == 3
    assert "left {'DEAD'} {'REMOVED'} True" in done.stdout, done.stdout[-500:]
    [failure] = map(json.loads, (folder / "out" / "checkpoints" / FAILURES).read_text().splitlines())
    assert (failure["kind"], failure["step"], failure["restarted"]) == ("WorkerDied", 4, True)
    metrics = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["global_step"] for line in metrics if "train/restarts" in line] == [1, 2, 3, 4]
    logged = sorted(log.name for log in (folder / "out" / "logs").glob("*.log"))
    assert logged == ["actor-rank0-tp0-cp0-dp0-pp0.log"] and failure["logs"]

    assert SECRET not in done.stdout + done.stderr
    written = [path for run in ("out", "whole") for path in (folder / run).rglob("*")]
    assert [str(path) for path in written if path.is_file() and SECRET.encode() in path.read_bytes()] == []
    links = [path for path in written if path.is_symlink()]
    assert links and [str(link) for link in links if link.readlink().is_absolute()] == []
    open_to_others = [path for path in written if not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert open_to_others == []
    assert names_in_shared_folders() == before
