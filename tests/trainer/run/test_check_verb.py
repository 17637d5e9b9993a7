"""The verb check prints layouts and memory, and starts nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mcontroller.cli.main import main
from workers.communication.estimate import StepRows
from workers.config import ActorConfig, ModelConfig, OptimConfig
from workers.gpucheck.policy import FULL
from workers.prediction.layouts import predict_run, search_layouts
from workers.prediction.step_time import hardware_of, layer_flops

ROLE = """
model: {vocab_size: 152064, max_sequence_length: 4096, num_layers: 28, hidden_size: 3584, num_attention_heads: 28,
  num_query_groups: 4, ffn_hidden_size: 18944, dtype: bfloat16}
parallel: {tp: 4, pp: 2, sequence_parallel: true}
optim: {distributed_optimizer: true}
rollout: {prompt_length: 1024, response_length: 3072, n: 8}
"""


def test_a_role_is_printed_with_its_layout_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "actor.yaml"
    file.write_text(ROLE)
    assert main(["check", str(file), "--role", "actor_rollout_ref", "--world-size", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("actor_rollout_ref: 16 ranks, tp 4 x dp 2 x pp 2")
    train = next(line.split() for line in lines if line.split()[:2] == ["actor", "train"])
    parameters, gradients, optimizer = map(float, train[3:6])
    assert parameters == pytest.approx(7.6e9 / 8 * 2 / 2**30, rel=0.01)  # 7.6e9 parameters, 2 bytes each, on 8 ranks
    assert gradients == pytest.approx(2 * parameters, abs=0.02)
    assert optimizer == pytest.approx(3 * parameters, abs=0.02)  # 12 bytes of a parameter, on 2 data-parallel ranks
    start = next(at for at, line in enumerate(lines) if line.startswith("prediction on h100"))
    assert "this layout: tp 4 x pp 2: update" in lines[start + 1] and "bubble 6%" in lines[start + 1]
    seconds = [float(line.split(" update ")[1].split()[0]) for line in lines[start + 2 : -1]]
    assert seconds == sorted(seconds) and len(seconds) > 1 and lines[-1].split()[1:3] == ["layouts", "fit"]


def test_host_memory_and_packing_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "actor.yaml"
    file.write_text(ROLE)
    options = ["--role", "actor_rollout_ref", "--world-size", "16"]
    assert main(["check", str(file), *options]) == 0
    printed = capsys.readouterr().out
    weights = 7.6e9 / 8  # of a rank; with the reference 2 x 2 bytes, and 12 of the optimizer over dp 2
    numbers = re.search(r"process: ([\d.]+) GB offloaded \(pinned\), ([\d.]+) GB to save, ([\d.]+) GB more", printed)
    assert numbers is not None and "packed=true is recommended" in printed
    expected = [each * weights / 2**30 for each in (4 + 6, 2 * (2 + 6), 20)]
    assert list(map(float, numbers.groups())) == pytest.approx(expected, rel=0.02)
    assert main(["check", str(file), "packed=true", "optim.distributed_optimizer=null", *options]) == 0
    changed = capsys.readouterr().out
    assert "recommended" not in changed
    assert "optim.distributed_optimizer=true on a GPU: 2 ranks have the same weights" in changed


def test_the_roles_of_a_run_are_printed_without_starting_anything(capsys: pytest.CaptureFixture[str]) -> None:
    config = ["examples/ppo/config.yaml"]
    assert main(["check", *config]) == 0
    printed = capsys.readouterr().out
    assert "critic: 4 ranks" in printed and "actor_rollout_ref: 4 of 4 processes generate" in printed
    assert "GPU" not in printed.replace("0 GPUs", "") and "in a process of the stage" in printed
    assert "checkpoints: after the step that ends 10 minutes after the last (trainer.save_minutes); the" in printed
    assert main(["check", *config, "pool.use_gpu=true", "trainer.save_freq=25", "critic.ppo_mini_batch_size=100"]) == 0
    printed = capsys.readouterr().out
    assert "GB (2**30 bytes) on a GPU" in printed and "trainer.offload=never" in printed
    assert "checkpoints: every 25 steps (trainer.save_freq); the last 3 are kept (trainer.max_to_keep)" in printed
    assert "11 mini-batches of 93 or 94: ppo_mini_batch_size=100 does not divide them" in printed


def test_a_layout_that_does_not_fit_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "actor.yaml"
    file.write_text(ROLE)
    assert main(["check", str(file), "--role", "actor_rollout_ref", "--world-size", "12"]) == 1
    error = capsys.readouterr().err
    assert "LayoutError" in error and "12" in error


def test_generation_in_the_workers_is_predicted_as_it_was_measured_on_an_h100() -> None:
    config, rows = FULL.config("local"), StepRows(FULL.rows, FULL.prompt + FULL.decoded, FULL.decoded)
    predicted = predict_run(config, 1, rows, hardware_of("h100"))
    assert predicted.generate == pytest.approx(FULL.rows * FULL.decoded / 1040, rel=0.05)  # tokens/s: docs/gpu.md
    engine = replace(config, rollout=replace(config.rollout, engine="vllm"))
    assert predict_run(engine, 1, rows, hardware_of("h100")).generate < predicted.generate / 2


def test_latent_attention_is_predicted_with_its_own_weights_and_channels() -> None:
    sizes = {"vocab_size": 129_280, "num_layers": 61, "hidden_size": 7168, "ffn_hidden_size": 18_432}
    latent = {"multi_latent_attention": True, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_pos_emb_head_dim": 64}
    model = ModelConfig(**sizes, max_sequence_length=4096, num_attention_heads=128, transformer=latent)
    products, attention = layer_flops(model, 4096)
    # the attention of DeepSeek-V3: down and up for the queries, down and up for keys and values, and the output
    weights = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert products == 2 * (weights + 3 * 7168 * 18_432)
    assert attention == 4096 * 128 * (192 + 128)


def test_layouts_that_do_not_fit_are_counted_with_their_memory_or_the_reason() -> None:
    sizes = {"vocab_size": 152_064, "num_layers": 28, "hidden_size": 3584, "ffn_hidden_size": 18_944}
    model = ModelConfig(**sizes, max_sequence_length=4096, num_attention_heads=28, num_query_groups=4, dtype="bfloat16")
    settings = {"optim": OptimConfig(megatron={"use_precision_aware_optimizer": True}), "ppo_mini_batch_size": 8}
    actor, rows = ActorConfig(model=model, **settings), StepRows(8, 4096, 2048)
    hardware = hardware_of("h100")
    one = search_layouts(actor, 1, rows, hardware)
    assert (one.fitting, len(one.too_large), one.rejected) == ([], 1, [])
    needed = one.too_large[0].memory
    assert needed > 0.9 * hardware.memory
    text = one.summary(hardware)
    assert (
        f"0 layouts fit in 90% of the {hardware.memory / 2**30:.1f} GB" in text and f"{needed / 2**30:.1f} GB" in text
    )
    eight = search_layouts(actor, 8, rows, hardware)
    assert eight.fitting and "of them" not in eight.summary(hardware).replace("the least of them", "")
    none = search_layouts(replace(actor, optim=OptimConfig(optimizer="muon")), 1, rows, hardware)
    assert none.fitting == none.too_large == [] and len(none.rejected) == 1
    assert "optim.optimizer='muon'" in none.summary(hardware)
