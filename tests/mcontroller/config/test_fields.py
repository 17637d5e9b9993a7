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
    ("make", "message"),
    [
        (lambda: Engine(1, fule="gas"), "Engine has no field 'fule'; did you mean fuel?"),
        (lambda: Engine(1, torque=3), "Engine has no field 'torque'; torque follows from power"),
        (lambda: Engine(1, colour=3), "Engine has no field 'colour'; its fields are power, fuel"),
        (lambda: Car(Engine(1), power=3), "Car has no field 'power'; did you mean engine.power or trailer.power?"),
        (lambda: Car(), "Car needs a value for engine"),
        (lambda: Truck(engine=Engine(1)), "Truck needs a value for load"),
        (
            lambda: Car({"power": 1}),
            "Car: engine is a dict; expected Engine: write engine=Engine(...), or load_config(Car",
        ),
        (lambda: Car(Engine(1), trailer="Engine"), "Car: trailer is a str; expected Engine"),
        (lambda: load_config(Car, {"engine": {"power": 1, "torque": 2}}), "(key engine.torque); torque follows from"),
        (lambda: load_config(Car, {"power": 1}), "Car has no field 'power'; did you mean engine.power or trailer"),
    ],
)
def test_wrong_fields_are_rejected_with_the_fix(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)


def test_right_fields_are_accepted_and_the_dataclass_stays_one() -> None:
    car = Car(Engine(2, "gas"), extra={"radio": True})
    assert dataclasses.replace(car, doors=2).doors == 2
    assert pickle.loads(pickle.dumps(car)) == car
    assert Truck(engine=Engine(1), load=3).load == 3
    assert (nested_config(Car, "trailer"), nested_config(Car, "extra")) == (Engine, None)


@pytest.mark.parametrize(
    ("check", "rule"),
    [
        (lambda: check_at_least("a.b", float("nan"), 0), "a.b is nan; it must be at least 0"),
        (lambda: check_at_least("a.b", 1.5, 0), "a.b is 1.5; it must be an integer of at least 0"),
        (lambda: check_at_least("a.b", True, 0), "a.b is True; it must be at least 0"),
        (lambda: check_above("a.b", 0, 0), "a.b is 0; it must be more than 0"),
        (lambda: check_between("a.b", 2, 0, 1), "a.b is 2; it must lie between 0 and 1"),
        (lambda: check_one_of("a.b", "c", ["d", "e"]), "a.b is 'c'; possible: d, e"),
    ],
)
def test_values_out_of_range_are_rejected_with_key_value_and_rule(check: Callable[[], None], rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check()
    assert str(caught.value) == rule and caught.value.fields["key"] == "a.b"


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
