"""Two files of shared memory are filled in turn, and another process can open the one that was filled last."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch

from workers.generate.vllm.buckets import SharedBuckets


def test_the_other_bucket_keeps_its_bytes_while_one_is_filled() -> None:
    buckets = SharedBuckets(16)
    paths = []
    for number in range(4):
        buckets.memory(8)[:8] = number
        paths.append(buckets.path)
        assert Path(buckets.path).read_bytes() == bytes([number] * 8) + bytes(8)
        if number:
            assert Path(paths[-2]).read_bytes()[:8] == bytes([number - 1] * 8)
    assert paths[:2] == paths[2:] and len(set(paths)) == 2
    buckets.close()


def test_a_bucket_grows_for_a_larger_tensor_and_keeps_its_path() -> None:
    buckets = SharedBuckets(16)
    small = buckets.memory(16)
    first = buckets.path
    buckets.memory(1)
    large = buckets.memory(100)
    assert (small.nbytes, large.nbytes, buckets.path) == (16, 100, first)
    assert large.dtype == torch.uint8 and os.stat(first).st_size == 100
    buckets.close()


def test_the_files_end_with_the_object() -> None:
    buckets = SharedBuckets(16)
    buckets.memory(1)
    path = buckets.path
    del buckets
    gc.collect()
    assert not Path(path).exists() or "weights" not in os.readlink(path)
