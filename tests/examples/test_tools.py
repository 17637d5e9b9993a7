"""The example with a calculator: what it calculates and rejects, and what its responses are made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest

from examples.tools.arithmetic import CalculationError, calculate
from examples.tools.calculator import Calculator, characters_with_calls, one_token, output_of, score
from mcontroller.errors import ConfigError
from mcontroller.ray.resource_pool import ResourcePoolManager
from mcontroller.testing import SimulatedGroupMaker
from trainer import Callback, RayPPOTrainer, TokenizerSource, Trajectory
from trainer.run.config import read_run_config
from trainer.run.parts import make_parts

QUESTION = "Compute: 7 - 4 + 9 ="
TOKENIZER = characters_with_calls(
    TokenizerSource(None, lambda: ([QUESTION, "Compute: 1 - 2 ="], ["12", "-1", "035678"]))
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7 - 4 + 9", Fraction(12)),
        (" 2*(3+4) ", Fraction(14)),
        ("-3 - -5", Fraction(2)),
        ("1/3 + 1/6", Fraction(1, 2)),
        ("0.1 + 0.2", Fraction(3, 10)),
    ],
)
def test_the_value_of_an_expression_is_exact(text, value):
    assert calculate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "1 / (2 - 2)",
        "7 -",
        "",
        "007 + 1",
        "9 ** 9 ** 9",
        "1 << 99",
        "True + 1",
        "1j * 1j",
        "1e999",
        "'a' * 3",
        "__import__('os')",
        "[1][0]",
        "(" * 60 + "1" + ")" * 60,
        "1 + " * 40 + "1",
        "1; 2",
        "\x00",
    ],
)
def test_what_is_no_calculation_is_an_error_and_nothing_is_executed(text):
    with pytest.raises(CalculationError):
        calculate(text)


def replies(*turns: str) -> list[str]:
    outputs = []
    for turn in turns:
        tokens = [token for part in re.split(r"([<>])", turn) for token in TOKENIZER.encode(part)]
        outputs.append(TOKENIZER.decode(output_of(tokens, TOKENIZER)))
    return outputs


def test_the_calculator_answers_every_call_and_every_mistake():
    assert replies("<7 - 4 + 9>", "3<1 - 2>", "<<7 + 1>") == ["12;", "-1;", "8;"]
    assert replies("7 - 4>", "<>", "< - >", "<7 - >", ">") == ["error;"] * 5


def test_a_value_that_the_tokenizer_cannot_write_is_an_error():
    tokenizer = characters_with_calls(TokenizerSource(None, lambda: (["1 / 2 =", "4 / 2 ="], [])))
    outputs = [output_of(tokenizer.encode(text), tokenizer) for text in ("<4 / 2>", "<1 / 2>")]
    assert [tokenizer.decode(output) for output in outputs] == ["2;", "error;"]


def test_a_demonstration_is_trained_on_except_for_the_output():
    shown = Calculator(3).demonstrate({"prompt": QUESTION, "answer": "12"}, TOKENIZER)
    assert TOKENIZER.decode(shown.tokens) == "<7 - 4 + 9>12;12"
    assert shown.mask == [1] * 7 + [0] * 3 + [1] * 2


def test_marks_of_several_tokens_are_rejected():
    class Pairs(type(TOKENIZER)):
        def encode(self, text):
            return [1, 2]

    with pytest.raises(ConfigError):
        one_token(Pairs("", []), "<")


def test_the_answer_is_what_follows_the_last_output():
    entry = {"answer": "12", "metadata": {"source_dataset": "chain_sum"}}
    assert score("<7 + 5>12;12", entry) == {"score": 1.0, "accuracy": 1.0, "calls": 1.0}
    assert score("<7 + 5>12;", entry)["accuracy"] == 0.0


class FailsSometimes(Calculator):
    async def __call__(self, rollout: Any, problem: Mapping[str, Any]) -> Trajectory:
        if rollout.seed % 3 == 0:
            raise ValueError("no calculator")
        return await super().__call__(rollout, problem)


@pytest.mark.parametrize("fails", [False, True])
def test_the_example_trains_on_its_own_tokens_alone(
    simulated_group: SimulatedGroupMaker, tmp_path, fails: bool
) -> None:
    """The configuration of the example with fewer steps, on one simulated rank."""
    changes = ["actor_rollout_ref.ppo_mini_batch_size=16", "actor_rollout_ref.optim.lr=1e-2"]
    changes += ["trainer.total_training_steps=2", "warm_up.steps=2", "trainer.test_freq=-1", "warm_up.batch_size=64"]
    changes += [f"multi_turn.episode={__name__}:FailsSometimes"] if fails else []
    config = read_run_config("examples/tools/config.yaml", [*changes, "data.train_batch_size=8"]).within(tmp_path)
    parts, batches, updates, steps = make_parts(config), [], [], []

    class Steps(Callback):
        def step_ended(self, trainer: Any, metrics: dict[str, float]) -> None:
            steps.append(metrics)

    def lengths(batch: Any) -> list[float]:
        return [float(len(sample["response"])) for sample in parts.rewards.samples(batch)]

    trainer = RayPPOTrainer(
        config,
        parts.tokenizer,
        parts.roles,
        ResourcePoolManager({"pool": [1]}, dict.fromkeys(parts.roles, "pool"), use_gpu=False),
        lambda pool, init, name_prefix: simulated_group(init, 1),
        lengths,
        train_dataset=parts.train,
        warm_up_dataset=parts.warm_up,
        rollout_fn=parts.rollout_fn,
        callbacks=[Steps()],
    )
    update = trainer.step.update

    def watched(batch: Any, step: int) -> dict[str, float]:
        batches.append(batch.slice().get())
        updates.append(update(batch, step))
        return updates[-1]

    trainer.step.update = watched  # type: ignore[method-assign]
    with trainer:
        trainer.init_workers()
        trainer.fit()
    assert len(batches) == len(steps) == 2 and all(step["actor/grad_norm"] > 0 for step in steps)
    mismatch = "training/rollout_probs_diff_max"  # of the policy before the update, which makes four optimizer steps
    assert all(step[mismatch] < 1e-4 < update[mismatch] for step, update in zip(steps, updates, strict=True))
    calls = 0
    for batch in batches:
        inside = batch.batch["attention_mask"][:, -16:]
        columns = (batch.batch["responses"], batch.batch["response_mask"], inside)
        for tokens, sampled, kept in zip(*(column.tolist() for column in columns), strict=True):
            turn: list[int] = []
            holes = [at for at, mine in enumerate(sampled) if kept[at] and not mine]
            while holes:
                turn = tokens[: holes[0]]
                expected = output_of(turn, parts.tokenizer)
                assert tokens[holes[0] : holes[0] + len(expected)] == expected
                holes, calls = holes[len(expected) :], calls + 1
    assert calls > 0
    if fails:
        for batch, step in zip(batches, steps, strict=True):
            failed = batch.batch["failed"]
            assert 0 < int(failed.sum()) == step["episodes/failed"] == step["episodes/raised"]
            assert step["train/unscored"] == pytest.approx(float(failed.double().mean()))
            assert not batch.batch["response_mask"][failed].any() and not batch.batch["advantages"][failed].any()
