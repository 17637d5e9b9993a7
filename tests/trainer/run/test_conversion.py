"""The layout of the processes that convert and export."""

from __future__ import annotations

import argparse

from tests.workers.weights.test_hf_fields import QWEN_3_CODER, read
from trainer.run.convert_verb import add_layout_arguments, layout_of_arguments
from workers.config.fit import check_fit


def test_a_model_with_experts_is_converted_under_tensor_parallelism(tmp_path) -> None:
    parser = argparse.ArgumentParser()
    add_layout_arguments(parser)
    parallel, world_size = layout_of_arguments(parser.parse_args(["--tp", "2", "--ep", "4"]))
    check_fit(read(tmp_path, QWEN_3_CODER), parallel)  # without sequence parallelism it is rejected
    assert (parallel.tp, parallel.ep, parallel.sequence_parallel, world_size) == (2, 4, True, 8)
