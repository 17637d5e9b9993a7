"""Reward functions for configurations: the scorers of reasoning-gym, and mathematical equality."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from mcontroller.config.imports import import_extra


def reasoning_gym(response: str, entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the score of reasoning-gym's scorer, and ``accuracy``, which is 1 for a full score.

    Args:
        response: the generated text.
        entry: the problem, a column of the source ``reasoning_gym``.
    """
    score = _scorer(entry["metadata"]["source_dataset"])(response, entry)
    return {"score": score, "accuracy": float(score == 1.0)}


def exact_match(response: str, answer: str) -> float:
    """Return 1 if the response is the answer, without regard to spaces around them, else 0."""
    return float(response.strip() == str(answer).strip())


def math_verify(response: str, answer: str) -> float:
    r"""Return 1 if the response ends in an expression that is mathematically equal to the answer, else 0.

    Needs the extra ``math``. Both are parsed by math-verify: LaTeX, also in ``\\boxed{}``, and plain numbers. Its own
    time limits are off, because the process has its own.
    """
    library = import_extra("math_verify", "math", "rewards.functions")
    gold = library.parse(str(answer), parsing_timeout=None)
    if not gold:
        gold = library.parse(f"${answer}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify cannot parse the answer {answer!r}")
    return float(library.verify(gold, library.parse(response, parsing_timeout=None), timeout_seconds=None))


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
