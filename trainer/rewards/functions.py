"""Reward functions for configurations: the scorers of reasoning-gym, and mathematical equality."""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import re
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from types import ModuleType
from typing import Any

from mcontroller.config.imports import import_extra
from mcontroller.errors import DataError

DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
DELIMITED = re.compile(r"\\boxed|\\\(|\\\[|(?<!\\)\$[^$]+(?<!\\)\$")
BOX = re.compile(r"(\}\$?\s*(?:,\s*(?:and\b|or\b)?|and\b|or\b)\s*\$?)?\\boxed")
"""A box; with a group if it continues a list of boxes, such as ``\\boxed{3}, \\boxed{4}``."""
WORDS = re.compile(r"[A-Za-z]{3,}[A-Za-z ]*")
"""Words, which LaTeX reads as products of letters: ``odd`` would be equal to ``dod``."""
GLUED = re.compile(r"[^\s=]*[A-Za-z\\_{}][^\s=]*")
"""Words, and expressions of which a search for numbers would read a part, such as ``3`` of ``3\\sqrt{13}``."""
BASE = re.compile(r"\d_\{?(\d+)")
"""The base of a number, which math-verify drops."""


def reasoning_gym(response: str, entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the score of reasoning-gym's scorer, and ``accuracy``, which is 1 for a full score.

    Args:
        response: the generated text.
        entry: the problem, a column of the source ``reasoning_gym``.
    """
    score = _scorer(entry["metadata"]["source_dataset"])(response, entry)
    return {"score": score, "accuracy": float(score == 1.0)}


def answer_text(answer: Any) -> str:
    """Return the right answer to a problem as the text of a response.

    A number has its shortest decimal form: a column of integers with missing values is read as floats, and one of 32
    bits as floats of 64.

    Raises:
        DataError: there is no answer (None, NaN, an empty text), or it is neither a text, a number nor a boolean.
    """
    import numpy as np  # slow, and the commands import this module

    if isinstance(answer, np.generic):
        answer = answer.item()
    if isinstance(answer, float | Decimal) and math.isfinite(answer):
        if answer == int(answer):
            return str(int(answer))
        single = np.float32(answer)
        return str(single if float(single) == answer else answer)
    if isinstance(answer, str) and answer.strip():
        return answer.strip()
    if isinstance(answer, bool | int):
        return str(answer)
    shown = repr(answer)[:60]
    raise DataError(
        f"the answer is {shown} of type {type(answer).__name__}; expected a text that is not empty, a finite number or "
        "a boolean: set data.answer_key to the column of the right answers, or leave the problem out",
        answer=answer,
    )


def exact_match(response: str, answer: Any) -> float:
    """Return 1 if the response is the answer, without regard to spaces around them, else 0.

    If the answer is a number, the response is too, with the same value; if it is a boolean, upper and lower case are
    the same.

    Raises:
        DataError: see ``answer_text``.
    """
    expected, given = answer_text(answer), response.strip()
    if expected in ("True", "False") and not isinstance(answer, str):
        return float(given.lower() == expected.lower())
    if isinstance(answer, str):
        return float(given == expected)
    return float(DECIMAL.fullmatch(given) is not None and Decimal(given) == Decimal(expected))


def math_verify(response: str, answer: Any) -> float:
    r"""Return 1 if the response ends in an expression that is mathematically equal to the answer, else 0.

    Needs the extra ``math``. The answer is a whole expression in LaTeX, as in ``\boxed{}``, or follows ``####``. The
    expression of the response is in its last ``\boxed{}``, else between its last math delimiters; without any it is
    the whole response, or its last plain number. Units and the case of letters are ignored. Time limits of math-verify
    are off, because the process has its own.

    Raises:
        DataError: see ``answer_text``.
    """
    gold_text = answer_text(answer).rpartition("####")[2].strip()
    if WORDS.fullmatch(gold_text):
        gold_text = rf"\text{{{gold_text}}}"
    gold = _parsed(gold_text if DELIMITED.search(gold_text) else rf"\boxed{{{gold_text}}}")
    if not gold:
        raise DataError(f"math-verify cannot parse the answer {answer!r}; expected LaTeX or a number", answer=answer)
    boxes = [box.start() for box in BOX.finditer(response) if box[1] is None]
    if boxes or DELIMITED.search(response):
        return _is_equal(gold, _parsed(response[boxes[-1] if boxes else 0 :], "first_match"))
    if "\n" not in response.strip() and _is_equal(gold, _parsed(rf"\boxed{{{response.strip()}}}")):
        return 1.0
    return _is_equal(gold, _parsed(GLUED.sub(" _ ", response), "any_match"))


def _parsed(text: str, plain_numbers: str | None = None) -> list[Any]:
    """Return the last expression in a text, parsed if it can be, and as text; empty if there is none.

    Args:
        text: with LaTeX between delimiters.
        plain_numbers: search for numbers outside of them too, with this ``extraction_mode`` of math-verify.
    """
    library = _math_verify()
    targets = [library.LatexExtractionConfig(boxed_match_priority=0)]
    if plain_numbers is not None:
        targets.append(library.ExprExtractionConfig())
    mode = plain_numbers or "first_match"
    expressions: list[Any] = library.parse(text, targets, extraction_mode=mode, parsing_timeout=None)
    return expressions


def _is_equal(gold: list[Any], given: list[Any]) -> float:
    bases = BASE.findall(str(given[-1])) if given else []
    if bases and bases != BASE.findall(str(gold[-1])):
        return 0.0
    return float(_math_verify().verify(gold, given, timeout_seconds=None))


@functools.cache
def _math_verify() -> ModuleType:
    library = import_extra("math_verify", "math", "rewards.functions")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    return library


def import_reasoning_gym() -> ModuleType:
    """Return reasoning-gym, importable without pycosat.

    pycosat is a C extension without wheels that only the zebra puzzles use, but importing any task imports all of
    them. If it is not installed, an empty module replaces it: zebra puzzles then fail, all other tasks work.
    """
    if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = ModuleType("pycosat")
    return import_extra("reasoning_gym", "demo", "task")


@functools.cache
def _scorer(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    gym = import_reasoning_gym()
    scorer: Callable[[str, Mapping[str, Any]], float] = gym.get_score_answer_fn(task)
    return scorer
