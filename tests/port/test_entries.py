"""The figures of docs/porting.md: which public entries of verl 0.4.1 exist here with the same signature."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.port.compare import compare, summary

PAGE = Path(__file__).parents[2] / "docs" / "porting.md"


def test_the_page_has_the_figures_of_the_comparison() -> None:
    entries = compare()
    assert summary(Counter(kind for _, kind, _ in entries)) in PAGE.read_text()


def test_the_page_names_every_entry_that_differs_or_is_missing() -> None:
    page = PAGE.read_text()
    differing = [name for name, kind, _ in compare() if kind in ("differs", "missing")]
    names = {name.removesuffix(".__init__").rpartition(".")[2] for name in differing}
    assert [name for name in sorted(names) if f"`{name}`" not in page and f".{name}`" not in page] == []
