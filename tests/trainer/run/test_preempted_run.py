"""A run goes on to the same weights after SIGTERM and the deaths of a rank and its driver; its files are private."""

from __future__ import annotations

import json
import os
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
small = ["trainer.total_training_steps=2", "data.train_batch_size=4"]
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
resumed = main(["resume", "out", on])
whole = main(["train", "run.yaml", on, "run_dir=whole", *small])

def killed(self, *args, **kwargs):
    if self.global_steps == 1 and not self.recovery.failures:
        os.kill(self.actor.executor.processes.handles.infos[-1].pid, signal.SIGKILL)
    elif self.recovery.failures:
        print("again after step", self.global_steps)
    return step(self, *args, **kwargs)

RayPPOTrainer.train_step = killed
healed = main(["train", "run.yaml", on, "run_dir=healed", "trainer.memory_save_freq=1", *small])
RayPPOTrainer.train_step = step

died = subprocess.run([sys.executable, "-c", os.environ["DIES"], on, *small], stdout=subprocess.DEVNULL).returncode
again = main(["resume", "died"])  # at once: its cluster goes on without it
ray.init(cluster.address, log_to_driver=False)
total, deadline = ray.cluster_resources(), time.monotonic() + 10
while ray.available_resources() != total and time.monotonic() < deadline:
    time.sleep(0.1)
states = {each["State"] for each in ray._private.state.actors().values()}
placements = {each["state"] for each in placement_group_table().values()}
print("left", states, placements, {**total, **ray.available_resources()} == total)
ray.shutdown()
cluster.shutdown()
print("codes", whole, stopped, resumed, healed, died, again)
"""
DIES = """
import os
import signal
import sys
from mcontroller.cli.main import main
from trainer.loop import RayPPOTrainer

step = RayPPOTrainer.train_step
RayPPOTrainer.train_step = lambda self, batch: os.kill(os.getpid(), signal.SIGKILL) if self.global_steps else step(
    self, batch
)
main(["train", "run.yaml", "run_dir=died", "trainer.save_freq=1", *sys.argv[1:]])
"""


def names_in_shared_folders() -> set[str]:
    return {str(path) for shared in (tempfile.gettempdir(), "/dev/shm") for path in Path(shared).glob("*mcontroller*")}


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_stopped_or_killed_a_run_goes_on_to_the_same_weights(
    folder: Path,  # noqa: F811
) -> None:
    before = names_in_shared_folders()
    environment = os.environ | ENVIRONMENT | {"DIES": DIES} | dict.fromkeys(SECRETS, SECRET)
    command = [sys.executable, "-c", VERBS]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, start_new_session=True)
    assert "codes 0 75 0 0 -9 0" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert "SIGTERM: the run has ended" in done.stdout
    assert "again after step 1\n" in done.stdout  # from memory: nothing was on the disk
    assert float(done.stdout.split("ended after ")[1].split()[0]) < 30  # a step, a save, and the end of Ray
    resume = f"python -m mcontroller resume {folder / 'out'}"
    assert f"step 1 of 2 is saved, 0 later steps are lost; continue with: {resume}\n" in done.stdout
    assert "resuming from step 1 of 2, saved 0 min ago" in done.stdout
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert (summary["global_step"], summary["saved_step"], summary["restarts"]) == (2, 2, 0)
    assert len(summary["processes"]) == 2 and "train/score" in summary["results"]
    assert shards(folder / "out") == shards(folder / "whole") != {}
    assert shards(folder / "healed") == shards(folder / "whole")
    assert shards(folder / "died") == shards(folder / "whole")
    assert "left {'DEAD'} {'REMOVED'} True" in done.stdout, done.stdout[-500:]
    [failure] = map(json.loads, (folder / "healed" / "checkpoints" / FAILURES).read_text().splitlines())
    assert (failure["kind"], failure["step"], failure["restarted"]) == ("WorkerDied", 2, True)
    metrics = [json.loads(line) for line in (folder / "healed" / "metrics.jsonl").read_text().splitlines()]
    assert [line["global_step"] for line in metrics if "train/restarts" in line] == [1, 2]
    logged = sorted(log.name for log in (folder / "healed" / "logs").glob("*.log"))
    assert logged == ["actor-rank0-tp0-cp0-dp0-pp0.log"] and failure["logs"]

    assert SECRET not in done.stdout + done.stderr
    written = [path for run in ("out", "whole", "healed", "died") for path in (folder / run).rglob("*")]
    assert [str(path) for path in written if path.is_file() and SECRET.encode() in path.read_bytes()] == []
    links = [path for path in written if path.is_symlink()]
    assert links and [str(link) for link in links if link.readlink().is_absolute()] == []
    open_to_others = [path for path in written if not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert open_to_others == []
    assert names_in_shared_folders() == before
