"""The verb check prints layouts and memory, and starts nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from mcontroller.cli.main import main
from tests.trainer.run.test_check_run import config_file  # noqa: F401 - a fixture
from workers.config import ActorConfig, ModelConfig, RolloutConfig
from workers.layout_search import search_layouts
from workers.role_calls import Lengths

LARGE = """
model: {vocab_size: 152064, max_sequence_length: 4096, num_layers: 28, hidden_size: 3584, num_attention_heads: 28,
  num_query_groups: 4, ffn_hidden_size: 18944, dtype: bfloat16}
parallel: {tp: 4, pp: 2, sequence_parallel: true}
optim: {distributed_optimizer: true}
rollout: {prompt_length: 1024, response_length: 3072, n: 8}
"""


@pytest.mark.simulated
def test_a_role_is_printed_with_its_layout_and_memory(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    large = yaml.safe_load(config_file.read_text()) | {"actor_rollout_ref": yaml.safe_load(LARGE)}
    config_file.write_text(yaml.safe_dump(large))
    options = ["pool.use_gpu=true", "pool.process_on_nodes=[8,8]"]
    assert main(["check", str(config_file), *options]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert "actor_rollout_ref: 16 ranks, tp 4 x dp 2 x pp 2" in lines
    assert "collectives fail after actor_rollout_ref.timeout_s = 7200 s" in printed
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1 on GPUs before compute capability 10.0: with tp=4" in printed
    train = next(line.split() for line in lines if "update_actor" in line)
    parameters, gradients, optimizer = map(float, train[2:5])
    assert parameters == pytest.approx(2 * 7.6e9 / 8 * 2 / 2**30, rel=0.01)  # 7.6e9, 2 bytes each, on 8 ranks, and ref
    assert gradients == pytest.approx(parameters, abs=0.02)
    assert optimizer == pytest.approx(1.5 * parameters, abs=0.02)  # 12 bytes of a parameter, on 2 data-parallel ranks
    weights = 7.6e9 / 8  # of a rank; with the reference 2 x 2 bytes, and 12 of the optimizer over dp 2
    numbers = re.search(r"process: ([\d.]+) GB offloaded \(pinned\), ([\d.]+) GB to save, ([\d.]+) GB more", printed)
    assert numbers is not None and "packed=true is recommended" in printed
    expected = [bytes_per_weight * weights / 2**30 for bytes_per_weight in (4 + 6, 2 * (2 + 6), 20)]
    assert list(map(float, numbers.groups())) == pytest.approx(expected, rel=0.02)
    changes = ["actor_rollout_ref.packed=true", "actor_rollout_ref.optim.distributed_optimizer=null"]
    assert main(["check", str(config_file), *changes, *options]) == 0
    changed = capsys.readouterr().out
    assert "recommended" not in changed
    assert "optim.distributed_optimizer=true on a GPU: 2 ranks have the same weights" in changed


@pytest.mark.simulated
def test_the_roles_of_a_run_are_printed_without_starting_anything(capsys: pytest.CaptureFixture[str]) -> None:
    config = ["examples/ppo/config.yaml"]
    assert main(["check", *config]) == 0
    printed = capsys.readouterr().out
    assert "critic: 4 ranks" in printed and "actor_rollout_ref: 4 of 4 processes generate" in printed
    assert "GPU" not in printed.replace("0 GPUs", "") and "GB (2**30 bytes) in a process" in printed
    table = printed[printed.index("GB (2**30 bytes)") :].splitlines()
    assert len(table) > 8 and max(map(len, table)) <= 100
    changed = ["pool.use_gpu=true", "critic.ppo_mini_batch_size=100"]
    assert main(["check", *config, *changed, "--layouts"]) == 0
    printed = capsys.readouterr().out
    assert "layouts of training fit in 90% of the 80.0 GB of a GPU" in printed and "  one rank: " not in printed
    assert "  tp 2 x dp 2: " in printed
    assert "GB (2**30 bytes) on a GPU" in printed and "trainer.offload=never" in printed
    assert "NCCL's buffers are not counted" in printed
    assert "11 mini-batches of 93 or 94: ppo_mini_batch_size=100 does not divide them" in printed


@pytest.mark.simulated
def test_layouts_that_fit_come_first_that_divide_the_model_least() -> None:
    sizes = {"vocab_size": 152_064, "num_layers": 28, "hidden_size": 3584, "ffn_hidden_size": 18_944}
    model = ModelConfig(**sizes, max_sequence_length=4096, num_attention_heads=28, num_query_groups=4, dtype="bfloat16")
    actor, lengths = ActorConfig(model=model, rollout=RolloutConfig(engine="vllm")), Lengths(2048, 2048, 8)
    one = search_layouts(actor, [1], lengths, 80 * 2**30, layers="local")
    assert (one.fitting, len(one.too_large), one.rejected) == ([], 1, [])
    eight = search_layouts(actor, [8], lengths, 80 * 2**30, layers="local")
    ranks = [layout.parallel.tp * layout.parallel.pp for layout in eight.fitting]
    assert ranks == sorted(ranks) and max(layout.memory for layout in eight.fitting) <= 0.9 * 80 * 2**30
    assert {(8, 1), (4, 2)} - {(layout.parallel.tp, layout.parallel.pp) for layout in eight.fitting} == {(8, 1)}
    assert eight.rejected  # 4 query groups on 8 ranks
    nodes_of_six = search_layouts(actor, [6, 6], lengths, 80 * 2**30, layers="local")
    tried = [*nodes_of_six.fitting, *nodes_of_six.too_large]
    assert {layout.parallel.tp for layout in tried} == {1, 2}  # 4 would cross nodes, 3 and 6 do not divide 28 heads
    assert {layout.parallel.pp for layout in tried} == {1, 2, 4}
