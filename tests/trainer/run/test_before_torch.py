"""Help and mistakes of the command line before torch is imported; what Megatron prints when it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
MODEL = "{vocab_size: 32, max_sequence_length: 16, num_layers: 2, hidden_size: 64, num_attention_heads: 4}"
CASES = {
    "--help": "values that replace the file's",
    "no_such.yaml": "configuration file 'no_such.yaml' does not exist",
    "run.yaml trainer.sav_freq=1": "TrainerConfig has no field 'sav_freq' (key trainer.sav_freq); did you mean",
    "run.yaml data.train.path=rows.json": "there is no file or directory 'rows.json'",
    "run.yaml data.train.source=jsnl": "data.train.source is 'jsnl', and there is no such source of problems: did you",
    "run.yaml algorithm.adv_estimator=grop": "there is no such advantage estimator: did you mean grpo?",
    "run.yaml actor_rollout_ref.policy_loss=pppo": "there is no such policy loss: did you mean ppo?",
    "run.yaml actor_rollout_ref.model.hf_path=models/a/b": "'models/a/b' does not exist; actor_rollout_ref.model.hf",
    "run.yaml rewards.functions.mine.function=rewads.py:right": "there is no file 'rewads.py'",
}


def test_help_and_wrong_files_keys_and_values_do_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        f"data: {{train: {{path: rows.jsonl}}}}\nactor_rollout_ref: {{model: {MODEL}}}\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    program = f"""
import sys
from mcontroller.cli.main import main
for words in {list(CASES)}:
    sys.stderr.write(f"CASE {{words}}\\n")
    sys.stdout = sys.stderr
    try:
        main(["train", *words.split()])
    except SystemExit:
        pass
    loaded = [name for name in ("torch", "ray", "numpy") if name in sys.modules]
    assert not loaded, (words, loaded)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answers = done.stderr.split("CASE ")[1:]
    for answer, expected in zip(answers, CASES.values(), strict=True):
        assert expected in answer


def test_importing_megatron_and_describing_a_model_prints_nothing() -> None:
    program = """
from workers import ActorRolloutRefWorker, ModelConfig, ParallelConfig
from workers.model.transformer_config import transformer_config
transformer_config(ModelConfig(32, 16, 2, 64, 4), ParallelConfig())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
