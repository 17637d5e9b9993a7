"""Several data sets in one run: mixtures, passes, and evaluations with a sampling of their own."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError
from tests.trainer.sliced import sliced_config, sliced_trainer
from tests.trainer.toy import ToyActor, ToyCritic, problems, toy_config, toy_trainer
from trainer import BatchStream, FilterGroupsConfig, KLControlConfig, Role, ValidationConfig
from trainer.data.config import DatasetConfig, EvaluationConfig, MixedDatasetConfig, ProblemsConfig
from trainer.data.stream import Mixture, collate
from trainer.validation import Evaluation


def named(name: str, count: int) -> list[dict[str, Any]]:
    return [{"x": torch.tensor(number), "name": f"{name}{number}"} for number in range(count)]


def names_of(stream: BatchStream, batches: range) -> list[str]:
    return [name for index in batches for name in stream[index].non_tensor_batch["name"]]


@pytest.mark.parametrize(("weights", "shares"), [({"a": 3.0, "b": 1.0}, (0.75, 0.25)), ({}, (10 / 14, 4 / 14))])
def test_the_rows_of_a_mixture_have_the_ratio_of_its_weights(
    weights: dict[str, float], shares: tuple[float, ...]
) -> None:
    mixture = Mixture({"a": named("a", 10), "b": named("b", 4)}, weights)
    names = names_of(BatchStream(mixture, 4, seed=3), range(20))
    for end in range(1, 81):
        counts = Counter(name[0] for name in names[:end])
        assert abs(counts["a"] - shares[0] * end) <= 1 and abs(counts["b"] - shares[1] * end) <= 1
    for name, size in (("a", 10), ("b", 4)):
        of_set = [row for row in names if row[0] == name]
        passes = [of_set[start : start + size] for start in range(0, len(of_set) - size + 1, size)]
        assert all(len(set(rows)) == size for rows in passes) and len({tuple(rows) for rows in passes}) > 1


def test_a_mixture_resumes_with_another_batch_size_at_its_next_row() -> None:
    mixture = Mixture({"a": named("a", 10), "b": named("b", 4)}, {"a": 1.0, "b": 1.0})
    whole, first, second = (BatchStream(mixture, size, seed=3) for size in (6, 6, 4))
    second.resume(3, first.position(3))
    assert names_of(first, range(3)) + names_of(second, range(3, 9)) == names_of(whole, range(7))
    assert [mixture[index]["name"] for index in (0, 9, 10, 13)] == ["a0", "a9", "b0", "b3"]


@pytest.mark.parametrize(("rows", "epochs", "steps"), [(96, 1, 2), (100, 2, 4), (96, 3, 6)])
def test_a_run_ends_after_its_epochs(rows: int, epochs: int, steps: int) -> None:
    """Of 100 rows, a pass has two batches of 48, and leaves 4 rows out."""
    trainer = toy_trainer(toy_config(1, epochs=epochs), train_dataset=problems(rows), val_dataset=None)
    with trainer:
        trainer.init_workers()
        trainer.fit()
        assert trainer.global_steps == trainer.total_steps == steps


def test_epochs_need_a_draw_that_reads_the_data() -> None:
    config = toy_config(1, epochs=2)
    with toy_trainer(config, val_dataset=None) as trainer:
        trainer.init_workers()
        trainer.draw = lambda: collate(problems(48))  # type: ignore[method-assign]
        with pytest.raises(ConfigError) as caught:
            trainer.fit()
        assert (caught.value.key, caught.value.value) == ("trainer.epochs", 2)


@pytest.mark.parametrize("staleness", [2, 3])
def test_an_asynchronous_run_trains_on_the_rows_of_its_epochs(tmp_path: Path, staleness: int) -> None:
    trainer, _ = sliced_trainer(sliced_config(1, tmp_path, staleness, {"epochs": 2}))
    trainer.fit()
    assert trainer.global_steps == 2 * 48 // 8


def test_epochs_count_all_that_dynamic_sampling_reads() -> None:
    config = toy_config(1, epochs=4)
    rule = dataclasses.replace(config.algorithm, filter_groups=FilterGroupsConfig(enable=True, max_batches=2))
    rule = dataclasses.replace(rule, adv_estimator="rloo", kl_ctrl=KLControlConfig())

    class Twice(ToyActor):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
        def generate_sequences(self, prompts: DataProto) -> DataProto:
            prompts.meta_info.setdefault("n", 2)
            return super().generate_sequences(prompts)

    with toy_trainer(
        dataclasses.replace(config, algorithm=rule, critic=None),
        {Role.ActorRolloutRef: Twice},
        reward_fn=lambda batch: [1.0] * len(batch),
        val_dataset=None,
    ) as trainer:
        trainer.init_workers()
        trainer.fit()
        assert (trainer.global_steps, trainer.problems.count) == (4, 8)


def test_evaluations_have_their_own_problems_length_and_sampling() -> None:
    calls: list[tuple[int, Any, Any, Any]] = []

    class Actor(ToyActor):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
        def generate_sequences(self, prompts: DataProto) -> DataProto:
            meta = prompts.meta_info
            calls.append((len(prompts), meta.get("n"), meta["do_sample"], meta.get("response_length")))
            return super().generate_sequences(prompts)

    sampled = ValidationConfig(n=40, do_sample=True, response_length=7)
    evaluations = {
        "short": Evaluation(problems(3), ValidationConfig(response_length=5)),
        "many": Evaluation(problems(5), sampled),
    }
    roles = {Role.ActorRolloutRef: Actor, Role.Critic: ToyCritic}
    with toy_trainer(toy_config(0), roles, val_dataset=problems(2), evaluations=evaluations) as trainer:
        trainer.init_workers()
        metrics = trainer.validate()
    assert calls == [(2, 1, False, None), (3, 1, False, 5), (5, 40, True, 7)]
    assert metrics["held_out/many/mean_at_40"] == metrics["held_out/many/score"]
    assert metrics["held_out/many/best_at_40"] == 1.0
    assert {"held_out/score", "held_out/short/score"} <= metrics.keys() and "held_out/short/best_at_40" not in metrics


def test_the_sections_of_several_data_sets_are_checked() -> None:
    many = EvaluationConfig("a.jsonl", n=4, do_sample=True, response_length=9)
    sampled = ValidationConfig(n=2, do_sample=True, temperature=0.6)
    assert many.sampling(sampled, "data.evaluations.a") == ValidationConfig(4, True, 0.6, response_length=9)
    assert EvaluationConfig("a.jsonl", do_sample=False).sampling(sampled, "data.evaluations.a") == ValidationConfig()
    for make, key in (
        (
            lambda: EvaluationConfig("a.jsonl", n=4).sampling(ValidationConfig(), "data.evaluations.a"),
            "data.evaluations.a.n",
        ),
        (lambda: MixedDatasetConfig("a.jsonl", weight=0.0), "weight"),
        (lambda: ProblemsConfig(train=DatasetConfig("a"), mixture={"b": MixedDatasetConfig("b")}), "data.mixture"),
        (lambda: ProblemsConfig(evaluations={"a/b": EvaluationConfig("a")}), "data.evaluations"),
        (lambda: DatasetConfig([]), "path"),
        (lambda: DatasetConfig(["a.jsonl", 3]), "path"),
        (lambda: ValidationConfig(response_length=0), "validation.response_length"),
    ):
        with pytest.raises(ConfigError) as raised:
            make()
        assert raised.value.key == key
