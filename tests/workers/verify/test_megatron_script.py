"""Megatron-LM's own training scripts: what they need, and that ``pretrain_gpt.py`` is verified.

The latter needs a checkout of Megatron-LM in PYTHONPATH: megatron-core is without ``megatron.training``.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from unittest import mock

import pytest
from megatron.core.distributed.finalize_model_grads import finalize_model_grads

from mcontroller.cli.main import main
from mcontroller.verify import Verifier
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


def script() -> str:
    assert TRAINING is not None and TRAINING.origin is not None
    return str(Path(TRAINING.origin).parents[2] / "pretrain_gpt.py")


BILLION = """
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096
    --micro-batch-size 4 --global-batch-size 32 --train-iters 100 --lr 1e-4 --bf16 --swiglu --disable-bias-linear
    --position-embedding-type rope --normalization RMSNorm --vocab-size 50000 --tokenizer-type NullTokenizer --mock-data
    --no-create-attention-mask-in-dataloader
"""
EXPERTS = "--num-experts 8 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"


@pytest.mark.skipif(TRAINING is None, reason="megatron.training is not on PYTHONPATH")
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
    program, variant = script_program(script(), (BILLION + arguments).split())
    assert variant.text == layout
    outcome = Verifier(program, steps=1).verify(variant)
    assert outcome.equal, outcome.lines()


@pytest.mark.skipif(TRAINING is None, reason="megatron.training is not on PYTHONPATH")
def test_a_fault_of_a_script_is_found() -> None:
    program, variant = script_program(script(), [*BILLION.split(), "--pipeline-model-parallel-size", "2"])
    verifier = Verifier(program, steps=1)
    with mock.patch.object(finalizing, "_allreduce_word_embedding_grads", lambda *args, **kwargs: None):
        outcome = verifier.verify(variant)
    assert "a reduction over pp is missing" in str(outcome.differences[0])
