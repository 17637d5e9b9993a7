from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray
import torch
from tensordict import TensorDict

from mcontroller.data.batch import DataProto
from mcontroller.errors import DataError
from mcontroller.local import LocalWorkerGroup
from mcontroller.ray import RayWorkerGroup
from mcontroller.ray.values.wire import IN_BAND_BYTES, pack
from mcontroller.transport import Arguments
from mcontroller.worker import ClassWithInitArgs
from tests.mcontroller.ray.batch_roles import Chained
from tests.mcontroller.ray.roles import Plain


def travelled(value: object) -> object:
    return pack(value).unpack()


@pytest.mark.parametrize("count", [0, 3, 5_000])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64]
)
def test_tensors_of_any_dtype_and_size_arrive_unchanged(dtype: torch.dtype, count: int) -> None:
    tensor = (torch.arange(count) % 2).to(dtype)
    arrived = travelled({"here": tensor})["here"]
    assert arrived.dtype == dtype
    assert torch.equal(arrived.view(torch.uint8), tensor.view(torch.uint8))


def test_shapes_without_elements_or_dims_and_views_arrive_unchanged() -> None:
    table = torch.arange(10_000.0).view(100, 100)
    for tensor in (torch.tensor(3.0), torch.empty(0, 7), table.T, table[::2, 1:3], table[0].expand(5, 100)):
        arrived = travelled(tensor)
        assert arrived.shape == tensor.shape
        assert torch.equal(arrived, tensor)


def test_nested_tensordicts_arrive_unchanged() -> None:
    nested = TensorDict(
        {"inner": TensorDict({"wide": torch.arange(1800).view(2, 900)}, [2]), "flat": torch.ones(2)}, [2]
    )
    arrived = travelled(nested)
    assert arrived.batch_size == nested.batch_size
    assert torch.equal(arrived["flat"], nested["flat"])
    assert torch.equal(arrived["inner", "wide"], nested["inner", "wide"])


def test_strings_objects_and_arrays_arrive_unchanged() -> None:
    words = np.array(["a", {"b": [1]}, None], dtype=object)
    days = np.arange("2020-01-01", "2021-01-01", dtype="datetime64[D]")
    arrived = travelled((words, days, np.arange(9_000)[::3], "ü", datetime.date(2020, 1, 1)))
    assert arrived[0].tolist() == words.tolist()
    assert (arrived[1] == days).all()
    assert arrived[2].tolist() == list(range(0, 9_000, 3))
    assert arrived[3:] == ("ü", datetime.date(2020, 1, 1))


def test_a_class_of_a_script_arrives_whose_method_names_torch_distributed_and_config() -> None:
    import torch.distributed.config  # a module of a type of its own, which the pickled names lead to

    namespace: dict[str, Any] = {"torch": torch, "__name__": "__main__"}
    exec("class Model:\n    def rank(self): return torch.distributed.is_initialized(), self.config", namespace)
    arrived = pack(namespace["Model"]).unpack()
    arrived.config = "tp"
    assert arrived().rank() == (torch.distributed.is_initialized(), "tp")


def test_large_memory_travels_out_of_band_and_is_not_copied_into_the_pickle() -> None:
    batch = DataProto.from_dict({"ids": torch.zeros(1_000, 100, dtype=torch.int64)})
    packed = pack({"batch": batch, "array": np.zeros(50_000), "bare": torch.zeros(50_000)})
    assert len(packed.data) < 2_000
    assert sorted(memoryview(buffer).nbytes for buffer in packed.buffers) == [200_000, 400_000, 800_000]
    assert np.shares_memory(np.frombuffer(packed.buffers[0], np.int64), batch.batch["ids"].numpy())


def test_what_arrives_is_written_into_without_a_trace_elsewhere() -> None:
    sent = {"tensor": torch.zeros(IN_BAND_BYTES), "array": np.zeros(IN_BAND_BYTES), "small": np.zeros(2)}
    packed = pack(sent)
    first, second = packed.unpack(), packed.unpack()
    for value in first.values():
        value[:] = 1
    assert all(value.sum() == 0 for value in (*second.values(), *sent.values()))


def test_an_object_reference_as_an_argument_becomes_its_value(steady: RayWorkerGroup) -> None:
    ref, local = ray.put([41]), LocalWorkerGroup(ClassWithInitArgs(Plain, value=ray.put(42)), 4)
    for group in (steady, local):
        assert group.first(ref) == (0, [41])
        assert group.first(value=ref) == (0, [41])
        assert group.echo([ref, 1, ref, [ref]]) == [[41], 1, [41], [ref]]
        assert group.later(ref).get()[3] == (3, [41])
    assert local.get() == [42] * 4


def test_an_object_reference_as_a_batch_is_split(ray_cluster: None) -> None:
    batch = DataProto.from_dict({"ids": torch.arange(4)})
    group = LocalWorkerGroup(Chained, 2)
    assert group.passed(ray.put(batch)) == batch


def test_object_references_and_actors_inside_a_value_stay_handles(ray_cluster: None) -> None:
    ref = ray.put(41)
    assert ray.get(travelled({"list": [ref]})["list"][0]) == 41


def test_a_tensor_that_cannot_travel_is_rejected_before_it_is_sent() -> None:
    with pytest.raises(DataError):
        pack({"batch": [torch.ones(3).to_sparse()]})


def capturing(lock: object) -> Callable[[], object]:
    return lambda: lock


@pytest.mark.parametrize(
    ("value", "location"),
    [
        (Arguments((1, {"a": [0, threading.Lock()]})), "argument 1['a'][1]"),
        (Arguments((), {"n": threading.Lock()}), "argument 'n'"),
        (Arguments((DataProto(meta_info={"m": threading.Lock()}),)), "argument 0.meta_info['m']"),
        ({"f": (number for number in range(3))}, "the value['f']"),
        (capturing(threading.Lock()), "the value.lock"),
    ],
)
def test_a_part_that_cannot_be_pickled_is_named(value: object, location: str) -> None:
    with pytest.raises(DataError) as caught:
        pack(value)
    assert caught.value.location == location
