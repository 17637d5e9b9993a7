"""The pages in docs/: every example runs and prints what stands below it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["dispatch.md", "testing.md"])
def test_examples_print_what_the_page_says(page: str) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    blocks = BLOCK.findall((DOCS / page).read_text())
    assert len(blocks) >= 4
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        assert without_blanks(printed.getvalue()) == without_blanks(expected)


def without_blanks(text: str) -> str:
    """The text with trailing blanks dropped, as pages have none."""
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())
