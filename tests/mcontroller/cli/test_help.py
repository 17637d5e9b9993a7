"""``mcontroller help KEY``, and the page of all fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mcontroller.cli.field_docs import fields_of, fields_under
from mcontroller.cli.help import config_page, run_config
from mcontroller.cli.main import main

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


@dataclass(frozen=True)
class Inner:
    length: int = 3
    """[tokens] Longest
    row.

    A second paragraph.
    """
    undocumented: str | None = None


@dataclass(frozen=True)
class Outer:
    inner: Inner
    """The inner one."""
    names: list[str] = field(default_factory=lambda: ["a"])
    """Names."""
    others: dict[str, Inner] = field(default_factory=dict)
    """Others by name."""


def test_name_type_unit_default_and_meaning_are_read_from_the_source() -> None:
    length, undocumented = fields_of(Inner, "outer.")
    assert (length.key, length.annotation, length.unit, length.default) == ("outer.length", "int", "tokens", "3")
    assert length.meaning == "Longest\nrow.\n\nA second paragraph."
    assert (undocumented.annotation, undocumented.default, undocumented.meaning) == ("str | None", "None", "")


def test_fields_of_nested_dataclasses_have_dotted_keys() -> None:
    fields = {field.key: field for field in fields_under(Outer)}
    assert list(fields) == [
        *("inner", "inner.length", "inner.undocumented", "names"),
        *("others", "others.NAME.length", "others.NAME.undocumented"),
    ]
    assert fields["inner"].default == "required" and fields["inner"].nested is Inner
    assert fields["names"].default == "['a']"


def test_every_field_of_every_configuration_is_documented() -> None:
    fields = list(fields_under(run_config()))
    assert len(fields) > 200
    assert [field.key for field in fields if not field.meaning.endswith(".")] == []


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("actor_rollout_ref.optim.lr", ["actor_rollout_ref.optim.lr\n  type: float, default: 1e-05\n  Peak learning"]),
        ("optim.lr", ["actor_rollout_ref.optim.lr\ncritic.optim.lr\n", "Peak learning rate."]),
        ("trainer.save_freq", ["type: int, default: 0, unit: steps", "-1: never."]),
        ("trainer", ["fields (TrainerConfig):", "    resume: bool = False  Continue from the last checkpoint"]),
        ("reward_model.micro_batch_size", ["unit: rows"]),
    ],
)
def test_a_key_is_explained(key: str, expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", key]) == 0
    printed = capsys.readouterr().out
    assert all(part in printed for part in expected), printed


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("optm.lr", "there is no configuration key 'optm.lr'; did you mean optim.lr"),
        ("topology", "it is a verb: mcontroller topology --help"),
        ("qqqqq", "mcontroller help prints all sections"),
    ],
)
def test_an_unknown_key_is_rejected_with_what_to_do(key: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", key]) == 1
    assert message in capsys.readouterr().err


def test_without_a_key_the_sections_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    assert "trainer: TrainerConfig" in capsys.readouterr().out


def test_the_page_is_up_to_date() -> None:
    command = "python -m mcontroller help --markdown > docs/configuration.md"
    assert PAGE.read_text() == config_page(run_config()), f"run {command}"
