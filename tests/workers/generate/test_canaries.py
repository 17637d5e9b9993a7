"""The verdict about an engine from changes of log-probabilities, with known changes and known rounding."""

from __future__ import annotations

import pytest
import torch

from workers.generate.canaries import CanaryScores, CanaryVerdict, judge

PROMPTS, LENGTH = 64, 16
EVERYTHING = {"new": 1.0, "old": 0.0, "half": 0.5}


class Case:
    """A policy and an engine with independent rounding errors of one size, and a change of size 1."""

    def __init__(self, rounding: float, seed: int, prompts: int = PROMPTS, *, still: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.shape = (prompts, LENGTH)
        self.rounding, self.still = rounding, still
        self.tokens = torch.randint(0, 100, self.shape, generator=self.generator)
        self.level = 3 * self.normal() - 5
        self.parts = self.normal() * 0.5**0.5, self.normal() * 0.5**0.5
        self.before = self.scores(self.level, self.level)

    def normal(self) -> torch.Tensor:
        return torch.randn(self.shape, generator=self.generator, dtype=torch.float64)

    def scores(self, policy: torch.Tensor, engine: torch.Tensor) -> CanaryScores:
        noise = self.rounding * self.normal(), self.rounding * self.normal()
        return CanaryScores(self.tokens, engine + noise[0], policy + noise[1])

    def verdict(self, kind: str) -> CanaryVerdict:
        arrived = {"new": sum(self.parts), "half": self.parts[0], "old": 0 * self.parts[0]}[kind]
        after = self.scores(self.level + sum(self.parts), self.level + arrived)
        if kind == "old":
            after = after._replace(engine=self.before.engine)  # the same weights round in the same way
        return judge(self.before, after)


def rates(rounding: float, kind: str, prompts: int = PROMPTS) -> dict[bool | None, int]:
    found = [Case(rounding, seed, prompts).verdict(kind).arrived for seed in range(40)]
    return {arrived: found.count(arrived) for arrived in (True, False, None)}


@pytest.mark.parametrize("rounding", [0.0, 0.01, 0.1])
def test_new_and_old_weights_are_separated_by_changes_larger_than_rounding(rounding: float) -> None:
    assert rates(rounding, "new")[True] == 40
    assert rates(rounding, "old")[False] == rates(rounding, "half")[False] == 40


@pytest.mark.parametrize("rounding", [1.0, 4.0])
def test_rounding_that_hides_the_change_is_undecided_and_not_an_error(rounding: float) -> None:
    new, half = rates(rounding, "new"), rates(rounding, "half")
    assert new[False] == 0 and new[None] >= 39
    assert half[True] == 0
    assert rates(rounding, "old")[False] == 40


def test_more_prompts_separate_changes_that_are_as_small_as_rounding() -> None:
    assert rates(1.0, "new", prompts=2048)[True] == rates(1.0, "half", prompts=2048)[False] == 40


def test_share_that_is_missing_is_estimated() -> None:
    verdict = Case(0.1, 1).verdict("half")
    assert verdict.lost == pytest.approx(0.5, abs=3 * verdict.error)
    assert verdict.mismatch[1] > 3 * verdict.mismatch[0]
    assert len(verdict.prompts) == 4


def test_tokens_after_the_first_other_token_are_not_compared() -> None:
    case = Case(0.1, 1)
    other = case.tokens.clone()
    other[:, LENGTH // 2] += 1
    policy = case.level + sum(case.parts)
    wrong = torch.cat((policy[:, : LENGTH // 2], policy[:, LENGTH // 2 :] + 9), 1)
    verdict = judge(case.before, case.scores(policy, wrong)._replace(tokens=other))
    assert verdict.arrived and verdict.tokens == PROMPTS * LENGTH // 2


def test_policy_that_did_not_change_is_undecided_and_a_changed_engine_reported() -> None:
    case = Case(0.0, 1)
    assert judge(case.before, case.before).arrived is None
    assert judge(case.before, case.scores(case.level, case.level + case.parts[0])).arrived is False


def test_first_weights_are_reported_if_they_are_others_altogether() -> None:
    case = Case(0.01, 1)
    assert judge(None, case.before).arrived is None
    assert judge(None, case.before._replace(engine=case.before.engine.roll(1, 0))).arrived is False
