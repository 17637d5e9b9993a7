"""Run ``pretrain_gpt.py`` of a Megatron-LM checkout, unmodified, on a CPU.

    git clone --depth 1 -b core_v0.16.1 https://github.com/NVIDIA/Megatron-LM
    torchrun --nproc-per-node 2 -m examples.bring_your_own_megatron.pretrain_gpt Megatron-LM \
        --tensor-model-parallel-size 2

Arguments after the checkout are Megatron-LM's and follow the arguments of a tiny model with mock data. On a machine
with GPUs nothing is patched; pass ``--distributed-backend nccl`` there.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from parallel_state import cpu

TINY = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-3 --lr-decay-style constant
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 99,1,0
    --transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-rope-fusion --eval-iters 1 --eval-interval 100
    --log-interval 1
"""


def main(checkout: str, arguments: list[str]) -> None:
    """Run ``pretrain_gpt.py`` as ``python pretrain_gpt.py ARGUMENTS``.

    Args:
        checkout: a directory with Megatron-LM's sources.
        arguments: arguments of Megatron-LM that are added to ``TINY``.
    """
    script = Path(checkout).resolve() / "pretrain_gpt.py"
    if not script.is_file():
        sys.exit(f"{checkout} is not a checkout of Megatron-LM: it has no pretrain_gpt.py")
    sys.path.insert(0, str(script.parent))
    cpu.install(packages=["gpt_builders", "model_provider"])
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron-LM requires it with tensor parallelism
    sys.argv = [str(script), *TINY.split(), *arguments]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
