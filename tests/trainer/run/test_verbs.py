"""The verbs of a run as a user types them: a Hugging Face model, a JSONL file and a reward function in a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import yaml

pytestmark = pytest.mark.processes

pytest.importorskip("transformers", reason="the extra hf: no transformers")
ROOT = Path(__file__).parents[3]
LETTERS = "0123456789+=u "
VERBS = """
import sys
from pathlib import Path
import ray
from mcontroller.cli.main import main
small = ["trainer.total_training_steps=1", "data.train_batch_size=4", "cluster.address=" + sys.argv[1]]
settings = ["model.lora={rank: 2, alpha: 4}", "entropy_coeff=1", "optim.lr=0.01"]
small.append("tokenizer.path=other")
lora = [f"actor_rollout_ref.{setting}" for setting in settings]
statuses = [
    main(["train", "run.yaml", "run_dir=out", *small, *lora]),
    main(["resume", "out", "trainer.total_training_steps=2"]),
]
ray.init(sys.argv[1], log_to_driver=False)
statuses += [
    main(["export", "out", "--hf", "trained"]),
    main(["export", "out", "--hf", "adapter", "--adapter"]),
    main(["convert", "trained", "megatron", "--tp", "2"]),
]
Path("out/checkpoints/actor/global_step_2/manifest.json").unlink()
statuses.append(main(["export", "out", "--hf", "before"]))
sys.exit(max(statuses))
"""
# In a process of its own: it starts Ray, which forks, and in a process with threads a fork may wait for a lock forever.
CONVERT = """
import sys
from mcontroller.cli.main import main
sys.exit(main(["convert", "megatron", "again", "--like", "trained"]))
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_CACHE": "hub", "HF_HUB_OFFLINE": "1"}
SNAPSHOT = Path("hub/models--Qwen--Qwen3-0.6B/snapshots") / COMMIT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of the page on training, and a hub's cache with a tiny model in place of the page's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {text: index for index, text in enumerate(["<eos>", "<unk>", *LETTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }}={% endfor %}"
    tokenizer.save_pretrained(tmp_path / SNAPSHOT)
    tokenizer.chat_template += "{# of another tokenizer #}"
    tokenizer.save_pretrained(tmp_path / "other")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tiny = LlamaConfig(vocab_size=len(vocabulary), num_key_value_heads=2, max_position_embeddings=1024, **sizes)
    LlamaForCausalLM(tiny).save_pretrained(tmp_path / SNAPSHOT)
    (tmp_path / "hub/models--Qwen--Qwen3-0.6B/refs").mkdir()
    (tmp_path / "hub/models--Qwen--Qwen3-0.6B/refs/main").write_text(COMMIT)
    rows = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = (ROOT / "docs/training.md").read_text().split("## Train on your own data")[1]
    block = section.split("```bash\n")[1].split("```")[0]
    assert len(block.strip().splitlines()) <= 15
    for name, text in re.findall(r"cat > (\S+) <<'END'\n(.*?)END\n", block, re.S):
        on_cpu = text.replace("use_gpu: true", "use_gpu: false")
        (tmp_path / name).write_text(on_cpu.replace("response_length: 512", "response_length: 4"))
    return tmp_path


def shards(run: Path, step: int = 2) -> dict[str, str]:
    """Return the SHA-256 of what the last checkpoint of the actor has in its shards."""
    directory = run / "checkpoints" / "actor" / f"global_step_{step}"
    files = json.loads((directory / "manifest.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".distcp")}


def run_verbs(folder: Path, program: str) -> str:
    """Run a program without a network, with the address of the tests' Ray, and return what it prints."""
    command = [sys.executable, "-c", program, ray.get_runtime_context().gcs_address]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_a_run_from_the_readme_is_trained_resumed_exported_and_converted(folder, ray_cluster):
    printed = run_verbs(folder, VERBS)
    run_verbs(folder, CONVERT)
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["global_step"] for line in lines if "train/right" in line] == [1, 2]
    samples = [json.loads(line) for line in (folder / "out" / "samples.jsonl").read_text().splitlines()]
    assert {sample["global_step"] for sample in samples} == {1, 2} and samples[0]["prompt"].startswith("u ")
    assert "data.train: 64 prompts" in printed and "step 2 of out is in" in printed
    assert "policy_loss=ppo: loss_agg_mode=token-mean, clip_ratio_low=0.2, clip_ratio_high=0.2" in printed
    base, trained, again = (load_file(folder / name / "model.safetensors") for name in (SNAPSHOT, "trained", "again"))
    assert trained.keys() == again.keys()
    assert all(bool((trained[name] == again[name]).all()) for name in trained)
    before = load_file(folder / "before" / "model.safetensors")
    assert "step 1 of out is in" in printed and any(bool((before[name] != trained[name]).any()) for name in trained)
    assert not (folder / "adapter" / "tokenizer.json").exists()
    template = AutoTokenizer.from_pretrained(folder / "trained").chat_template
    assert template == AutoTokenizer.from_pretrained(folder / "other").chat_template
    assert template != AutoTokenizer.from_pretrained(folder / SNAPSHOT).chat_template
    factors = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert len(factors) == 2 * 2 * 7  # A and B of each linear layer
    for name, b in factors.items():
        if ".lora_B." in name:
            weight = name.removeprefix("base_model.model.").replace("lora_B.", "")
            change = 4 / 2 * b @ factors[name.replace("lora_B", "lora_A")]
            assert change.abs().max() > 1e-4 and (base[weight] + change - trained[weight]).abs().max() < 1e-6
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (2, 4)
    assert settings["base_model_name_or_path"] == str(folder / SNAPSHOT)
    # The record of the run names the revision, so that it is the one that a resumed run and an export read.
    config = yaml.safe_load((folder / "out" / "config.yaml").read_text())
    assert config["actor_rollout_ref"]["model"]["hf_path"] == str(folder / SNAPSHOT)
    assert (config["trainer"]["total_training_steps"], config["trainer"]["resume"]) == (2, False)


REPLAY = """
import sys
from mcontroller.cli.main import main
ahead = ["rollout=${actor_rollout_ref}", "trainer.max_staleness=2"]
small = ["trainer.total_training_steps=4", "data.train_batch_size=4", "algorithm.importance.level=token"]
small += ["trainer.save_freq=1", "trainer.max_to_keep=2", "cluster.address=" + sys.argv[1]]
verbs = [
    ["train", "run.yaml", "run_dir=out", *ahead, *small],
    ["train", "--replay", "out"],
]
sys.exit(max(main(verb) for verb in verbs))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_asynchronous_run_is_replayed_from_its_oldest_checkpoint_to_the_same_weights(folder, ray_cluster):
    printed = run_verbs(folder, REPLAY)
    assert shards(folder / "out", 4) == shards(folder / "out-replay", 4) != {}
    assert "the trainer waited" in printed
    assert not (folder / "out" / "checkpoints" / "trajectories" / "00000000.npz").exists()
    lines = [json.loads(line) for line in (folder / "out-replay" / "metrics.jsonl").read_text().splitlines()]
    assert {line["global_step"] for line in lines if "train/right" in line} == {4}
