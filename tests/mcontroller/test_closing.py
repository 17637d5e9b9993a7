"""All parts are ended even if one fails."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from mcontroller.errors import ShutdownError, close_all
from tests.trainer.toy import toy_config, toy_trainer


def failing(error: Exception) -> Any:
    def close(*_: object) -> None:
        raise error

    return close


def test_every_part_is_ended_and_the_errors_are_raised_together() -> None:
    ended: list[str] = []
    parts = [
        ("first", failing(OSError("the disk is full"))),
        ("second", lambda: ended.append("second")),
        ("third", failing(ValueError("no such thing"))),
        ("fourth", lambda: ended.append("fourth")),
    ]
    with pytest.raises(ShutdownError) as caught:
        close_all("the program", parts)
    assert ended == ["second", "fourth"]
    error = pickle.loads(pickle.dumps(caught.value))
    assert {name: (type(cause), str(cause)) for name, cause in error.errors.items()} == {
        "first": (OSError, "the disk is full"),
        "third": (ValueError, "no such thing"),
    }


def test_one_error_is_raised_as_it_is() -> None:
    full = OSError("the disk is full")
    with pytest.raises(OSError) as raised:
        close_all("the program", [("first", failing(full)), ("second", list)])
    assert raised.value is full


def test_a_trainer_ends_its_other_groups_and_trackers_if_one_group_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = toy_trainer(toy_config(1), val_dataset=None)
    trainer.init_workers()
    first, *others = trainer.groups.values()
    monkeypatch.setattr(first, "shutdown", failing(OSError("the disk is full")))
    closed: list[str] = []

    class Closing:
        def close(self) -> None:
            closed.append("tracker")
            raise ValueError("no connection")

    trainer.trackers = (Closing(),)  # type: ignore[assignment]
    with pytest.raises(ShutdownError) as caught:
        trainer.shutdown()
    assert closed == ["tracker"] and others and all(group.executor.workers == [] for group in others)
    assert {str(error) for error in caught.value.errors.values()} == {"the disk is full", "no connection"}
