"""Tensors arrive through two buckets of shared memory, whatever their sizes and dtypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from workers.generate.vllm.buckets import BucketContent, TensorSpec, send_in_buckets


class Receiver:
    """Reads a bucket only when the sender waits for it, as late as an engine may."""

    def __init__(self) -> None:
        self.pending: list[BucketContent] = []
        self.received: dict[str, torch.Tensor] = {}
        self.sizes: list[int] = []
        self.paths: set[str] = set()

    def send(self, bucket: BucketContent) -> None:
        assert not self.pending, "sent before the last bucket was free"
        self.pending.append(bucket)

    def wait(self) -> None:
        bucket = self.pending.pop()
        self.sizes.append(len(bucket.tensors))
        self.paths.add(bucket.path)
        for name, tensor in read(bucket).items():
            assert name not in self.received
            self.received[name] = tensor


def read(bucket: BucketContent) -> dict[str, torch.Tensor]:
    with open(bucket.path, "rb") as file:
        content = file.read()

    def tensor_of(spec: TensorSpec) -> torch.Tensor:
        _, dtype, shape, first = spec
        empty = torch.empty(shape, dtype=getattr(torch, dtype))
        if empty.numel() == 0:
            return empty
        part = torch.frombuffer(bytearray(content[first : first + empty.nbytes]), dtype=empty.dtype)
        return part.view(shape)

    return {spec[0]: tensor_of(spec) for spec in bucket.tensors}


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {f"{number}": torch.randn(shape).to(dtype) for number, shape in enumerate(shapes)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 256, 1000, 1 << 20])
def test_every_tensor_arrives_unchanged(bucket_bytes: int, dtype: torch.dtype) -> None:
    weights = tensors((3, 5), (7,), (), (0, 4), (40, 10), (1,), (2, 3, 4), dtype=dtype)
    receiver = Receiver()
    assert send_in_buckets(weights.items(), bucket_bytes, receiver.send, receiver.wait) == sum(
        tensor.nbytes for tensor in weights.values()
    )
    assert not receiver.pending and receiver.received.keys() == weights.keys()
    assert all(torch.equal(receiver.received[name], weights[name]) for name in weights)
    assert len(receiver.paths) <= 2


def test_a_bucket_holds_no_more_than_its_size_or_one_tensor() -> None:
    weights = tensors(*[(16,)] * 10, (1000,), (16,))  # 64 bytes each, and one of 4000
    receiver = Receiver()
    send_in_buckets(weights.items(), 256, receiver.send, receiver.wait)
    assert receiver.sizes == [4, 4, 2, 1, 1]


def test_a_tensor_that_the_source_reuses_is_copied_before_the_next_one() -> None:
    """As ``PolicyWeights`` yields tensors that share memory with the model."""
    shared = torch.zeros(8)
    receiver = Receiver()
    send_in_buckets(((str(n), shared.fill_(n)) for n in range(5)), 64, receiver.send, receiver.wait)
    assert [tensor[0].item() for tensor in receiver.received.values()] == [0, 1, 2, 3, 4]


def test_transposed_tensors_arrive_in_their_own_order() -> None:
    weights = {"t": torch.arange(6.0).view(2, 3).t()}
    receiver = Receiver()
    send_in_buckets(weights.items(), 64, receiver.send, receiver.wait)
    assert torch.equal(receiver.received["t"], weights["t"])


@pytest.mark.parametrize("fails", ["send", "wait"])
def test_a_failure_of_the_engine_ends_the_update(fails: str) -> None:
    def failing() -> None:
        raise TimeoutError("the engine")

    send: Callable[[BucketContent], None] = (lambda bucket: failing()) if fails == "send" else (lambda bucket: None)
    with pytest.raises(TimeoutError):
        send_in_buckets(tensors((4,), (4,), (4,)).items(), 16, send, failing)
