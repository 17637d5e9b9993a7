"""Constructors of configurations reject wrong fields with the fix."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from mcontroller.config.checks import check_above, check_at_least, check_between, check_one_of
from mcontroller.config.fields import changed_fields, nested_config, strict_fields
from mcontroller.config.load import load_config
from mcontroller.errors import ConfigError


@strict_fields
@dataclass(frozen=True, slots=True)
class Engine:
    field_hints: ClassVar[dict[str, str]] = {"torque": "torque follows from power"}

    power: int
    fuel: str = "petrol"


@strict_fields
@dataclass(frozen=True, slots=True)
class Car:
    engine: Engine
    doors: int = 4
    trailer: Engine | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Truck(Car):
    load: int


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda: Engine(1, fule="gas"), {"key": "fule", "close_matches": ["fuel"]}),
        (lambda: Engine(1, torque=3), {"key": "torque"}),
        (lambda: Car(Engine(1), power=3), {"key": "power", "close_matches": ["engine.power", "trailer.power"]}),
        (lambda: Car(), {"key": "engine", "keys": ["engine"]}),
        (lambda: Truck(engine=Engine(1)), {"key": "load", "keys": ["load"]}),
        (lambda: Car({"power": 1}), {"key": "engine", "value": {"power": 1}}),
        (lambda: Car(Engine(1), trailer="Engine"), {"key": "trailer", "value": "Engine"}),
        (lambda: load_config(Car, {"engine": {"power": 1, "torque": 2}}), {"key": "engine.torque"}),
        (lambda: load_config(Car, {"power": 1}), {"key": "power"}),
    ],
)
def test_wrong_fields_are_rejected_with_the_near_ones(make: Callable[[], Any], fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert {name: caught.value.fields[name] for name in fields} == fields


def test_right_fields_are_accepted_and_the_dataclass_stays_one() -> None:
    car = Car(Engine(2, "gas"), extra={"radio": True})
    assert dataclasses.replace(car, doors=2).doors == 2
    assert pickle.loads(pickle.dumps(car)) == car
    assert Truck(engine=Engine(1), load=3).load == 3
    assert (nested_config(Car, "trailer"), nested_config(Car, "extra")) == (Engine, None)


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (lambda value: check_at_least("a.b", value, 0), float("nan")),
        (lambda value: check_at_least("a.b", value, 0), 1.5),
        (lambda value: check_at_least("a.b", value, 0), True),
        (lambda value: check_above("a.b", value, 0), 0),
        (lambda value: check_between("a.b", value, 0, 1), 2),
        (lambda value: check_one_of("a.b", value, ["d", "e"]), "c"),
    ],
)
def test_values_out_of_range_are_rejected_with_key_and_value(check: Callable[[Any], None], value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        check(value)
    assert (caught.value.key, caught.value.value) == ("a.b", pytest.approx(value, nan_ok=True))


def test_changed_fields_have_their_defaults() -> None:
    car = Car(Engine(3), doors=2, extra={"radio": {"power": 5}})
    assert changed_fields(car) == {"engine.power": "required", "doors": 4, "extra": {}}
    assert changed_fields(Car(Engine(3, "gas"), trailer=Engine(1))) == {
        "engine.power": "required",
        "engine.fuel": "petrol",
        "trailer.power": "required",
    }

    @dataclass(frozen=True)
    class Trip:
        car: Car | None = field(default_factory=lambda: Car(Engine(7)))
        stops: Any = (1, 2)

    assert changed_fields(Trip(stops=[1, 2])) == {}
    assert changed_fields(Trip(Car(Engine(8)), stops=[1])) == {"car.engine.power": 7, "stops": [1, 2]}
    assert changed_fields(Trip(None)) == {"car": dataclasses.asdict(Car(Engine(7)))}
