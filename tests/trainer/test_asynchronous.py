"""Generation by trajectory: which groups a step trains on, and the record, from which a run resumes and is replayed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.errors import ConfigError, DataError
from tests.trainer.sliced import SlicedActor, sliced_config, sliced_trainer
from tests.trainer.toy import CALLS, problems
from trainer import AsynchronousConfig, BatchStream, Callback, ImportanceConfig, PPOConfig, RayPPOTrainer
from trainer.rollout.asynchronous import AsynchronousGenerations
from trainer.rollout.trajectory import Trajectory
from trainer.rollout.trajectory_log import TRAJECTORIES, Taken, TrajectoryLog, read, write
from trainer.saving.checkpoints import LOCK, copy_oldest_save

STEPS = 6


def run(config: PPOConfig, **others: Any) -> tuple[RayPPOTrainer, list[dict[str, float]]]:
    trainer, lines = sliced_trainer(config, **others)
    trainer.fit()
    return trainer, lines


def table(trainer: RayPPOTrainer) -> torch.Tensor:
    return trainer.actor.workers[0].table


def files(directory: Path) -> list[Path]:
    return TrajectoryLog(directory, resumes=True).files()


class Batches(Callback):
    """Keeps the batch of every step."""

    def __init__(self) -> None:
        self.seen: list[DataProto] = []

    def batch_ready(self, trainer: Any, batch: DataProto) -> None:
        self.seen.append(batch)


OPTIONS = [
    {},
    {"take": "in_order"},
    {"stale": "drop"},
    {"partial": "finish"},
    {"partial": "stop"},
    {"schedule": "live"},
    {"schedule": "live", "stale": "drop"},
]


@pytest.mark.parametrize(
    ("staleness", "options"), [*((2, options) for options in OPTIONS), (4, {}), (4, {"stale": "drop"})]
)
def test_each_problem_is_trained_on_once_and_within_the_staleness(
    tmp_path: Path, staleness: int, options: dict[str, Any]
) -> None:
    batches = Batches()
    trainer, lines = run(sliced_config(STEPS, tmp_path, staleness, **options), callbacks=[batches])
    numbers = [number for batch in batches.seen for number in batch.non_tensor_batch["uid"][::2]]
    assert len(numbers) == len(set(numbers)) == STEPS * 8
    if options.get("take") == "in_order":
        assert numbers == list(range(STEPS * 8))
    assert trainer.problems.count == STEPS + staleness and len(trainer.step.generations) == staleness
    for step, (batch, line) in enumerate(zip(batches.seen, lines, strict=True)):
        versions, mask = batch.batch["token_versions"], batch.batch["response_mask"].bool()
        assert bool((versions[mask] <= step).all()) and bool((versions[~mask] == -1).all())
        assert line["training/staleness_max"] == step - int(versions[mask].min()) <= staleness
    record = [read(path) for path in files(tmp_path)]
    assert [number for taken in record for number in taken.groups] == numbers
    assert not any(response.prompt for taken in record for response in taken.responses)  # that of the problem
    if options == {"stale": "drop"}:
        dropped = [taken.dropped_tokens for taken in record]
        assert dropped == [line["asynchronous/dropped_tokens"] for line in lines]
        assert staleness > 2 or sum(dropped) > 0


def test_each_token_has_the_log_probability_of_the_policy_of_its_version(tmp_path: Path) -> None:
    class Tables(Batches):
        def batch_ready(self, trainer: Any, batch: DataProto) -> None:
            super().batch_ready(trainer, batch)
            tables.append(table(trainer).clone())

    tables: list[torch.Tensor] = []
    batches = Tables()
    run(sliced_config(STEPS, tmp_path, 3), callbacks=[batches])
    mixed = 0
    for batch in batches.seen:
        versions, recorded = batch.batch["token_versions"], batch.batch["rollout_log_probs"]
        for version, policy in enumerate(tables):
            of_version = versions == version
            expected = SlicedActor._log_probs(policy, batch)
            torch.testing.assert_close(recorded[of_version], expected[of_version], rtol=0, atol=1e-6)
        mixed += sum(len(row[row >= 0].unique()) > 1 for row in versions)
    assert mixed > 10


@pytest.mark.parametrize("partial", ["continue", "finish", "stop"])
def test_responses_in_flight_continue_finish_or_stop_when_the_weights_move(tmp_path: Path, partial: str) -> None:
    batches = Batches()
    run(sliced_config(STEPS, tmp_path, partial=partial), callbacks=[batches])
    several = [len(row[row >= 0].unique()) for batch in batches.seen for row in batch.batch["token_versions"]]
    assert (max(several) == 1) == (partial == "finish")


@pytest.mark.parametrize("options", OPTIONS[2:6], ids=lambda options: " ".join(map(str, options.values())) or "default")
def test_a_replay_generates_nothing_and_has_the_same_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    batches, repeated = Batches(), Batches()
    whole, lines = run(sliced_config(STEPS, tmp_path / "run", **options), callbacks=[batches])
    SlicedActor.slices.clear()
    config = sliced_config(STEPS, tmp_path / "replay", **options, replay=str(tmp_path / "run"))
    replay, again = run(config, callbacks=[repeated])
    assert table(replay).equal(table(whole)) and SlicedActor.slices == []
    assert f"batch {STEPS} of {STEPS}" in replay.step.generations.summary()
    for name in ("train/score", "training/staleness_mean", "asynchronous/dropped_groups"):
        assert [line[name] for line in again] == [line[name] for line in lines]
    for batch, other in zip(batches.seen, repeated.seen, strict=True):
        expected, actual = batch.tensors(), other.tensors()
        assert expected.keys() == actual.keys()
        assert all(actual[name].equal(column) for name, column in expected.items())


@pytest.mark.parametrize(
    "options", OPTIONS[1::2], ids=lambda options: " ".join(map(str, options.values())) or "default"
)
def test_a_killed_run_takes_again_what_it_recorded_after_its_checkpoint(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """The kill is a copy of the directory, as a process that dies while it writes leaves it."""
    copies = tmp_path / "copies"
    tables: dict[str, torch.Tensor] = {}

    class Copies(Callback):
        def copy(self, trainer: Any, moment: str) -> None:
            trainer.checkpoints.finish()
            target = copies / f"{trainer.global_steps}-{moment}"
            shutil.copytree(tmp_path / "run", target, symlinks=True, ignore=shutil.ignore_patterns(LOCK))
            (target / TRAJECTORIES / "00000009.part").write_bytes(b"PK")
            tables[target.name] = table(trainer).clone()

        def batch_ready(self, trainer: Any, batch: DataProto) -> None:
            if trainer.global_steps in (3, 5):
                self.copy(trainer, "batch")

        def saved(self, trainer: Any, directory: str) -> None:
            if trainer.global_steps == 4:
                self.copy(trainer, "saved")

    settings = {"save_freq": 2, "max_to_keep": None}
    batches = Batches()
    run(sliced_config(STEPS, tmp_path / "run", 2, settings, **options), callbacks=[batches, Copies()])
    assert len(tables) == 3
    for name, expected in tables.items():
        directory, repeated = copies / name, Batches()
        recorded = len(files(directory))
        trainer, _ = run(
            sliced_config(STEPS, directory, 2, {**settings, "resume": True}, **options), callbacks=[repeated]
        )
        first = STEPS - len(repeated.seen)
        for batch, other in zip(batches.seen[first:recorded], repeated.seen, strict=False):
            assert batch.batch["responses"].equal(other.batch["responses"])
            assert batch.batch["token_versions"].equal(other.batch["token_versions"])
        numbers = [number for path in files(directory) for number in read(path).groups]
        assert len({*numbers}) == len(numbers) == STEPS * 8
        replay, _ = run(sliced_config(STEPS, tmp_path / f"replay-{name}", 2, **options, replay=str(directory)))
        assert table(replay).equal(table(trainer))
        until = sliced_config(int(name[0]), tmp_path / f"until-{name}", 2, **options, replay=str(directory))
        assert table(run(until)[0]).equal(expected)


def test_files_that_no_kept_checkpoint_needs_are_deleted(tmp_path: Path) -> None:
    whole, _ = run(sliced_config(STEPS, tmp_path, trainer={"save_freq": 1, "max_to_keep": 2}))
    assert [path.stem for path in files(tmp_path)] == ["00000003", "00000004", "00000005"]
    with pytest.raises(DataError) as caught:
        run(sliced_config(STEPS, tmp_path / "replay", replay=str(tmp_path)))
    assert (caught.value.record, caught.value.path) == (0, str(tmp_path / TRAJECTORIES / "00000000.npz"))
    copy_oldest_save(tmp_path, tmp_path / "later")
    later = sliced_config(STEPS, tmp_path / "later", trainer={"resume": True}, replay=str(tmp_path))
    replay, lines = run(later)
    assert len(lines) == 1 and table(replay).equal(table(whole))


def test_a_replay_that_differs_is_an_error_with_the_first_difference(tmp_path: Path) -> None:
    run(sliced_config(3, tmp_path / "run"))
    config = sliced_config(3, tmp_path / "replay", replay=str(tmp_path / "run"))
    with pytest.raises(DataError) as caught:
        run(dataclasses.replace(config, data=dataclasses.replace(config.data, seed=1)))
    assert (caught.value.record, caught.value.key, caught.value.value) == (0, "data.seed", 1)
    with pytest.raises(DataError) as caught:
        run(config, train_dataset=problems(48)[::-1])
    assert (caught.value.record, caught.value.group) == (0, read(files(tmp_path / "run")[0]).groups[0])
    trainer, _ = sliced_trainer(config)
    table(trainer)[0, 0] += 1
    with pytest.raises(DataError) as caught:
        trainer.fit()
    assert (caught.value.record, caught.value.version) == (0, 0)
    with pytest.raises(DataError) as caught:
        run(sliced_config(4, tmp_path / "longer", replay=str(tmp_path / "run")))
    assert caught.value.record == 3
    with pytest.raises(DataError) as caught:
        sliced_trainer(sliced_config(2, tmp_path / "other", replay=str(tmp_path / "none")))
    assert caught.value.path == str(tmp_path / "none")


@pytest.mark.parametrize("options", [{}, {"partial": "stop"}, {"stale": "drop"}, {"schedule": "live"}], ids=str)
def test_a_check_of_a_replay_names_the_first_token_that_is_generated_otherwise(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    run(sliced_config(STEPS, tmp_path / "run", **options))
    options = {**options, "replay": str(tmp_path / "run"), "check_replay": True}
    SlicedActor.slices.clear()
    run(sliced_config(STEPS, tmp_path / "replay", **options))
    assert len(SlicedActor.slices) > 2
    path = files(tmp_path / "run")[2]
    taken = read(path)
    row = next(row for row, response in enumerate(taken.responses) if len(response.tokens) > 2)
    expected = taken.responses[row].tokens[1] = (taken.responses[row].tokens[1] + 1) % 5
    write(path, taken)
    with pytest.raises(DataError) as caught:
        run(sliced_config(STEPS, tmp_path / "replay", **options))
    error = caught.value
    assert (error.record, error.group, error.response) == (2, taken.groups[row // 2], row % 2)
    assert (error.position, error.expected) == (1, expected)


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.9])
def test_a_damaged_record_is_an_error_with_its_path(tmp_path: Path, kept: float) -> None:
    run(sliced_config(2, tmp_path))
    path = files(tmp_path)[1]
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(DataError) as caught:
        run(sliced_config(2, tmp_path / "replay", replay=str(tmp_path)))
    assert caught.value.path == str(path)
    flipped = bytearray(content)
    flipped[int(len(content) * kept)] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(DataError) as caught:
        run(sliced_config(2, tmp_path / "replay", replay=str(tmp_path)))
    assert caught.value.path == str(path)


def test_a_token_of_a_record_has_at_most_nine_bytes(tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(0)

    def response(length: int) -> Trajectory:
        made = Trajectory([], seed=length)
        for version, part in ((3, length // 2), (4, length - length // 2)):
            tokens = torch.randint(150_000, (part,), generator=chance).tolist()
            made.sampled(tokens, (-torch.rand(part, generator=chance)).tolist(), version, 0.7)
        return made

    taken = Taken([5], [1], [response(length) for length in range(300, 700)], version=4)
    write(tmp_path / "0.npz", taken)
    tokens = sum(len(made.tokens) for made in taken.responses)
    assert (tmp_path / "0.npz").stat().st_size / tokens < 9.0
    again = read(tmp_path / "0.npz")
    assert [made.tokens for made in again.responses] == [made.tokens for made in taken.responses]
    assert [made.versions for made in again.responses] == [made.versions for made in taken.responses]


def test_what_does_not_fit_a_changed_configuration_is_generated_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(sliced_config(4, tmp_path, trainer={"save_freq": 2}))
    record = json.loads((tmp_path / "trainer.json").read_text())
    (tmp_path / "trainer.json").write_text(json.dumps({**record["earlier"][0], "earlier": []}))
    changed = sliced_config(4, tmp_path, trainer={"resume": True})
    rule = dataclasses.replace(changed.algorithm, importance=ImportanceConfig("token", threshold=3.0))
    changed = dataclasses.replace(changed, algorithm=rule)
    with caplog.at_level(logging.WARNING):
        trainer, _ = run(changed)
    assert trainer.global_steps == 4
    assert [read(path).settings["algorithm.importance.threshold"] for path in files(tmp_path)] == [2.0, 2.0, 3.0, 3.0]
    assert any(entry.name == "trainer.rollout.trajectory_log" for entry in caplog.records)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_checkpoint_of_a_greater_staleness_is_rejected(tmp_path: Path, staleness: int) -> None:
    run(sliced_config(2, tmp_path, 3, {"save_freq": 1}))
    fewer = sliced_config(4, tmp_path, 3, {"resume": True})
    options = {"asynchronous": AsynchronousConfig()} if staleness < 2 else {}
    fewer = dataclasses.replace(fewer, trainer=dataclasses.replace(fewer.trainer, max_staleness=staleness, **options))
    with pytest.raises(ConfigError) as caught:
        trainer, _ = sliced_trainer(fewer)
        trainer.load_checkpoint()
    assert (caught.value.key, caught.value.value) == ("trainer.max_staleness", staleness)
    more, _ = run(sliced_config(3, tmp_path, 4, {"resume": True}))
    assert more.problems.count == 7


@pytest.mark.parametrize("kept", [True, False], ids=["responses saved", "responses lost"])
def test_a_resume_with_another_batch_size_leaves_no_row_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Batches of 8, 4, 12 and 8 rows: those that were trained on or wait are the first ones of the pass.

    Groups end in any order, so that those in flight are of several batches: all rows of these are drawn again.
    """
    trained: list[int] = []

    def numbered(batch: DataProto) -> list[float]:
        trained.extend(batch.non_tensor_batch["row"][::2])
        return [0.0] * len(batch)

    rows = [{**problem, "row": row} for row, problem in enumerate(problems(144))]
    if not kept:
        monkeypatch.setattr(AsynchronousGenerations, "state", lambda self: ((), {}))
    for steps, size in ((3, 8), (5, 4), (6, 12), (8, 8)):
        config = sliced_config(steps, tmp_path, 4, {"resume": steps > 3, "save_freq": 0})
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, train_batch_size=size))
        trainer, _ = run(config, train_dataset=rows, reward_fn=numbered)
        batches, in_flight = trainer.train_batches, trainer.step.generations.problems_in_flight()
        waiting = [batches.rows(number)[problem] for number, chosen in in_flight.items() for problem in chosen]
        in_order = BatchStream(rows, 144, config.data.seed)[0].non_tensor_batch["row"]
        expected = in_order[: batches.position(trainer.problems.count)]
        assert {*expected} <= {*trained, *(in_order[position] for position in waiting)}
    assert len(trained) == 24 + 8 + 12 + 16 and len(in_flight) > 4


class TrustsOrder(Callback):
    """A callback with a race: it takes the first group of a step for the problem that was drawn first."""

    def batch_ready(self, trainer: Any, batch: DataProto) -> None:
        expected = trainer.global_steps * 8
        actual = int(batch.non_tensor_batch["uid"][0])
        if actual != expected:
            raise RuntimeError(f"step {trainer.global_steps} has problem {actual}, expected {expected}")


def test_a_race_in_a_callback_is_a_seed_that_fails_each_time(tmp_path: Path) -> None:
    def outcomes(seed: int) -> Iterator[str]:
        for attempt in range(3):
            with contextlib.suppress(RuntimeError):
                run(sliced_config(4, tmp_path / f"{seed}-{attempt}", seed=seed), callbacks=[TrustsOrder()])
                yield "passes"
                continue
            yield "fails"

    actual = {seed: [*outcomes(seed)] for seed in range(5)}
    assert all(len(set(values)) == 1 for values in actual.values())
    assert ["fails"] * 3 in actual.values()


def test_the_shares_of_time_name_the_pool_that_is_too_slow(tmp_path: Path) -> None:
    trainer, lines = run(sliced_config(3, tmp_path, schedule="live"))
    for line in lines:
        assert line["asynchronous/queue_complete"] <= line["asynchronous/queue_groups"] == 16
    balance = trainer.step.generations.balance
    balance.waited, balance.idle, balance.elapsed = 5.0, 0.0, 10.0
    assert balance.line(4).endswith("the pool of the rollout is too slow, 8 instead of 4 ranks would balance it")
    balance.waited, balance.idle = 0.0, 5.0
    assert balance.line(4).endswith("the pool of the rollout is too fast, 2 instead of 4 ranks would balance it")
    balance.idle = 0.1
    assert balance.line(4).endswith(": balanced")
    CALLS.clear()
