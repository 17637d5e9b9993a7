"""The trial of reward functions before a run: every kind of value that they read, and the scores of right answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mcontroller.config.checks import close_names
from mcontroller.errors import DataError
from trainer.rewards.functions import answer_text
from trainer.rewards.processes import LoadedFunction, Sample, ScoreOutcome

CallFunction = Callable[[str, Sequence[Sample]], Sequence[ScoreOutcome]]
"""Calls the function of a name with samples, and returns the outcome of each."""

TRIED = 8
"""Problems to which at least one function must apply."""
RIGHT = 4
"""Problems whose right answers are compared with wrong ones."""
SHOWN_CHARACTERS = 200
SHOWN = ("prompt", "response", "answer")
"""Columns of a sample in messages and tables."""


def description_of(sample: Sample) -> str:
    """Return the texts of a sample for a message."""
    return ", ".join(f"{key} {repr(sample.get(key))[:SHOWN_CHARACTERS]}" for key in SHOWN)


def right_response(answer: Any) -> str:
    """Return the right answer to a problem as a response; empty if there is none."""
    try:
        return answer_text(answer)
    except DataError:
        return ""


def try_functions(
    functions: Mapping[str, LoadedFunction],
    training: Mapping[str, Sequence[Sample]],
    call: CallFunction,
    *,
    held_out: Mapping[str, Sequence[Sample]],
    must_apply: bool,
) -> list[str]:
    """Call every function with a sample of each kind; return a line for each training set with right answers at fault.

    Right answers are at fault if they do not get the best score.

    Samples are of one kind if the values that the function reads have the same types. A function that scores batches
    gets the first two samples together.

    Args:
        functions: reward functions by name.
        training: by the key of a data set, problems with their right answers as responses; each has at least one.
        call: calls a function.
        held_out: held-out problems, likewise.
        must_apply: reject functions that return None for all of the first samples: nothing would be learned.

    Raises:
        DataError: a function needs an argument that there is not, fails, or returns a score although a value that it
            needs is missing; or none applies. The message has the sample and its columns.
    """
    applies = False
    for name, function in functions.items():
        kinds: set[tuple[str, ...]] = set()
        for key, problems in {**training, **held_out}.items():
            for index in _first_of_new_kinds(function, problems, kinds):
                pair = function.config.batch and key in training and index == 0
                tried = {
                    f"problem {row + 1} of {len(problems)} in {key}": problems[row]
                    for row in range(index, min(index + 1 + pair, len(problems)))
                }
                outcomes = _checked_calls(name, function, tried, call)
                applies |= any(outcome.score is not None for outcome in outcomes)
    first = [sample for problems in training.values() for sample in problems[:TRIED]]
    if must_apply and not applies:
        scored = [outcome for name in functions for outcome in call(name, first)]
        if not any(outcome.score is not None or outcome.error for outcome in scored):
            raise DataError(
                f"no reward function applies to the first {len(first)} problems: {', '.join(functions)} returned None "
                f"for each with its right answer, as a function without a return statement does. "
                f"{description_of(first[0])}",
                functions=list(functions),
            )
    lines = (_line_of_right_answers(functions, key, problems[:TRIED], call) for key, problems in training.items())
    return [line for line in lines if line is not None]


def _first_of_new_kinds(
    function: LoadedFunction, problems: Sequence[Sample], kinds: set[tuple[str, ...]]
) -> Iterator[int]:
    """Yield the index of the first problem of every kind that is not in ``kinds``; add these."""
    names = sorted({*function.names, "answer"} if function.takes_all else function.names)
    for index, sample in enumerate(problems):
        kind = tuple(_kind(sample[name]) if name in sample else "absent" for name in names)
        if kind not in kinds:
            kinds.add(kind)
            yield index


def _kind(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return "empty" if isinstance(value, str) and not value.strip() else type(value).__name__


def _check_arguments(name: str, function: LoadedFunction, sample: Sample, place: str) -> None:
    """Raise DataError if a function needs an argument that is no value of a sample and no option."""
    known = {**sample, **function.config.options}
    for argument in function.required:
        if argument not in known:
            raise DataError(
                f"the reward function {name!r} ({function.config.function}) needs {argument!r}, which is neither a "
                f"column of the problems nor one of its options ({place}): there are {', '.join(known)}"
                f"{close_names(argument, known)}",
                function=name,
                argument=argument,
            )


def _checked_calls(
    name: str, function: LoadedFunction, tried: Mapping[str, Sample], call: CallFunction
) -> Sequence[ScoreOutcome]:
    """Return the outcomes of samples, which have their place in the data as key.

    Raises:
        DataError: the function needs an argument that there is not, failed, or returned a score although a value that
            it needs is missing.
    """
    for place, sample in tried.items():
        _check_arguments(name, function, sample, place)
    outcomes = call(name, list(tried.values()))
    title = f"the reward function {name!r} ({function.config.function})"
    for (place, sample), outcome in zip(tried.items(), outcomes, strict=True):
        columns = f"It is {place}, with the columns {', '.join(_columns(sample))}"
        if outcome.error is not None:
            raise DataError(
                f"{title} failed in a trial before the start: {outcome.error}. {description_of(sample)}"
                f"{_hint(function, sample)}. {columns}",
                function=name,
            )
        given = {**sample, **function.config.options}
        missing = [key for key in function.required if given[key] is None or _kind(given[key]) == "nan"]
        if missing and outcome.score is not None:
            raise DataError(
                f"{title} returned a score of {outcome.score:g} in a trial before the start although {missing[0]!r} is "
                f"{given[missing[0]]}: leave such problems out, or let the function return None for them, or give "
                f"its argument a default if it does without. {description_of(sample)}{_hint(function, sample)}. "
                f"{columns}",
                function=name,
                argument=missing[0],
            )
    return outcomes


def _columns(sample: Sample) -> Iterator[str]:
    """Yield the columns of a problem that have values, and the keys of those that are mappings."""
    for name, value in sample.items():
        if isinstance(value, Mapping):
            yield from (f"{name}.{key}" for key in value)
        elif name != "response" and value is not None:
            yield name


def _hint(function: LoadedFunction, sample: Sample) -> str:
    if sample.get("answer") is None and "answer" in function.names:
        return ". The problem has no answer: set data.answer_key to the column of the right answers"
    return ""


def _line_of_right_answers(
    functions: Mapping[str, LoadedFunction], key: str, samples: Sequence[Sample], call: CallFunction
) -> str | None:
    """Return a line if the right answer to a problem does not score above an empty response and another answer."""
    read = {name for function in functions.values() for name in {*function.names} - {*function.config.options}}
    answered = [sample for sample in samples if sample["response"]]
    if not answered or not read - {"prompt", "response"}:
        return None
    groups = []
    for sample in answered[:RIGHT]:
        others = [other["response"] for other in answered if other["response"] != sample["response"]]
        groups.append([sample, *({**sample, "response": response} for response in ["", *others[:1]])])
    flat = [sample for group in groups for sample in group]
    totals: list[float | None] = [None] * len(flat)
    for name, function in functions.items():
        for row, outcome in enumerate(call(name, flat)):
            if outcome.score is not None:
                totals[row] = (totals[row] or 0.0) + function.config.weight * outcome.score
    scores = iter(totals)
    not_best = []
    for group in groups:
        (_, right), *wrong = [(sample["response"], next(scores)) for sample in group]
        response, best = max(wrong, key=lambda pair: -math.inf if pair[1] is None else pair[1])
        if best is not None and (right is None or right <= best):
            not_best.append((group[0]["response"], right, response, best))
    if not not_best:
        return None
    answer, right, response, best = not_best[0]
    return (
        f"rewards: {len(not_best)} of {len(groups)} right answers in {key} do not get the best score, such as "
        f"{answer[:SHOWN_CHARACTERS]!r} with {'none' if right is None else format(right, 'g')}, and "
        f"{response[:SHOWN_CHARACTERS]!r} with {best:g}: check data.answer_key and the functions, unless they expect a "
        "format that an answer alone does not have"
    )
