"""The verbs of a run as a user types them: a Hugging Face model, a JSONL file and a reward function in a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

pytest.importorskip("transformers", reason="the extra hf: no transformers")
ROOT = Path(__file__).parents[3]
LETTERS = "0123456789+=u "
VERBS = """
import sys
from mcontroller.cli.main import main
small = ["trainer.total_training_steps=1", "data.train_batch_size=4"]
verbs = [
    ["train", "run.yaml", "run_dir=out", *small],
    ["resume", "out", "trainer.total_training_steps=2"],
    ["export", "out", "--hf", "trained"],
    ["convert", "trained", "megatron", "--tp", "2"],
    ["convert", "megatron", "again", "--like", "trained"],
]
sys.exit(max(main(verb) for verb in verbs))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of the page on training, for a tiny model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {text: index for index, text in enumerate(["<eos>", "<unk>", *LETTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }}={% endfor %}"
    tokenizer.save_pretrained(tmp_path / "Qwen/Qwen3-0.6B")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tiny = LlamaConfig(vocab_size=len(vocabulary), num_key_value_heads=2, max_position_embeddings=1024, **sizes)
    LlamaForCausalLM(tiny).save_pretrained(tmp_path / "Qwen/Qwen3-0.6B")
    rows = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = (ROOT / "docs/training.md").read_text().split("## Train on your own data")[1]
    block = section.split("```bash\n")[1].split("```")[0]
    assert len(block.strip().splitlines()) <= 15
    for name, text in re.findall(r"cat > (\S+) <<'END'\n(.*?)END\n", block, re.S):
        on_cpu = text.replace("use_gpu: true", "use_gpu: false")
        (tmp_path / name).write_text(on_cpu.replace("response_length: 512", "response_length: 4"))
    return tmp_path


@pytest.mark.timeout(300)
def test_a_run_from_the_readme_is_trained_resumed_exported_and_converted(folder):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", VERBS], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    from safetensors.torch import load_file

    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["global_step"] for line in lines if "train/right" in line] == [1, 2]
    samples = [json.loads(line) for line in (folder / "out" / "samples.jsonl").read_text().splitlines()]
    assert {sample["global_step"] for sample in samples} == {1, 2} and samples[0]["prompt"].startswith("u ")
    assert "data.train: 64 prompts" in done.stdout and "step 2 of out is in" in done.stdout
    assert "policy_loss=ppo: loss_agg_mode=token-mean, clip_ratio_low=0.2, clip_ratio_high=0.2" in done.stdout
    trained, again = (load_file(folder / name / "model.safetensors") for name in ("trained", "again"))
    assert trained.keys() == again.keys()
    assert all(bool((trained[name] == again[name]).all()) for name in trained)
    assert (folder / "trained" / "tokenizer.json").is_file()


REPLAY = """
import sys
from mcontroller.cli.main import main
ahead = ["rollout=${actor_rollout_ref}", "trainer.max_staleness=2", "trainer.asynchronous.slice_tokens=2"]
small = ["trainer.total_training_steps=3", "data.train_batch_size=4", "algorithm.importance.level=token"]
verbs = [
    ["train", "run.yaml", "run_dir=out", *ahead, *small],
    ["train", "--replay", "out"],
    ["export", "out", "--hf", "trained"],
    ["export", "out-replay", "--hf", "again"],
]
sys.exit(max(main(verb) for verb in verbs))
"""


@pytest.mark.timeout(300)
def test_an_asynchronous_run_is_replayed_to_the_same_weights(folder):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", REPLAY], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    from safetensors.torch import load_file

    trained, again = (load_file(folder / name / "model.safetensors") for name in ("trained", "again"))
    assert trained.keys() == again.keys() and all(trained[name].equal(again[name]) for name in trained)
    assert "the trainer waited" in done.stdout
    recorded, repeated = (
        (folder / name / "checkpoints" / "events.jsonl").read_bytes() for name in ("out", "out-replay")
    )
    assert recorded.startswith(repeated) and repeated.count(b'"taken"') == 3
