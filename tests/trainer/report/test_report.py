"""The page and the screen of a run directory: their values are those of the files."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcontroller.cli.main import main
from mcontroller.trace.recorder import FOLDER, MEMORY, TraceRecorder
from trainer import trackers
from trainer.report import reading
from trainer.report.reading import POINTS, SAMPLE_BYTES, few_points, read_samples, role_grids
from trainer.trackers import JsonlTracker, Run

STEPS = 12
CONFIG = {
    "run_dir": "/elsewhere/first",
    "trainer": {"total_training_steps": 40, "default_local_dir": "/elsewhere/first/checkpoints"},
    "actor_rollout_ref": {"parallel": {"tp": 2, "pp": 2}, "optim": {"lr": 0.002}},
    "critic": {"parallel": {"tp": 1, "pp": 1}},
    "ref": {"parallel": {"tp": 1, "pp": 1}},
    "reward_model": None,
    "pool": {"process_on_nodes": [2, 2]},
    "pools": {"scoring": {"process_on_nodes": [1], "roles": ["ref"]}},
}
PROMPT = "</script><b>2 + 2 & 'more' ="
FAILURE = {"time": 1.8e9, "step": 3, "kind": "WorkerDied", "role": "critic", "message": "rank 1 <died>", "details": {}}
MakeRun = Callable[..., Path]


def metrics_of(step: int) -> dict[str, float]:
    score = math.nan if step == 5 else step / 7
    return {"train/score": score, "train/score_std": 0.25, "timing_s/generate": 0.5, "timing_s/step": 1.0 + step}


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(name: str = "first") -> Path:
        """A run that goes on: its last lines are incomplete, and its lock names a process of another machine."""
        directory = tmp_path / name
        checkpoints = directory / "checkpoints"
        checkpoints.mkdir(parents=True)
        tracker = JsonlTracker(Run(directory))
        for step in range(1, STEPS + 1):
            tracker.log(metrics_of(step), step)
            tracker.log_samples([{"prompt": PROMPT, "response": str(step), "score": None if step == 2 else 1.0}], step)
        tracker.close()
        for path, text in {
            directory / "metrics.jsonl": '{"global_step": 13, "train/sc',
            checkpoints / "failures.jsonl": json.dumps({**FAILURE, "restarted": True, "reason": None}) + "\n",
            checkpoints / "trainer.json": '{"global_steps": 10}',
            directory / "config.yaml": yaml.safe_dump(CONFIG, sort_keys=False),
        }.items():
            with open(path, "a") as file:
                file.write(text)
        process = {"command": "train <x>", "host": "far", "versions": {"torch": "2"}, "started": "now"}
        summary = {"processes": [{**process, "changes": {"actor_rollout_ref.optim.lr": 1e-05}}]}
        (directory / "summary.json").write_text(json.dumps(summary))
        return directory

    return make


class Page(HTMLParser):
    """The embedded data of a page, and what it refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.references: list[str] = []
        self.data: Any = None
        self._is_data = False
        self.feed(path.read_text())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        self._is_data = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        if self._is_data:
            self.data, self._is_data = json.loads(data), False
        else:
            self.references += re.findall(r"https?:|url\(|@import|fetch\(|XMLHttp", data)


def test_the_page_has_the_values_of_the_files_and_no_references(make_run: MakeRun) -> None:
    directory = make_run()
    assert main(["report", str(directory)]) == 0
    page = Page(directory / "report.html")
    assert {reference for reference in page.references if not reference.startswith("#")} == {"data:,"}
    (run,) = page.data["runs"]
    steps = list(range(1, STEPS + 1))
    for name in metrics_of(1):
        values = [metrics_of(step)[name] for step in steps]
        assert run["series"][name] == {"x": steps, "y": [None if math.isnan(value) else value for value in values]}
    assert run["stages"] == {"generate": run["series"]["timing_s/generate"], "step": run["series"]["timing_s/step"]}
    assert run["samples"] == [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    assert run["samples"][0]["prompt"] == PROMPT and run["all_samples"]
    (failure,) = run["failures"]
    assert failure == {
        **{key: FAILURE[key] for key in failure.keys() & FAILURE.keys()},
        "restarted": True,
        "reason": None,
    }
    assert run["config"]["actor_rollout_ref.optim.lr"] == "0.002"
    assert run["changes"] == {"actor_rollout_ref.optim.lr": "1e-05"}
    assert dict(run["facts"]) == {
        "directory": str(directory),
        "command": "train <x>",
        "host": "far",
        "versions": "torch 2",
        "started": "now",
        "step": f"{STEPS} of 40",
        "saved step": "10",
        "restarts": "1",
    }


def test_layouts_are_grids_of_ranks_on_nodes() -> None:
    actor, critic, ref = role_grids(CONFIG)
    assert (actor["layout"], actor["pool"], actor["tp"]) == ("tp 2 x pp 2", "pool: 4 ranks on 2 nodes", 2)
    cells = [(0, 0, "tp 0 pp 0"), (1, 0, "tp 1 pp 0"), (2, 1, "tp 0 pp 1"), (3, 1, "tp 1 pp 1")]
    assert actor["rows"] == [("dp 0", cells)]
    assert [(title, cells[0][:2]) for title, cells in critic["rows"]] == [(f"dp {i}", (i, i // 2)) for i in range(4)]
    assert (ref["roles"], ref["pool"]) == ("ref", "scoring: 1 rank on 1 node")
    together = {**CONFIG, "critic": {"parallel": {"tp": 2, "pp": 2}}}
    assert role_grids(together)[0]["roles"] == "actor_rollout_ref, critic"
    assert role_grids({**CONFIG, "pool": None, "pools": None}) == []


def test_a_long_curve_has_few_points_with_the_least_and_largest_values() -> None:
    steps = range(1, 100_001)
    values = [float(step % 1000) for step in steps]
    values[70_000], values[70_001] = -5.0, math.inf
    points = few_points(steps, values)
    assert len(points["x"]) == POINTS and points["x"][:2] == [1, 251]
    assert points["lo"][280] == -5.0 and min(low for low in points["lo"] if low is not None) == -5.0
    assert max(points["hi"]) == 999.0 and points["y"][0] == sum(range(1, 251)) / 250
    assert few_points([4], [math.nan]) == {"x": [4], "y": [None]}


def test_samples_of_a_large_file_come_from_all_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    count = 3 * SAMPLE_BYTES // 1000
    path.write_text("".join(json.dumps({"global_step": step, "prompt": "x" * 980}) + "\n" for step in range(count)))
    samples, complete = read_samples(path)
    actual = [sample["global_step"] for sample in samples]
    assert not complete and actual[0] < 4 and actual[-1] == count - 1
    assert {after - before for before, after in itertools.pairwise(actual)} == {4}
    assert sum(len(json.dumps(sample)) for sample in samples) <= SAMPLE_BYTES


def test_what_is_no_run_is_an_error(tmp_path: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 1
    assert "none contains no run: expected a run directory, with config.yaml" in capsys.readouterr().err
    directory = make_run()
    assert main(["report", *[str(directory)] * 3]) == 1
    assert "3 runs; a page shows one run, or two side by side" in capsys.readouterr().err
    assert main(["report", str(directory), "-o", str(tmp_path)]) == 1
    assert "name another file with --output" in capsys.readouterr().err
    (directory / "summary.json").write_text("[1]")
    assert main(["report", str(directory)]) == 1
    assert "summary.json is damaged: expected a mapping, got list" in capsys.readouterr().err


def test_the_files_of_a_long_run_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "METRICS_BYTES", 100_000)
    monkeypatch.setattr(trackers, "SAMPLES_BYTES", 20_000)
    monkeypatch.setattr(reading, "MOST_LINES", 200)
    tracker = JsonlTracker(Run(tmp_path))
    for step in range(1, 4001):
        tracker.log(metrics_of(step), step)
        tracker.log_samples([{"prompt": PROMPT, "response": str(step), "tokens": {"text": ["1"] * 20}}], step)
        if step % 100 == 0:
            sizes = [(tmp_path / name).stat().st_size for name in ("metrics.jsonl", "samples.jsonl")]
            assert sizes[0] < 100_300 and sizes[1] < 20_300
    tracker.close()
    steps = [json.loads(line)["global_step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(8, 4001, 8))
    resumed = JsonlTracker(Run(tmp_path, resumed_at=2000))
    resumed.log(metrics_of(2001), 2001)
    resumed.close()
    read, _ = reading.read_metrics(tmp_path / "metrics.jsonl")["train/score"]
    assert 80 < len(read) < 200 and read[0] == 8.0 and read[-1] > 1900


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_chromium_draws_two_runs_without_errors(make_run: MakeRun, tmp_path: Path) -> None:
    path, first = tmp_path / "both.html", make_run()
    tokens = {"text": ["4", "=", ""], "advantage": [0.5, None, -1.0], "mismatch": [0.0, None, 0.01]}
    tracker = JsonlTracker(Run(first))
    tracker.log_samples([{"prompt": "2 + 2 =", "response": "4=", "tokens": tokens}], STEPS)
    tracker.close()
    for rank in range(4):
        about = {"group": "critic", "rank": rank, "launch": "a", "roles": {"critic": {"dp": rank}}}
        lane = TraceRecorder(first / FOLDER, f"critic-a-{rank}", about)
        lane.add("critic.update_critic", 0, (rank + 1) * 100_000_000, 0)
        lane.mark(MEMORY, 500 + rank)
    assert main(["report", str(first), str(make_run("second")), "-o", str(path)]) == 0
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command = ["chromium", *options, f"--user-data-dir={tmp_path}/user", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert done.stdout.count('class="curve" d="M') == 4 and done.stdout.count(">train/score<") == 1
    aligned = re.findall(r'<th data-key="(\w+)"[^>]*class="n"', done.stdout)
    assert "global_step" in aligned and not {"prompt", "response"} & set(aligned)
    assert f"{2 * STEPS + 1} of {2 * STEPS + 1} samples" in done.stdout and "rank 1 &lt;died&gt;" in done.stdout
    assert 'title="advantage -1">∎</span>' in done.stdout and '<span class="other">=</span>' in done.stdout
    assert "critic.update_critic: 0.1 s to 0.4 s" in done.stdout and '<option value="memory">' in done.stdout


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("summary.json", '{"wall_s": 1', "damaged: Expecting"),
        ("summary.json", "version https://git-lfs.github.com/spec/v1", "damaged: Expecting value: line 1"),
        ("checkpoints/trainer.json", "[1]", "expected a mapping, got list"),
        ("config.yaml", "trainer: [3", "while parsing"),
    ],
)
def test_a_damaged_file_is_one_line_with_the_file(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], name: str, content: str, reason: str
) -> None:
    directory = make_run()
    (directory / name).write_text(content)
    assert main(["report", str(directory)]) == 1
    printed = capsys.readouterr().err
    assert f"DataError: {directory / name} is damaged" in printed and reason in printed
    assert "move it away" in printed and printed.count("\n") == 1


def test_values_that_are_no_numbers_and_a_damaged_trace_are_left_out(make_run: MakeRun, tmp_path: Path) -> None:
    directory = make_run()
    lines = [
        "[" * 100_000,
        "[]",
        '{"global_step": 14, "train/score": "x", "memory/a": 1}',
        '{"global_step": 15, "train/score": NaN, "perf/tokens_per_s": null}',
    ]
    (directory / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    (directory / "summary.json").write_text("")
    tokens = {"text": ["\ud800"], "advantage": [math.nan]}
    (directory / "samples.jsonl").write_text(json.dumps({"global_step": 1, "prompt": "p", "tokens": tokens}) + "\n")
    (directory / FOLDER).mkdir()
    (directory / FOLDER / "controller-a.jsonl.gz").write_bytes(b"damaged")
    assert main(["report", str(directory), "-o", str(tmp_path / "page.html")]) == 0
    (run,) = Page(tmp_path / "page.html").data["runs"]
    assert run["samples"][0]["tokens"]["advantage"] == [None]
    assert len(run["trace"]) == 1 and "controller-a.jsonl.gz" in run["trace"][0]


def test_control_characters_of_a_run_do_not_reach_the_terminal(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_run()
    hostile = "\x1b[2J\x1b]0;title\x07 old\rnew \u202e"
    (directory / "logs").mkdir()
    (directory / "logs" / "actor-rank0.log").write_text(f"2026-01-01 00:00:00.000 {hostile}\n", newline="")
    assert main(["logs", str(directory)]) == 0
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(printed)
    assert "J\\x1b]0;title\\x07 old\\rnew \\u202e" in printed
