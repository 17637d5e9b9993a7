"""What a program's own rollout function returns: the rows of every problem, in the order of the problems."""

from __future__ import annotations

import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.errors import DataError
from tests.trainer.toy import LETTERS, experience, toy_config, toy_trainer

ORDERS = {
    "another order": (lambda rows: torch.arange(rows - 1, -1, -1), 0),
    "two rows swapped": (lambda rows: torch.tensor([0, 1, 3, 2, *range(4, rows)]), 2),
    "a row left out": (lambda rows: torch.tensor([*range(5), *range(6, rows)]), 5),
    "the last row left out": (lambda rows: torch.arange(rows - 1), 47),
    "too few rows for every problem": (lambda rows: torch.arange(rows).repeat_interleave(3)[:96], 2),
}


def different(rows):
    """Problems with different prompts, of a number and a letter."""
    ids = torch.stack((torch.arange(rows) + 100, torch.arange(rows) % LETTERS), 1)
    ones = torch.ones(2, dtype=torch.long)
    return [{"input_ids": prompt, "attention_mask": ones, "asked": int(prompt[1])} for prompt in ids]


@pytest.mark.parametrize("name", ORDERS)
def test_rows_that_are_not_those_of_their_problems_are_rejected(name):
    order, row = ORDERS[name]

    def rollout_fn(problems, generate):
        return generate(problems).select_idxs(order(len(problems)))

    with toy_trainer(toy_config(1), rollout_fn=rollout_fn, train_dataset=different(96), val_dataset=None) as trainer:
        trainer.init_workers()
        with pytest.raises(DataError) as caught:
            trainer.train_step(trainer.draw())
    assert caught.value.row == row


def test_rows_of_a_rollout_function_may_have_prompts_of_another_width():
    def rollout_fn(problems, generate):
        batch = generate(problems).repeat(2)
        wide = {name: torch.nn.functional.pad(batch.batch[name], (3, 0)) for name in ("input_ids", "attention_mask")}
        return DataProto.from_dict({**batch.tensors(), **wide}, meta_info=batch.meta_info)

    with toy_trainer(toy_config(1), rollout_fn=rollout_fn, train_dataset=different(96), val_dataset=None) as trainer:
        trainer.init_workers()
        problems = trainer.draw()
        letters = problems.batch["input_ids"][:, -1]
        batch, _, metrics = experience(trainer, problems)
    assert batch.non_tensor_batch["asked"].tolist() == letters.repeat_interleave(2).tolist()
    assert len(batch) == 96 and metrics["train/accuracy"] == pytest.approx(
        float((batch.batch["responses"].flatten() == (letters.repeat_interleave(2) + 1) % LETTERS).float().mean())
    )
