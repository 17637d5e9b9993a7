"""Pickling: values arrive as they were sent, in private memory, and only their own elements are sent."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from tensordict import TensorDict

from mcontroller.data import meta
from mcontroller.data.batch import DataProto
from mcontroller.data.columns import local_device
from mcontroller.data.pickling import reduce
from mcontroller.errors import DataError
from mcontroller.ray.values.wire import pack
from tests.mcontroller.batches import every_kind, numbered, row_counts
from tests.parallel_state.layouts import unhurried

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def sent(value: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle a value as Ray does: the pickle stream, and its buffers out of band."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return stream, [buffer.raw() for buffer in buffers]


def received(value: Any) -> Any:
    """Send a value and load it as from Ray's shared memory, with read-only buffers."""
    stream, buffers = sent(value)
    return pickle.loads(stream, buffers=[bytes(buffer) for buffer in buffers])


def received_value(value: Any) -> Any:
    """Send a value as an entry of ``meta_info``."""
    return received(DataProto(meta_info={"value": value})).meta_info["value"]


@unhurried
@given(row_counts)
def test_a_batch_of_every_kind_of_column_comes_back_as_it_was(rows: int) -> None:
    batch = every_kind(rows)
    assert received(batch).difference(batch) is None


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol_keeps_the_batch(protocol: int) -> None:
    assert pickle.loads(pickle.dumps(every_kind(5), protocol)).difference(every_kind(5)) is None


@pytest.mark.parametrize("shape", [(3, 2), (0, 4), (3, 0), (0,), ()])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_keeps_its_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape)) * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    tensor = bits.view(dtype).reshape(shape)
    back = received_value(tensor)
    assert (back.dtype, back.shape) == (dtype, shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), bits)


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(24).reshape(4, 6).T,
        torch.arange(24).reshape(4, 6)[::2, 1::3],
        torch.tensor([7]).expand(5),
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1 + 2j, 3j]).conj().imag,
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
    ],
)
def test_views_that_are_not_contiguous_keep_their_values(view: torch.Tensor) -> None:
    assert received_value(view).tolist() == view.tolist()


def test_a_sliced_view_sends_only_its_own_rows() -> None:
    batch = DataProto.from_dict({"ids": torch.zeros(100_000, 8, dtype=torch.int64)}, {"level": np.arange(100_000)})
    stream, buffers = sent(batch[10:20])
    assert sorted(buffer.nbytes for buffer in buffers) == [80, 640]
    assert len(stream) < 1500
    stream, buffers = sent(batch[3])
    assert [buffer.nbytes for buffer in buffers] == [64]


def test_a_contiguous_tensor_is_handed_out_without_a_copy() -> None:
    column = torch.arange(1000)
    _, (buffer,) = sent(DataProto.from_dict({"n": column}))
    column[0] = 5
    assert np.frombuffer(buffer, np.int64)[0] == 5


def test_a_received_batch_is_writable_and_private() -> None:
    batch = DataProto.from_dict(
        {"n": torch.arange(3)}, {"level": np.arange(3)}, {"mean": torch.zeros(2), "px": np.zeros(2)}
    )
    stream, buffers = sent(batch)
    read_only = [bytes(buffer) for buffer in buffers]
    first, second = (pickle.loads(stream, buffers=read_only) for _ in range(2))
    first.batch["n"][0] = 9
    first.non_tensor_batch["level"][0] = 9
    first.meta_info["mean"][0] = 9
    first.meta_info["px"][0] = 9
    assert second == batch
    in_band = pickle.loads(pickle.dumps(batch, protocol=5))
    in_band.batch["n"][0] = 9
    assert batch.batch["n"].tolist() == [0, 1, 2]


def test_a_tensor_under_two_names_travels_once_and_stays_one() -> None:
    shared = torch.arange(1000)
    batch = DataProto.from_dict({"a": shared, "b": shared})
    assert len(sent(batch)[1]) == 1
    back = received(batch)
    back.batch["a"][0] = 7
    assert back.batch["b"][0] == 7


def test_writable_buffers_are_used_without_a_copy() -> None:
    stream, (buffer,) = sent(DataProto.from_dict({"n": torch.arange(4)}))
    private = bytearray(buffer)
    pickle.loads(stream, buffers=[private]).batch["n"][0] = 9
    assert np.frombuffer(private, np.int64)[0] == 9


def test_tensors_deep_in_objects_travel_out_of_band_in_a_call() -> None:
    image = torch.zeros(1000, 100)
    objects, info = [{"pixels": [image[:20]]}, None], {"table": [np.ones(1500), image[:40]]}
    batch = DataProto.from_dict({}, {"multi_modal": objects}, info)
    packed = pack(batch)
    assert sorted(memoryview(buffer).nbytes for buffer in packed.buffers) == [8000, 12000, 16000]
    assert len(packed.data) < 2000
    assert packed.unpack().difference(batch) is None
    assert received(batch).difference(batch) is None


def test_arrays_of_strings_dates_and_records_come_back() -> None:
    arrays = [
        np.array(["a", "bcd"]), np.array(["2020-01-01"], "M8[s]"), np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(10)[::3], np.zeros((2, 0)), np.array(3.5),
        np.array([], dtype=object), np.array([["x", None]], dtype=object),
    ]  # fmt: skip
    for array in arrays:
        back = received_value(array)
        assert (back.dtype, back.shape, back.tolist()) == (array.dtype, array.shape, array.tolist())
        assert back.flags.writeable or array.dtype == object


def test_gradients_are_not_sent_and_parameters_stay_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    leaf = torch.ones(2, requires_grad=True)
    back = [received_value(value) for value in (parameter, leaf, leaf * 2)]
    assert isinstance(back[0], torch.nn.Parameter) and back[0].requires_grad
    assert back[1].requires_grad and back[1].is_leaf
    assert not back[2].requires_grad and back[2].tolist() == [2.0, 2.0]


class Wrapper(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.eye(3).to_sparse(), "a tensor of layout torch.sparse_coo"),
        (torch.zeros(3, device="meta"), "a tensor on the meta device, without values"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.strided), "a nested tensor"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "a nested tensor"),
        (torch.ones(3).as_subclass(Wrapper), "Wrapper"),
        (torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8), "a quantized tensor (torch.qint8)"),
    ],
    ids=["sparse", "meta", "strided nested", "jagged nested", "subclass", "quantized"],
)
def test_a_tensor_that_cannot_be_sent_is_reported_with_its_location(tensor: torch.Tensor, kind: str) -> None:
    with pytest.raises(DataError) as raised:
        pickle.dumps(DataProto(meta_info={"x": tensor}))
    assert raised.value.fields == {"location": "meta_info['x']", "kind": kind}


def test_reduce_works_as_a_reducer_override() -> None:
    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return reduce(value) if isinstance(value, torch.Tensor | TensorDict) else NotImplemented

    sink = io.BytesIO()
    value = {"t": torch.arange(3).bfloat16(), "td": TensorDict({"j": torch.arange(2)}, [2])}
    Pickler(sink, protocol=5).dump(value)
    assert meta.same_value(pickle.loads(sink.getvalue()), value)


def test_copies_share_memory_and_deep_copies_do_not() -> None:
    batch = every_kind(4)
    shallow, deep = copy.copy(batch), copy.deepcopy(batch)
    assert shallow == batch and deep == batch
    shallow.batch["new"] = torch.zeros(4)
    assert "new" not in batch.column_names()
    deep.batch["ids"][0] = -1
    deep.non_tensor_batch["turns"][1].clear()
    assert batch == every_kind(4)
    item = copy.copy(batch[2])
    assert item.batch["ids"].tolist() == [20, 21, 22, 23]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_come_back_on_a_cuda_device() -> None:
    batch = every_kind(5).to("cuda")
    back = received(batch)
    assert {value.device.type for value in back.batch.values()} == {"cuda"}
    assert back.batch.device.type == "cuda"
    assert back.difference(batch) is None


def test_a_device_the_receiver_does_not_have_becomes_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_device("cuda") == torch.device("cpu")
    assert local_device("cpu") == torch.device("cpu")


def test_subclasses_keep_their_type_and_added_attributes() -> None:
    batch = Labelled.from_dict({"n": torch.arange(2)})
    batch.label = "x"
    assert (type(batch[:1]), batch[:1].label) == (Labelled, "x")
    back = received(batch)
    assert (type(back), back.label, back.difference(batch)) == (Labelled, "x", None)
    assert type(received(numbered(1))) is DataProto


class Labelled(DataProto):
    label: str
