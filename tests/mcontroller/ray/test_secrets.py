"""Secrets of the environment appear in no log, no message and no file, and files are the user's own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.processes

SECRET = "planted-zq81-secret"

PROGRAM = """
import sys
import ray
from mcontroller.errors import GroupError
from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tests.mcontroller.ray.roles import Plain

folder = sys.argv[1]
ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=folder)
with RayResourcePool([2], use_gpu=False) as pool:
    for fail in (lambda group: group.fail_on({1: "x"}), lambda group: group.die_on(1, "kill"), lambda g: g.late_on(1)):
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Plain), name_prefix="secrets")
        try:
            fail(group)
        except GroupError as error:
            print(type(error).__name__, error, error.fields)
        group.shutdown()
ray.shutdown()
"""


def test_a_secret_of_the_environment_appears_in_no_log_and_no_message(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("r")
    names = ("PLANTED_API_KEY", "PLANTED_TOKEN", "PLANTED_SECRET", "PLANTED_PASSWORD")
    environment = {**os.environ, **dict.fromkeys(names, SECRET)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr[-2000:]
    for kind in ("WorkerError", "WorkerDied", "CallTimeout"):
        assert f"{kind} secrets" in run.stdout
    assert SECRET not in run.stdout + run.stderr
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any("raylet.out" in path.name for path in files)
    assert [str(path) for path in files if SECRET.encode() in path.read_bytes()] == []
    assert not any("def start_worker" in path.read_text(errors="replace") for path in files), "the logs repeat a source"
    folders = [path for kind in ("warm_start_*", "channel_*") for path in folder.rglob(kind)]
    assert [path.name for path in folders if path.stat().st_mode & 0o077] == []
    assert {path.name.rpartition("_")[0] for path in folders} == {"warm_start", "channel"}


def test_versions_of_ray_that_ignore_its_token_are_not_accepted() -> None:
    project = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())["project"]
    [accepted] = [
        Requirement(requirement).specifier
        for requirement in project["optional-dependencies"]["ray"]
        if requirement.startswith("ray")
    ]
    assert [version in accepted for version in ("2.40.0", "2.51.1", "2.52.0", "2.60.0")] == [False, False, True, True]
