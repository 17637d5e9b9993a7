"""The trial of reward functions before a run: each is called with problems and their right answers as responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mcontroller.config.checks import close_names
from mcontroller.errors import DataError
from mcontroller.ppo.scoring.server import LoadedFunction, Sample, ScoreOutcome

__all__ = ["SHOWN", "TRIED", "CallFunction", "description_of", "try_functions"]

CallFunction = Callable[[str, Sequence[Sample]], Sequence[ScoreOutcome]]
"""Calls the function of a name with samples, and returns the outcome of each."""

TRIED = 8
"""Problems to which at least one function must apply."""
SHOWN_CHARACTERS = 200
SHOWN = ("prompt", "response", "answer")
"""Columns of a sample in messages and tables."""


def description_of(sample: Sample) -> str:
    """Return the texts of a sample for a message."""
    return ", ".join(f"{key} {repr(sample.get(key))[:SHOWN_CHARACTERS]}" for key in SHOWN)


def try_functions(
    functions: Mapping[str, LoadedFunction], samples: Sequence[Sample], call: CallFunction, *, must_apply: bool
) -> None:
    """Call every function with the first sample; those that score batches with the first two.

    Args:
        functions: reward functions by name.
        samples: problems with their right answers as responses; at least one.
        call: calls a function.
        must_apply: reject functions that return None for all of the first samples: nothing would be learned.

    Raises:
        DataError: a function needs an argument that there is not, fails, or none applies; the message has the sample.
    """
    applies = False
    for name, function in functions.items():
        _check_arguments(name, function, samples[0])
        tried = samples[: 2 if function.config.batch else 1]
        outcomes = call(name, tried)
        for sample, outcome in zip(tried, outcomes, strict=True):
            if outcome.error is not None:
                raise DataError(
                    f"the reward function {name!r} ({function.config.function}) failed in a trial before the start: "
                    f"{outcome.error}. {description_of(sample)}{_hint(function, sample)}",
                    function=name,
                )
            applies |= outcome.score is not None
    if applies or not must_apply:
        return
    tried = samples[:TRIED]
    if not any(outcome.score is not None or outcome.error for name in functions for outcome in call(name, tried)):
        raise DataError(
            f"no reward function applies to the first {len(tried)} problems: {', '.join(functions)} returned None for "
            f"each with its right answer, as a function without a return statement does. {description_of(tried[0])}",
            functions=list(functions),
        )


def _check_arguments(name: str, function: LoadedFunction, sample: Sample) -> None:
    """Raise DataError if a function needs an argument that is no value of a sample and no option."""
    known = {**sample, **function.config.options}
    for argument in function.required:
        if argument not in known:
            raise DataError(
                f"the reward function {name!r} ({function.config.function}) needs {argument!r}, which is neither a "
                f"column of the problems nor one of its options: there are {', '.join(known)}"
                f"{close_names(argument, known)}",
                function=name,
                argument=argument,
            )


def _hint(function: LoadedFunction, sample: Sample) -> str:
    if sample.get("answer") is None and "answer" in function.names:
        return ". The problem has no answer: set data.answer_key to the column of the right answers"
    return ""
