"""Megatron-LM's own training scripts: what they need, and that ``pretrain_gpt.py`` is verified.

The latter needs a checkout of Megatron-LM in PYTHONPATH: megatron-core is without ``megatron.training``. Without one, a
small script and the parts of ``megatron.training`` that it and verify call stand in for them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from megatron.core.distributed.finalize_model_grads import finalize_model_grads

from mcontroller.cli.main import main
from parallel_state.dry_run import dry_run
from parallel_state.verify import Verifier, VerifyError
from workers.verify.megatron_script import script_program

pytestmark = pytest.mark.simulated
finalizing = sys.modules[finalize_model_grads.__module__]

TRAINING = importlib.util.find_spec("megatron.training")


@pytest.mark.skipif(TRAINING is not None, reason="megatron.training is on PYTHONPATH")
def test_a_script_needs_a_checkout_of_megatron_lm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "pretrain_of_a_team.py"
    script.write_text("from megatron.training import pretrain\n")
    assert main(["verify", str(script), "--", "--num-layers", "24"]) == 1
    message = capsys.readouterr().err
    assert "needs megatron.training, which megatron-core does not contain: put a checkout of Megatron-LM" in message


def test_a_script_that_does_not_exist_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "no_such_script.py"]) == 1
    assert capsys.readouterr().err == "mcontroller verify: VerifyError: there is no file no_such_script.py\n"


SMALL_TRAINING = {
    "__init__.py": """
from megatron.training.global_vars import get_args

def pretrain(train_valid_test_dataset_provider, model_provider, model_type, forward_step_func):
    raise RuntimeError("trains on GPUs")
""",
    "global_vars.py": """
_GLOBAL_ARGS = None
_GLOBAL_TIMERS = None

def get_args():
    return _GLOBAL_ARGS

def set_args(arguments):
    global _GLOBAL_ARGS
    _GLOBAL_ARGS = arguments
""",
    "arguments.py": """
import argparse
from megatron.core.transformer import TransformerConfig

SIZES = "num_layers hidden_size num_attention_heads ffn_hidden_size seq_length vocab_size micro_batch_size".split()
AXES = "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size".split()
FLAGS = "sequence_parallel use_distributed_optimizer calculate_per_token_loss".split()
UNUSED = {
    "num_layers_per_virtual_pipeline_stage": None, "num_virtual_stages_per_pipeline_rank": None,
    "group_query_attention": False, "num_query_groups": None, "eod_mask_loss": False,
    "create_attention_mask_in_dataloader": False, "hidden_dropout": 0.1, "attention_dropout": 0.1, "params_dtype": None,
    "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None,
}

def parse_args(extra_args_provider=None):
    parser = argparse.ArgumentParser()
    for name in SIZES + AXES:
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=None if name in SIZES else 1)
    for name in FLAGS:
        parser.add_argument("--" + name.replace("_", "-"), action="store_true")
    parser.set_defaults(**UNUSED)
    return parser.parse_args()

def validate_args(args, defaults):
    assert args.num_layers % args.pipeline_model_parallel_size == 0, "layers are not divisible into stages"
    return args

def core_transformer_config_from_args(args):
    names = SIZES[:4] + AXES + ["sequence_parallel", "hidden_dropout", "attention_dropout", "params_dtype"]
    values = {name: getattr(args, name) for name in names + ["calculate_per_token_loss", "bf16"]}
    return TransformerConfig(pipeline_dtype=args.params_dtype, normalization="RMSNorm", add_bias_linear=False, **values)
""",
}
SMALL_SCRIPT = """
from functools import partial
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.training import get_args, pretrain

def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None):
    return GPTModel(
        config, get_gpt_layer_with_transformer_engine_spec(), get_args().padded_vocab_size, get_args().seq_length,
        pre_process=pre_process, post_process=post_process, share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )

def loss(mask, losses):
    total, tokens = (losses.float() * mask).sum(), mask.sum().int()
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}

def forward_step(data_iterator, model):
    data = next(data_iterator)
    output = model(data["tokens"].to("cuda"), data["position_ids"], None, labels=data["labels"])
    return output, partial(loss, data["loss_mask"])

if __name__ == "__main__":
    pretrain(None, model_provider, "gpt", forward_step)
"""
SMALL_LINE = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 8192 --seq-length 4096"


@pytest.fixture
def small_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    for name, text in SMALL_TRAINING.items():
        (package / name).write_text(text)
    path = tmp_path / "pretrain_of_a_team.py"
    path.write_text(SMALL_SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    yield str(path)
    for name in [module for module in sys.modules if module.startswith("megatron.training")]:
        del sys.modules[name]
    delattr(sys.modules["megatron"], "training")


@pytest.mark.skipif(TRAINING is not None, reason="megatron.training is on PYTHONPATH")
def test_a_small_script_is_verified_in_the_layout_of_its_arguments(small_script: str) -> None:
    axes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
    line = f"{SMALL_LINE} --vocab-size 50000 --calculate-per-token-loss {axes}"
    program, variant = script_program(small_script, line.split())
    assert variant.text == "tp=2,pp=2,sp"
    verifier = Verifier(program, steps=1)
    assert (verifier.config.num_layers, verifier.config.hidden_size, verifier.config.hidden_dropout) == (2, 32, 0.0)
    outcome = verifier.verify(variant)
    assert outcome.equal, outcome.lines()
    with mock.patch.object(finalizing, "_allreduce_word_embedding_grads", lambda *args, **kwargs: None):
        outcome = verifier.verify(variant)
    assert "a reduction over pp is missing" in "\n".join(outcome.lines())
    for text, kind in (("x = (", SyntaxError), ("import no_such_package", ImportError)):
        Path(small_script).write_text(text)
        with pytest.raises(VerifyError) as caught:
            script_program(small_script, line.split())
        assert isinstance(caught.value.__cause__, kind)


@pytest.mark.skipif(TRAINING is not None, reason="megatron.training is on PYTHONPATH")
def test_a_dry_run_of_a_script_has_its_sizes_and_its_rows(small_script: str) -> None:
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 256"
    uses = []
    for rows in (1, 2, 3):
        line = f"{sizes} --vocab-size 1000 --micro-batch-size {rows} --calculate-per-token-loss"
        program, variant = script_program(small_script, line.split(), shrinks=False)
        (use, *_) = dry_run(program, variant).uses.values()
        uses.append(use)
    assert uses[0].weights == 1024 * 64 + 2 * (4 * 64 * 64 + 2 * 64 * 128 + 2 * 64) + 64
    assert uses[2].flops == 3 * uses[0].flops
    assert uses[2].peak - uses[1].peak == pytest.approx(uses[1].peak - uses[0].peak, rel=0.01)


SCRIPT = Path((TRAINING.origin if TRAINING else None) or "megatron/training/none").parents[2] / "pretrain_gpt.py"
without_script = pytest.mark.skipif(TRAINING is None or not SCRIPT.exists(), reason="Megatron-LM is not on PYTHONPATH")


BILLION = """
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096
    --micro-batch-size 4 --global-batch-size 32 --train-iters 100 --lr 1e-4 --bf16 --swiglu --disable-bias-linear
    --position-embedding-type rope --normalization RMSNorm --vocab-size 50000 --tokenizer-type NullTokenizer --mock-data
    --no-create-attention-mask-in-dataloader
"""
EXPERTS = "--num-experts 8 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"


@without_script
@pytest.mark.parametrize(
    ("arguments", "layout"),
    [
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel", "tp=2,pp=2,sp"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 6", "pp=2,vpp=2"),
        ("--context-parallel-size 2 --calculate-per-token-loss --use-distributed-optimizer", "cp=2,dp=2,distopt"),
        (f"--expert-model-parallel-size 2 {EXPERTS}", "ep=2"),
    ],
)
def test_a_script_is_verified_in_the_layout_of_its_arguments(arguments: str, layout: str) -> None:
    program, variant = script_program(str(SCRIPT), (BILLION + arguments).split())
    assert variant.text == layout
    outcome = Verifier(program, steps=1).verify(variant)
    assert outcome.equal, outcome.lines()


@pytest.mark.skipif(not SCRIPT.with_name("pretrain_hybrid.py").exists(), reason="no such script on PYTHONPATH")
@pytest.mark.parametrize("pattern", ["*-*-*-|*-*-*-", "M-M-M-|M-M-M-"])
def test_a_script_of_a_hybrid_model_is_verified(pattern: str) -> None:
    axes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
    line = f"{BILLION} {axes} --hybrid-layer-pattern {pattern}".replace("--num-layers 24", "")
    program, variant = script_program(str(SCRIPT.with_name("pretrain_hybrid.py")), line.split())
    assert variant.text == "tp=2,pp=2,sp"
    verifier = Verifier(program, steps=1)
    assert verifier.config.num_layers == 4
    outcome = verifier.verify(variant)
    assert outcome.equal, outcome.lines()


@without_script
def test_a_script_of_a_model_of_images_is_verified() -> None:
    axes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
    line = f"{BILLION} {axes} --img-h 336 --img-w 336 --patch-dim 14 --ckpt-format torch"
    program, variant = script_program(str(SCRIPT.with_name("pretrain_vlm.py")), line.split())
    assert variant.text == "tp=2,pp=2,sp"
    verifier = Verifier(program, steps=1)
    assert any(name.startswith("vision_model.") for name in verifier.reference.start)
    outcome = verifier.verify(variant)
    assert outcome.equal, outcome.lines()


@without_script
def test_a_dry_run_of_a_script_knows_what_ranks_that_do_not_run_broadcast() -> None:
    axes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
    program, variant = script_program(str(SCRIPT), (BILLION + axes).split(), shrinks=False)
    outcome = dry_run(program, variant.text, ranks=8)
    assert (outcome.failure, outcome.warnings, len(outcome.uses)) == ("", [], 4)


@without_script
def test_a_dry_run_of_a_script_has_as_many_ranks_as_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "outcomes.json"
    line = [str(SCRIPT), *BILLION.split(), "--use-distributed-optimizer"]
    options = ["--once", "--json", str(file), "--micro-batches", "1"]
    assert main(["dry-run", "--ranks", "4", *options, "--", *line]) == 0
    (outcome,) = json.loads(file.read_text())["outcomes"].values()
    assert (outcome["ranks"], outcome["layout"]) == (4, "distopt")
    assert main(["dry-run", "--", str(SCRIPT), "--tensor-model-parallel-size", "2"]) == 1


@without_script
def test_a_fault_of_a_script_is_found() -> None:
    program, variant = script_program(str(SCRIPT), [*BILLION.split(), "--pipeline-model-parallel-size", "2"])
    verifier = Verifier(program, steps=1)
    with mock.patch.object(finalizing, "_allreduce_word_embedding_grads", lambda *args, **kwargs: None):
        outcome = verifier.verify(variant)
    assert "a reduction over pp is missing" in str(outcome.differences[0])
