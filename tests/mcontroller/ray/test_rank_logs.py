"""The output of every rank is a file, up to the last line before a crash; the verb merges them by time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcontroller.cli.main import main
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import WorkerDied
from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from mcontroller.ray.rank_logs import RankLog, find_logs, without_import_warnings
from parallel_state.infos import DistRankInfo
from tests.mcontroller.ray.roles import end
from trainer.config import TrainerConfig
from trainer.saving.recovery import FAILURES, Recovery


class Speaking:
    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        sys.stdout.write("constructed\n")

    def get_megatron_rank_info(self) -> DistRankInfo:
        return DistRankInfo(tp_rank=self.rank, dp_rank=0, pp_rank=0, cp_rank=0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def speak(self) -> None:
        sys.stdout.write(f"a line of rank {self.rank}\n")
        os.write(2, b"native output\n")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_on(self, rank: int) -> None:
        if self.rank == rank:
            sys.stderr.write("the last words\n")
            end("segfault")


def until(condition: object) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.01)


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["logs", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_output_of_every_rank_is_a_file_with_the_last_line_before_a_crash(
    ray_cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "logs"
    with RayResourcePool([2], use_gpu=False, name_prefix="logged", logs=directory) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Speaking), name_prefix="red/actor")
        files = [directory / f"red%2Factor-rank{rank}-tp{rank}-cp0-dp0-pp0.log" for rank in range(2)]
        assert [log.path for log in find_logs(directory)] == files
        titles = [Path(f"/proc/{info.pid}/cmdline").read_text() for info in group.executor.processes.handles.infos]
        axes = "cp=0 dp=0 pp=0"
        assert [title.rstrip("\0") for title in titles] == [
            f"ray::red/actor rank {rank} (tp={rank} {axes}) · {tmp_path.name}" for rank in range(2)
        ]
        group.speak()
        with pytest.raises(WorkerDied) as caught:
            group.die_on(1)
        until(lambda: "Segmentation fault" in files[1].read_text())
        lines = files[1].read_text().splitlines()
        assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6} ", line) for line in lines)
        texts = [line[27:] for line in lines]
        spoken = [texts.index(text) for text in ("constructed", "a line of rank 1", "native output", "the last words")]
        assert spoken == sorted(spoken)
        assert "\na line of rank 1\n" in caught.value.log_tail  # Ray's file has the line as it was written

        recovery = Recovery(TrainerConfig(default_local_dir=str(tmp_path)), logs=directory)
        recovery.admit(caught.value, 1)
        [recorded] = json.loads((tmp_path / FAILURES).read_text())["logs"].values()
        assert any(line.endswith("the last words") for line in recorded)

        group.restart()
        group.speak()
        until(lambda: files[1].read_text().count("a line of rank 1") == 2)
        group.shutdown()
    assert [log.path for log in find_logs(directory)] == files
    lines = [line for line in printed(capsys, tmp_path).splitlines() if line.startswith("20")]
    times = [line[:26] for line in lines]
    assert times == sorted(times)
    assert {line[27:].partition(":")[0] for line in lines} == {
        f"red/actor rank {rank} (tp={rank} cp=0 dp=0 pp=0)" for rank in range(2)
    }
    assert printed(capsys, tmp_path, "--tail", 3).splitlines() == lines[-3:]
    assert "rank 0" not in printed(capsys, directory, "--tp", 1).replace("of rank 0", "")
    assert main(["logs", str(tmp_path), "--role", "critic"]) == 1
    assert "it has red/actor rank 0 (tp=0" in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_costs_the_file_and_not_the_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").write_text("a file")
    assert RankLog.open(str(tmp_path / "logs"), "actor", 3) is None
    assert "actor rank 3 has no file of its output" in caplog.text


def test_warnings_of_imports_are_left_out_and_others_are_not() -> None:
    imported = "/venv/lib/python3.11/site-packages/megatron/core/a.py:3: UserWarning: no apex"
    warning = "/home/me/mine.py:3: UserWarning: mine"
    lines = [imported, "  warnings.warn(text)", warning, "  warnings.warn(text)", "last"]
    assert without_import_warnings(lines) == lines[2:]
    stamp = "2026-11-25 18:00:00.000001 "
    assert without_import_warnings([stamp + line for line in lines]) == [stamp + line for line in lines[2:]]


@pytest.mark.processes
def test_the_verb_follows_files_and_loads_neither_torch_nor_ray(tmp_path: Path) -> None:
    (tmp_path / "actor-rank0.log").write_text("2026-11-25 18:00:00.000002 second\n")
    (tmp_path / "actor-rank1.log").write_text("2026-11-25 18:00:00.000001 first\n2026-11-25 18:00:00.000003 not comp")
    program = (
        "import sys; from mcontroller.cli.main import main; from mcontroller.cli import logs; "
        "assert not {'torch', 'ray'} & sys.modules.keys(); main(['logs', sys.argv[1], '--follow'])"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as verb:
        assert verb.stdout is not None
        assert [verb.stdout.readline()[27:] for _ in range(2)] == ["actor rank 1: first\n", "actor rank 0: second\n"]
        with open(tmp_path / "actor-rank1.log", "a") as file:
            file.write("lete\n")
        assert verb.stdout.readline()[27:] == "actor rank 1: not complete\n"
        (tmp_path / "actor-rank1.log").write_text("2026-11-25 18:00:00.000004 again\n")  # shorter than before
        assert verb.stdout.readline()[27:] == "actor rank 1: again\n"
        verb.terminate()
