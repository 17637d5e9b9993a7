"""Rollout loops that write prompts of their own, or responses of other widths, under dynamic sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from tests.trainer.sliced import SlicedActor, sliced_config
from tests.trainer.toy import problems, toy_trainer
from trainer import Callback, FilterGroupsConfig, Role, Trajectory
from trainer.columns import of_equal_width
from trainer.rollout.episodes import Episodes
from workers.columns import ROUTED_EXPERTS

PAD = 9


async def longer_prompts(rollout: Any, problem: Mapping[str, Any]) -> Trajectory:
    """A prompt that is longer in every batch of problems."""
    prompt = [problem["row"] % 5] * (problem["uid"] // 8) + list(problem["prompt_ids"])
    return await rollout.submit(Trajectory(prompt))


class Actor(SlicedActor):
    """Takes prompts of up to 8 tokens; those of the data set have one."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generation_limits(self) -> dict[str, int]:
        return super().generation_limits() | {"prompt_length": 8}


class Batches(Callback):
    def __init__(self) -> None:
        self.batches: list[DataProto] = []

    def batch_ready(self, trainer: Any, batch: DataProto) -> None:
        self.batches.append(batch)


def test_a_step_draws_again_for_prompts_that_an_episode_writes(tmp_path: Path) -> None:
    """Only one problem of a batch has responses with other scores, so that a step draws as often as it may."""
    config, made = sliced_config(2, tmp_path), Batches()
    rule = dataclasses.replace(config.algorithm, filter_groups=FilterGroupsConfig(enable=True, max_batches=3))
    rows = [{**problem, "row": row} for row, problem in enumerate(problems(48))]
    lines: list[dict[str, float]] = []
    tracker = type("Lines", (), {"log": lambda self, metrics, *_: lines.append(dict(metrics)), "close": print})()
    tracker.log_samples = lambda *_: None
    trainer = toy_trainer(
        dataclasses.replace(config, algorithm=rule),
        {Role.Actor: Actor, Role.Rollout: Actor},
        train_dataset=rows,
        val_dataset=None,
        reward_fn=lambda batch: [float(row % 16 == 1) for row in range(len(batch))],
        callbacks=[made],
        trackers=[tracker],
        rollout_fn=Episodes(longer_prompts, processes=0),
    )
    trainer.init_workers()
    trainer.fit()
    assert [line["dynamic_sampling/batches"] for line in lines] == [3.0, 3.0]
    for batch in made.batches:
        ids, mask, others = batch.batch["input_ids"], batch.batch["attention_mask"], batch.non_tensor_batch
        start = ids.shape[1] - batch.batch["responses"].shape[1]
        prompts = [row[kept == 1].tolist() for row, kept in zip(ids[:, :start], mask[:, :start], strict=True)]
        expected = [
            [number % 5] * (uid // 8) + rows[number]["input_ids"].tolist()
            for uid, number in zip(others["uid"], others["row"], strict=True)
        ]
        assert prompts == expected and len({*map(len, prompts)}) > 1


def test_batches_of_other_widths_are_padded_to_the_widest() -> None:
    def batch(prompt: int, response: int) -> DataProto:
        ids = torch.arange(1, prompt + response + 1).repeat(2, 1)
        columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": ids - 1}
        columns |= {"prompts": ids[:, :prompt], "responses": ids[:, prompt:], ROUTED_EXPERTS: ids[..., None, None]}
        columns |= {
            "response_mask": torch.ones(2, response),
            "token_versions": torch.ones(2, response),
            "truncated": ids[:, 0] > 0,
        }
        return DataProto.from_dict(columns)

    one, other = of_equal_width([batch(1, 3), batch(3, 1)], PAD)
    joined = DataProto.concat([one, other]).batch
    assert joined["input_ids"][::2].tolist() == [[PAD, PAD, 1, 2, 3, 4], [1, 2, 3, 4, PAD, PAD]]
    assert joined["attention_mask"][::2].tolist() == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert joined["prompts"][::2].tolist() == [[PAD, PAD, 1], [1, 2, 3]]
    assert joined["responses"][::2].tolist() == [[2, 3, 4], [4, PAD, PAD]]
    assert joined["response_mask"][::2].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert joined["token_versions"][::2].tolist() == [[1, 1, 1], [1, -1, -1]]
    assert joined[ROUTED_EXPERTS][::2, :, 0, 0].tolist() == [[-1, -1, 1, 2, 3, 4], [1, 2, 3, 4, -1, -1]]
    assert joined["truncated"].tolist() == [True] * 4
