"""A harmless mistake does not cost the trained model: the call is rejected, and the next one works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller.errors import CallRejected
from mcontroller.testing import simulated_worker_group
from parallel_state import ParallelLayout
from tests.workers.roles import GREEDY, MODEL, OPTIM, PROMPT, RESPONSE, experience, prompts
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config


def padded_on_the_right() -> Any:
    batch = prompts(4, GREEDY)
    batch.batch["attention_mask"][0] = torch.arange(PROMPT) < 1
    return batch


def test_a_group_is_usable_after_mistakes(tmp_path: Path) -> None:
    settings = {
        "model": MODEL,
        "parallel": {"tp": 2},
        "optim": OPTIM,
        "rollout": {"prompt_length": PROMPT, "response_length": RESPONSE},
        "ppo_mini_batch_size": 4,
        "ppo_micro_batch_size": 2,
    }
    config = load_config(ActorConfig, settings)
    group = simulated_worker_group(ActorRolloutRefWorker, ParallelLayout(4, tp=2), config, name="actor")
    with pytest.raises(CallRejected) as caught:
        group.compute_log_prob(experience(4))
    assert (caught.value.role, caught.value.rank) == ("actor", 0)
    group.init_model()
    group.update_actor(experience(4))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("not a model")
    without_eos = prompts(4, {name: value for name, value in GREEDY.items() if name != "eos_token_id"})
    without_column = experience(4).select(["input_ids", "attention_mask"])
    mistakes = [
        ("export_hf", "model", lambda: group.export_hf(str(tmp_path / "model"))),
        ("load_checkpoint", "nowhere", lambda: group.load_checkpoint(str(tmp_path / "nowhere"))),
        ("generate_sequences", "eos_token_id", lambda: group.generate_sequences(without_eos)),
        ("generate_sequences", "padded", lambda: group.generate_sequences(padded_on_the_right())),
        ("compute_log_prob", "responses", lambda: group.compute_log_prob(without_column)),
        ("update_actor", "responses", lambda: group.update_actor(without_column)),
        ("save_checkpoint", "max_to_keep", lambda: group.save_checkpoint(str(tmp_path / "run"), 1, 0)),
    ]
    for method, named, mistake in mistakes:
        with pytest.raises(CallRejected) as caught:
            mistake()
        assert caught.value.method == method and named in caught.value.cause
    group.save_checkpoint(str(tmp_path / "run"), 1)
    with pytest.raises(CallRejected) as caught:
        group.save_checkpoint(str(tmp_path / "run" / "global_step_1" / "manifest.json"), 2)
    assert (caught.value.role, caught.value.rank) == ("actor", 0)
    assert group.load_checkpoint(str(tmp_path / "run")) == [1] * 4
    assert len(group.generate_sequences(prompts(4, GREEDY))) == 4
