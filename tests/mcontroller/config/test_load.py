"""Configurations are read strictly: layers over each other, every key known, every value of its type."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mcontroller.config.load import load_config
from mcontroller.errors import ConfigError


@dataclass(frozen=True)
class Engine:
    power: int
    fuel: str = "petrol"
    ratios: tuple[float, ...] = (3.5, 2.0)
    limits: tuple[float, float] = (0.5, 7.0)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Car:
    engine: Engine
    doors: int = 4
    trailer: Engine | None = None
    options: list[str] | None = None


def test_later_sources_win_and_overrides_win_over_all(tmp_path: Path) -> None:
    file = tmp_path / "car.yaml"
    file.write_text("doors: 2\nengine: {power: 50, fuel: diesel}\n")
    car = load_config(Car, file, {"engine": {"power": 60}}, overrides=["engine.fuel=gas", "engine.extra.turbo=true"])
    assert car == Car(Engine(60, "gas", extra={"turbo": True}), doors=2)


def test_an_instance_of_the_dataclass_is_a_source() -> None:
    engine = Engine(50, "${price} \\\\${doors}")  # no reference: an instance has values
    car = load_config(Car, Car(engine), overrides=["trailer.power=5"])
    assert car.trailer == Engine(5) and car.engine == engine


@pytest.mark.parametrize(
    ("source", "overrides", "key"),
    [
        ({"engine": {"power": 1, "fual": "gas"}}, [], "engine.fual"),
        ({"engine": {"power": 1}}, ["dors=3"], "dors"),
        ({"trailer": {"x": 1}}, [], "trailer.x"),
        ({"engine": {"power": "much"}}, [], "engine.power"),
        ({"engine": {"power": 1}, "doors": None}, [], "doors"),
        ({"engine": 3}, [], "engine"),
        ({"engine": {"power": 1, "extra": [1]}}, [], "engine.extra"),
        ({"engine": {"fuel": "gas"}}, [], "engine.power"),
        ({"engine": {"power": 1}}, ["doors"], "doors"),
        ({"engine": "${doors}"}, [], "engine"),
        ({"engine": {"power": 1, "extra": "${doors}"}}, [], "engine.extra"),
        ({"engine": {"power": 1, "ratios": "${doors}"}}, [], "engine.ratios"),
        ({"engine": {"power": 1}}, ["engine.fuel=2026_01_01"], "engine.fuel"),
        ({"engine": {"power": 1}}, ["engine.limits=[1.0]"], "engine.limits"),
        ({"engine": {"power": 1}}, ["engine.limits=3"], "engine.limits"),
        ({"engine": {"power": 1}}, ["engine.fuel=no"], "engine.fuel"),
        ({"engine": {"power": 1}}, ["engine.fuel=1e5"], "engine.fuel"),
        ({"engine": {"power": 1}, "options": ["a", 1.10]}, [], "options"),
        ({"engine": {"power": "${nowhere}"}}, [], "engine.power"),
        ({"engine": {"power": "${engine.power}"}}, [], "engine.power"),
        ("no_such.yaml", [], "no_such.yaml"),
        ([1, 2], [], ""),
    ],
)
def test_a_source_that_does_not_fit_is_rejected_with_its_key(source: Any, overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Car, source, overrides=overrides)
    assert caught.value.fields["key"] == key


def test_text_that_looks_like_a_number_is_kept_in_quotes() -> None:
    overrides = ["engine.fuel='1e5'", "engine.extra.number=1e5", "options=['010', \"no\"]"]
    car = load_config(Car, {"engine": {"power": 1}}, overrides=overrides)
    assert (car.engine.fuel, car.engine.extra, car.options) == ("1e5", {"number": 1e5}, ["010", "no"])


def test_close_matches_are_a_field_of_the_error() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Car, {"engine": {"power": 1}, "door": 2})
    assert caught.value.fields["close_matches"] == ["doors"]
