"""Generation by trajectory: which groups a step trains on, and the order of events, which a run resumes and replays."""

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
from trainer import AsynchronousConfig, BatchStream, Callback, PPOConfig, RayPPOTrainer
from trainer.rollout.events import EVENTS
from trainer.rollout.generations import AsynchronousGenerations
from trainer.saving.checkpoints import LOCK

STEPS = 6


def run(config: PPOConfig, **others: Any) -> tuple[RayPPOTrainer, list[dict[str, float]]]:
    trainer, lines = sliced_trainer(config, **others)
    trainer.fit()
    return trainer, lines


def table(trainer: RayPPOTrainer) -> torch.Tensor:
    return trainer.actor.workers[0].table


def events(directory: Path, *kinds: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (directory / EVENTS).read_text().splitlines()]
    return [event for event in found if event["event"] in kinds or not kinds]


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
    {"partial": "stop", "capacity": 5},
    {"schedule": "live"},
    {"schedule": "live", "stale": "drop", "capacity": 5},
    {"record_tokens": True, "take": "in_order", "partial": "stop"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(map(str, options.values())) or "default")
@pytest.mark.parametrize("staleness", [2, 4])
def test_each_problem_is_trained_on_once_and_within_the_staleness(
    tmp_path: Path, staleness: int, options: dict[str, Any]
) -> None:
    batches = Batches()
    trainer, lines = run(sliced_config(STEPS, tmp_path, staleness, **options), callbacks=[batches])
    numbers = [number for batch in batches.seen for number in batch.non_tensor_batch["uid"][::2]]
    assert len(numbers) == len(set(numbers)) == STEPS * 8
    if options.get("take") == "in_order":
        assert numbers == list(range(STEPS * 8))
    assert trainer.drawn_batches == STEPS + staleness and len(trainer.step.generations) == staleness
    for step, (batch, line) in enumerate(zip(batches.seen, lines, strict=True)):
        versions, mask = batch.batch["token_versions"], batch.batch["response_mask"].bool()
        assert bool((versions[mask] <= step).all()) and bool((versions[~mask] == -1).all())
        assert line["training/staleness_max"] == step - int(versions[mask].min()) <= staleness
    taken = [number for event in events(tmp_path, "taken") for number in event["groups"]]
    assert taken == numbers
    if options.get("stale") == "drop":
        thrown = sum(event["tokens"] for event in events(tmp_path, "dropped"))
        assert thrown == sum(line["asynchronous/dropped_tokens"] for line in lines)
        assert staleness > 2 or thrown > 0


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
        versions, found = batch.batch["token_versions"], batch.batch["rollout_log_probs"]
        for version, each in enumerate(tables):
            of_version = versions == version
            expected = SlicedActor._log_probs(each, batch)
            torch.testing.assert_close(found[of_version], expected[of_version], rtol=0, atol=1e-6)
        mixed += sum(len(row[row >= 0].unique()) > 1 for row in versions)
    assert mixed > 10


@pytest.mark.parametrize("partial", ["continue", "finish", "stop"])
def test_responses_in_flight_continue_finish_or_stop_when_the_weights_move(tmp_path: Path, partial: str) -> None:
    batches = Batches()
    run(sliced_config(STEPS, tmp_path, partial=partial, capacity=6), callbacks=[batches])
    several = [len(row[row >= 0].unique()) for batch in batches.seen for row in batch.batch["token_versions"]]
    assert (max(several) == 1) == (partial == "finish")


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(map(str, options.values())) or "default")
def test_a_replay_has_the_same_events_and_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    whole, lines = run(sliced_config(STEPS, tmp_path / "run", **options))
    SlicedActor.slices.clear()
    replay, again = run(sliced_config(STEPS, tmp_path / "replay", **{**options, "replay": str(tmp_path / "run")}))
    assert table(replay).equal(table(whole))
    recorded, repeated = events(tmp_path / "run"), events(tmp_path / "replay")
    assert repeated == recorded[: len(repeated)]
    assert all(event["event"] == "slice" for event in recorded[len(repeated) :])  # beside the last update
    assert [line["train/score"] for line in again] == [line["train/score"] for line in lines]
    assert bool(SlicedActor.slices) != options.get("record_tokens", False)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(map(str, options.values())) or "default")
def test_a_run_that_is_killed_anywhere_resumes_to_the_same_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    """The kill is a copy of the directory, as a process that dies at this moment leaves it, with half a line."""
    copies = tmp_path / "copies"

    class Copies(Callback):
        def copy(self, trainer: Any, moment: str) -> None:
            trainer.checkpoints.finish()
            target = copies / f"{trainer.global_steps}-{moment}"
            shutil.copytree(tmp_path / "run", target, symlinks=True, ignore=shutil.ignore_patterns(LOCK))
            with open(target / EVENTS, "ab") as file:
                file.write(b'{"event":"sli')

        def batch_ready(self, trainer: Any, batch: DataProto) -> None:
            if trainer.global_steps in (3, 5):
                self.copy(trainer, "batch")

        def saved(self, trainer: Any, directory: str) -> None:
            if trainer.global_steps == 4:
                self.copy(trainer, "saved")

    settings = {"save_freq": 2}
    whole, lines = run(sliced_config(STEPS, tmp_path / "run", 2, settings, **options), callbacks=[Copies()])
    actual = sorted(copies.iterdir())
    assert len(actual) == 3
    for directory in actual:
        config = sliced_config(STEPS, directory, 2, {**settings, "resume": True}, **options)
        resumed, again = run(config)
        # a live run is free after the events that it finds; the replay of its log is the test of that
        if options.get("schedule") == "live":
            resumed_events = events(directory)
            replay, _ = run(sliced_config(STEPS, tmp_path / "replay", 2, settings, **options, replay=str(directory)))
            repeated = events(tmp_path / "replay")
            assert table(replay).equal(table(resumed)) and repeated == resumed_events[: len(repeated)]
        else:
            assert table(resumed).equal(table(whole)), directory
            assert [each["train/score"] for each in again] == [each["train/score"] for each in lines[-len(again) :]]
            assert events(directory) == events(tmp_path / "run")


def test_a_replay_that_differs_names_the_first_event(tmp_path: Path) -> None:
    run(sliced_config(2, tmp_path / "run"))
    config = sliced_config(2, tmp_path / "replay", replay=str(tmp_path / "run"))
    other = dataclasses.replace(config, data=dataclasses.replace(config.data, seed=1))
    with pytest.raises(DataError) as caught:
        run(other)
    assert caught.value.event == 4
    with pytest.raises(DataError) as caught:
        sliced_trainer(sliced_config(2, tmp_path / "other", replay=str(tmp_path / "none")))
    assert caught.value.path == str(tmp_path / "none")


def test_a_damaged_log_of_events_is_reported(tmp_path: Path) -> None:
    run(sliced_config(2, tmp_path, trainer={"save_freq": 1}))
    content = (tmp_path / EVENTS).read_bytes()
    (tmp_path / EVENTS).write_bytes(content.replace(b"weights", b"wEights", 1))
    with pytest.raises(DataError) as caught:
        run(sliced_config(3, tmp_path, trainer={"resume": True}))
    assert caught.value.path == str(tmp_path / EVENTS)


def test_events_that_do_not_fit_a_changed_configuration_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(sliced_config(4, tmp_path, trainer={"save_freq": 2}))
    record = json.loads((tmp_path / "trainer.json").read_text())
    (tmp_path / "trainer.json").write_text(json.dumps({**record["earlier"][0], "earlier": []}))
    with caplog.at_level(logging.WARNING):
        trainer, _ = run(sliced_config(4, tmp_path, trainer={"resume": True}, slice_tokens=1))
    assert "before the interruption it was" in caplog.text and trainer.global_steps == 4


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
    assert more.drawn_batches == 7


@pytest.mark.parametrize("staleness", [2, 4])
@pytest.mark.parametrize("kept", [True, False], ids=["responses saved", "responses lost"])
def test_a_resume_with_another_batch_size_trains_on_every_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int, kept: bool
) -> None:
    """Batches of 8, 4, 12 and 8 rows: those that were trained on or wait are the first ones of the pass.

    Groups end in any order, so that those in flight are of several batches, whose other rows were trained on.
    """
    trained: list[int] = []

    def numbered(batch: DataProto) -> list[float]:
        trained.extend(batch.non_tensor_batch["row"][::2])
        return [0.0] * len(batch)

    rows = [{**each, "row": row} for row, each in enumerate(problems(144))]
    if not kept:
        monkeypatch.setattr(AsynchronousGenerations, "state", lambda self: ((), {}))
    for steps, size in ((3, 8), (5, 4), (6, 12), (8, 8)):
        config = sliced_config(steps, tmp_path, staleness, {"resume": steps > 3, "save_freq": 0}, slice_tokens=1)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, train_batch_size=size))
        trainer, lines = run(config, train_dataset=rows, reward_fn=numbered)
        batches, in_flight = trainer.train_batches, trainer.step.generations.problems_in_flight()
        waiting = [batches.rows(number)[problem] for number, chosen in in_flight.items() for problem in chosen]
        waiting += batches.pending(trainer.drawn_batches)
        in_order = BatchStream(rows, 144, config.data.seed)[0].non_tensor_batch["row"]
        expected = in_order[: batches.position(trainer.drawn_batches)]
        assert sorted(trained + [in_order[position] for position in waiting]) == sorted(expected)
        assert lines[-1]["train/epoch"] == pytest.approx(len(trained) / 144)
    assert len(trained) == 24 + 8 + 12 + 16 and len(in_flight) > staleness


class TrustsOrder(Callback):
    """A callback with a race: it takes the first group of a step for the problem that was drawn first."""

    def batch_ready(self, trainer: Any, batch: DataProto) -> None:
        expected = trainer.global_steps * 8
        found = int(batch.non_tensor_batch["uid"][0])
        if found != expected:
            raise RuntimeError(f"step {trainer.global_steps} has problem {found}, expected {expected}")


def test_a_race_in_a_callback_is_a_seed_that_fails_each_time(tmp_path: Path) -> None:
    def outcomes(seed: int) -> Iterator[str]:
        for attempt in range(3):
            with contextlib.suppress(RuntimeError):
                run(sliced_config(4, tmp_path / f"{seed}-{attempt}", seed=seed), callbacks=[TrustsOrder()])
                yield "passes"
                continue
            yield "fails"

    actual = {seed: [*outcomes(seed)] for seed in range(5)}
    assert all(len(set(each)) == 1 for each in actual.values())
    assert ["fails"] * 3 in actual.values()


def test_the_shares_of_time_name_the_pool_that_is_too_slow(tmp_path: Path) -> None:
    trainer, lines = run(sliced_config(3, tmp_path, schedule="live"))
    for line in lines:
        assert line["asynchronous/queue_complete"] <= line["asynchronous/queue_groups"] == 16
    balance = trainer.step.generations.balance
    balance.waited, balance.idle, balance.elapsed = 5.0, 0.0, 10.0
    assert balance.line(4).endswith("the pool of the rollout is too slow, 8 GPUs instead of 4 would balance it")
    balance.waited, balance.idle = 0.0, 5.0
    assert balance.line(4).endswith("the pool of the rollout is too fast, 2 GPUs instead of 4 would balance it")
    balance.idle = 0.1
    assert balance.line(4).endswith(": balanced")
    CALLS.clear()
