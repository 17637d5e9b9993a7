from __future__ import annotations

import math
from decimal import Decimal

import numpy as np
import pytest

from mcontroller.errors import DataError
from trainer.data.config import DatasetConfig
from trainer.data.sources import load_records
from trainer.rewards.functions import exact_match, math_verify, reasoning_gym


def test_the_scorer_of_a_task_scores_right_partial_and_wrong_answers():
    config = DatasetConfig(source="reasoning_gym", task="chain_sum", options={"min_digits": 2}, size=20)
    rows = load_records(config, "data.train").rows
    assert all(reasoning_gym(row["answer"], row["entry"]) == {"score": 1.0, "accuracy": 1.0} for row in rows)
    assert all(reasoning_gym("no number", row["entry"])["accuracy"] == 0.0 for row in rows)
    partial = reasoning_gym(rows[0]["answer"] + " + ", rows[0]["entry"])
    assert 0.0 < partial["score"] < 1.0 and partial["accuracy"] == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (" 12\n", "12", 1.0),
        ("12.", "12", 0.0),
        ("27.0", "27", 0.0),
        ("27", 27.0, 1.0),
        ("27.0", 27, 1.0),
        ("28", 27.0, 0.0),
        ("27", np.float32(27.0), 1.0),
        ("0.1", float(np.float32(0.1)), 1.0),
        ("12.50", Decimal("12.5"), 1.0),
        ("12345678901234567890", 12345678901234567890, 1.0),
        ("12345678901234567891", 12345678901234567890, 0.0),
        ("1_000", 1000, 0.0),
        ("nan", 1.0, 0.0),
        ("1e99999999999999999999", 1, 0.0),
        ("true", True, 1.0),
        ("1", True, 0.0),
        ("False", np.bool_(False), 1.0),
    ],
)
def test_an_exact_match_compares_texts_and_values_of_numbers(response, answer, score):
    assert exact_match(response, answer) == score


@pytest.mark.parametrize("function", [exact_match, math_verify])
@pytest.mark.parametrize("answer", [None, math.nan, math.inf, "", " ", ["27"], {"value": 27}, b"27"], ids=repr)
def test_a_missing_answer_is_equal_to_no_response(function, answer):
    with pytest.raises(DataError) as raised:
        function(str(answer), answer)
    assert raised.value.answer is answer


MATH_ANSWERS = r"""
3\sqrt{13}
3\pi
2x+3
10^{6}
(3, \frac{\pi}{2})
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}
A
\text{(C)}
\text{Monday}
Evelyn
\text{June 20}
[-1,2)
(-\infty, -2) \cup (2, \infty)
\left[ -\frac{1}{2}, 3 \right]
\left( \frac{3}{2}, -13 \right)
(6,31,-1)
x=5
y = 2x + 3
b_1 = 5
x > 3
x \in [-2,7]
-2 \le x < 3
5x - 7y + 11z + 4 = 0
11\sqrt{2}
2 + \sqrt{3}
\sqrt[3]{5}
1,000
10,\!080
1{,}000
50\%
50%
\$18.90
$18.90
3:2
2516_8
4\frac{1}{2}
\frac14
-\dfrac{3}{4}
0.5
0.\overline{3}
60^\circ
10 \text{ cm}^2
5\text{ cm}
1+2i
\{1,2,3\}
1, -2
\pm 2
x^2 - 2x + 1
n(n+1)
p - q
2k\pi
e^2
\log_2 3
\tan x
\binom{5}{2}
7!
|x|
\infty
\emptyset
\overline{AB}
$\frac{1}{2}$
1.5 \times 10^{-3}
3 \text{ R } 2
x \equiv 3 \pmod 5
""".strip().splitlines()


@pytest.mark.parametrize("text", [r"So the answer is $\boxed{%s}$.", r"\[\boxed{%s}\]", r"Thus \boxed{%s}", "%s"])
def test_an_answer_of_math_is_right_in_a_box_and_alone(text):
    assert len(MATH_ANSWERS) >= 50
    assert [answer for answer in MATH_ANSWERS if math_verify(text.replace("%s", answer), answer) != 1.0] == []


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{3}", r"3\sqrt{13}"),
        (r"\boxed{13}", r"3\sqrt{13}"),
        (r"\boxed{3\sqrt{3}}", r"3\sqrt{13}"),
        (r"\boxed{3}", r"3\pi"),
        (r"\boxed{\pi}", r"3\pi"),
        (r"\boxed{2}", "2x+3"),
        (r"\boxed{3}", "2x+3"),
        (r"\boxed{10}", "10^{6}"),
        (r"\boxed{6}", "10^{6}"),
        (r"\boxed{3}", r"(3, \frac{\pi}{2})"),
        (r"\boxed{\frac{\pi}{2}}", r"(3, \frac{\pi}{2})"),
        (r"\boxed{(\frac{\pi}{2}, 3)}", r"(3, \frac{\pi}{2})"),
        (r"\boxed{1}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
        (r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
        (r"\boxed{B}", "A"),
        (r"\boxed{D}", r"\text{(C)}"),
        (r"\boxed{\text{Tuesday}}", r"\text{Monday}"),
        (r"\boxed{dod}", "odd"),
        (r"\boxed{20}", r"\text{June 20}"),
        (r"\boxed{-1}", "[-1,2)"),
        (r"\boxed{[-1,2]}", "[-1,2)"),
        (r"\boxed{(-\infty, -2)}", r"(-\infty, -2) \cup (2, \infty)"),
        (r"\boxed{x=6}", "x=5"),
        (r"\boxed{3}", "x > 3"),
        (r"\boxed{11}", r"11\sqrt{2}"),
        (r"\boxed{1}", "1,000"),
        (r"\boxed{10}", r"10,\!080"),
        (r"\boxed{5}", r"50\%"),
        (r"\boxed{18}", r"\$18.90"),
        (r"\boxed{3}", "3:2"),
        (r"\boxed{2:3}", "3:2"),
        (r"\boxed{2516_7}", "2516_8"),
        (r"\boxed{1358}", "2516_8"),
        (r"\boxed{4}", r"4\frac{1}{2}"),
        (r"\boxed{0}", r"0.\overline{3}"),
        (r"\boxed{1}", "1+2i"),
        (r"\boxed{1}", "1, -2"),
        (r"\boxed{2}", r"\pm 2"),
        (r"\boxed{x^2}", "x^2 - 2x + 1"),
        (r"\boxed{3, 4}", "3"),
        (r"\boxed{3} is wrong, so \boxed{4}", "3"),
        (r"First $5$, then \boxed{0.\overline{3}}", "5"),
        (r"3\sqrt{13}", "3"),
        (r"The answer is 3\sqrt{13}", "3"),
        ("The answer is 2x+3", "2"),
        (r"\boxed{", "3"),
        ("", "3"),
    ],
)
def test_a_part_of_an_answer_and_another_one_are_wrong(response, answer):
    assert math_verify(rf"The answer is {response}.", answer) == math_verify(response, answer) == 0.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so the result is $\boxed{\frac{1}{2}}$", "0.5"),
        ("The answer is $1/2$.", r"$\frac{1}{2}$"),
        (r"\boxed{3} is wrong, so \boxed{4}", "4"),
        (r"\boxed{1}, \boxed{-2}", "1, -2"),
        (r"\boxed{2516}", "2516_8"),
        (r"\boxed{(x-1)^2}", "x^2 - 2x + 1"),
        (r"\boxed{27}", 27.0),
        ("The answer is 27.", "27"),
        (r"\boxed{72}", "She sold 48/2 = 24 more.\n#### 72"),
    ],
)
def test_equal_expressions_are_right_however_they_are_written(response, answer):
    assert math_verify(response, answer) == 1.0
