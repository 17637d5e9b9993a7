"""Which tokens are computed, and copies whose gradients are sums in a fixed order."""

from __future__ import annotations

import pytest
import torch

from workers.distinct_tokens import DistinctTokens, distinct_tokens, spread_of

WIDTH = 12


def distinct_of(
    rows: list[tuple[str, str]], counted: list[int] | None = None, multiple: int = 1
) -> DistinctTokens | None:
    """The distinct tokens of prompts and responses, a letter a token; ``counted`` are the targets of each row."""
    tokens = torch.zeros(len(rows), WIDTH, dtype=torch.long)
    predictors = torch.zeros(len(rows), 6, dtype=torch.long)
    mask = torch.zeros(len(rows), 6)
    for at, (prompt, response) in enumerate(rows):
        tokens[at, : len(prompt + response)] = torch.tensor([ord(letter) for letter in prompt + response])
        predictors[at] = len(prompt) - 1 + torch.arange(6)
        mask[at, : len(response) if counted is None else counted[at]] = 1
    return distinct_tokens(tokens, predictors.clamp(max=WIDTH - 1), mask, multiple)


def letters(rows: list[tuple[str, str]], of: DistinctTokens) -> str:
    whole = "".join((prompt + response).ljust(WIDTH) for prompt, response in rows)
    return "".join(whole[at] for at in of.source)


def test_a_prompt_comes_once_for_its_rows_and_the_last_token_predicts_nothing() -> None:
    rows = [("abc", "xyz"), ("abc", "xw"), ("abc", "q"), ("de", "xyz"), ("abc", "xyz")]
    distinct = distinct_of(rows)
    assert distinct is not None
    assert letters(rows, distinct) == "abc" + "de" + "abc" + "xy" + "x" + "" + "xy" + "xy"
    assert distinct.position.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 3, 2, 3, 3, 4]
    assert distinct.of_row[1, :4].tolist() == [0, 1, 2, 10]
    assert distinct.total == 15


def test_rows_without_targets_are_not_computed_and_the_length_is_a_multiple() -> None:
    rows = [("abc", "xyz"), ("abc", "pqr"), ("de", "xyz")]
    distinct = distinct_of(rows, counted=[0, 3, 0], multiple=4)
    assert distinct is not None
    assert letters(rows, distinct)[:5] == "abcpq"
    assert distinct.total == 8
    assert distinct.source[5:].tolist() == [0, 0, 0]
    assert not distinct.of_row[[0, 2]].any()


def test_a_prompt_that_begins_another_is_a_prompt_of_its_own() -> None:
    rows = [("abc", "x"), ("abcd", "x"), ("abd", "x")]
    distinct = distinct_of(rows)
    assert distinct is not None
    assert letters(rows, distinct) == "abcabcdabd"


def test_nothing_is_distinct_if_no_row_counts_or_too_little_is_saved() -> None:
    full = [("abcdef", "qrstuv"), ("bcdefg", "qrstuv")]
    assert distinct_of(full) is None
    assert distinct_of([("abc", "x")], counted=[0]) is None
    assert distinct_of([full[0], full[0]]) is not None


@pytest.mark.parametrize("index", [[0, 1, 1, 3, 1, 3], [2, 2, 2, 2], [0, 1, 2, 3, 4, 3, 2]], ids=str)
def test_gradients_of_copies_are_those_of_index_select(index: list[int]) -> None:
    values = torch.randn(5, 3, 2, dtype=torch.float64, requires_grad=True)
    of_each = torch.randn(len(index), 3, 2, dtype=torch.float64)
    spread = spread_of(torch.tensor(index), 5)
    (ours,) = torch.autograd.grad((spread(values) * of_each).sum(), values)
    (expected,) = torch.autograd.grad((values[torch.tensor(index)] * of_each).sum(), values)
    assert torch.equal(spread(values), values[torch.tensor(index)])
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-15)
    present = torch.tensor(sorted(set(index)))
    assert torch.equal(spread.one_of_each(values[torch.tensor(index)])[present], values[present])


def test_places_that_do_not_count_give_no_gradient() -> None:
    values = torch.ones(2, 1, requires_grad=True)
    spread = spread_of(torch.tensor([0, 1, 0, 0]), 2, torch.tensor([True, True, True, False]))
    spread(values).backward(torch.tensor([[1.0], [2.0], [4.0], [8.0]]))
    assert values.grad is not None
    assert values.grad.flatten().tolist() == [5.0, 2.0]
