"""A batch in a file: it is loaded as it was saved, and a file cannot run code."""

from __future__ import annotations

import errno
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcontroller.data.batch import DataProto
from mcontroller.errors import DataError
from tests.mcontroller.batches import every_kind, numbered, row_counts
from tests.parallel_state.layouts import unhurried

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(["$tuple", "$dict"]) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def back_from(path: Path, batch: DataProto) -> DataProto:
    batch.save_to_disk(path)
    return DataProto.load_from_disk(path)


@given(row_counts)
@settings(unhurried, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_batch_of_every_kind_of_column_comes_back_from_disk(tmp_path: Path, rows: int) -> None:
    batch = every_kind(rows)
    assert back_from(tmp_path / "batch", batch).difference(batch) is None


@given(json_values)
@settings(unhurried, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_plain_value_comes_back_with_its_types(tmp_path: Path, value: object) -> None:
    batch = DataProto.from_dict({}, {"objects": [value, value]}, {"value": value})
    back = back_from(tmp_path / "batch", batch)
    assert back.difference(batch) is None
    assert repr(back.meta_info) == repr(batch.meta_info)


def test_numpy_numbers_arrays_and_tensors_in_meta_info_keep_their_dtypes(tmp_path: Path) -> None:
    info = {
        "lr": np.float32(0.1), "flag": np.bool_(True), "table": np.arange(6, dtype=np.int16).reshape(2, 3),
        "names": np.array(["a", "bcd"]), "kl": torch.tensor(0.5, dtype=torch.bfloat16),
        "objects": np.array([None, "x"], object),
    }  # fmt: skip
    back = back_from(tmp_path / "batch", DataProto(meta_info=info))
    assert back.difference(DataProto(meta_info=info)) is None
    assert type(back.meta_info["lr"]) is np.float32 and back.meta_info["names"].dtype == np.dtype("<U3")


def test_columns_that_share_memory_and_views_are_saved_with_their_own_elements(tmp_path: Path) -> None:
    base = torch.arange(40_000).reshape(10_000, 4)
    batch = DataProto.from_dict(
        {"a": base[2:5], "b": base[2:5], "c": base.T[:3, :4], "d": base[3:6].flip(0)}, {"objects": [base[:1]] * 3}
    )
    assert back_from(tmp_path / "batch", batch) == batch
    assert (tmp_path / "batch").stat().st_size < 10_000


def test_negated_views_and_transposed_arrays_are_saved_as_they_are(tmp_path: Path) -> None:
    negated = torch._neg_view(torch.tensor([1.0, 2.0]))
    columns = {"negated": negated, "imaginary": torch.tensor([1 + 2j, 3 + 4j]).conj().imag}
    arrays = {
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "transposed": np.arange(12).reshape(3, 4)[:, ::2].T,
        "texts": np.array(["\ud800", "é"], dtype=object),
    }
    back = back_from(tmp_path / "batch", DataProto.from_dict(columns, arrays))
    assert back.batch["negated"].tolist() == [-1.0, -2.0] and back.batch["imaginary"].tolist() == [-2.0, -4.0]
    assert all(np.array_equal(back.non_tensor_batch[name], array) for name, array in arrays.items())


def test_a_batch_without_tensors_or_without_anything_can_be_saved(tmp_path: Path) -> None:
    for batch in (DataProto(), DataProto(meta_info={"a": 1}), numbered(3).select([], []), numbered(0)):
        back = back_from(tmp_path / "batch", batch)
        assert back == batch and (back.batch is None) == (batch.batch is None)


class Opaque:
    pass


@pytest.mark.parametrize(
    ("batch", "location"),
    [
        (DataProto.from_dict({}, {"uid": ["a", Opaque()]}), "non_tensor_batch['uid'][1]"),
        (DataProto.from_dict({}, {"s": [{1, 2}]}), "non_tensor_batch['s'][0]"),
        (DataProto(meta_info={"a": {"f": len}}), "meta_info['a']['f']"),
        (DataProto(meta_info={"b": b"x"}), "meta_info['b']"),
        (DataProto(meta_info={"c": {(1, len): 2}}), "key of meta_info['c'][1]"),
        (DataProto(meta_info={"d": np.array(["2020"], "M8[s]")}), "meta_info['d']"),
        (DataProto.from_dict({"m": torch.ones(2, device="meta")}), "batch['m']"),
    ],
)
def test_values_that_cannot_be_saved_are_named_in_the_error_and_leave_no_file(
    batch: DataProto, location: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as raised:
        batch.save_to_disk(tmp_path / "batch")
    assert raised.value.location == location
    assert list(tmp_path.iterdir()) == []


def test_saving_replaces_the_whole_file_and_leaves_no_other_file(tmp_path: Path) -> None:
    numbered(1000).save_to_disk(tmp_path / "batch")
    assert back_from(tmp_path / "batch", numbered(2)) == numbered(2)
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]


def test_a_full_disk_is_named_and_leaves_the_old_file_alone(tmp_path: Path) -> None:
    numbered(2).save_to_disk(tmp_path / "batch")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError) as raised:
            numbered(1_000_000).select("n", []).save_to_disk(tmp_path / "batch")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(tmp_path / "batch"))
    assert DataProto.load_from_disk(tmp_path / "batch") == numbered(2)
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]


class Bomb:
    def __reduce__(self) -> tuple:
        return (Path("exploded").touch, ())


def test_a_pickle_in_place_of_the_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("batch").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError):
        DataProto.load_from_disk("batch")
    assert not Path("exploded").exists()


@pytest.mark.parametrize(
    "content",
    [{"weight": torch.zeros(2)}, {"format": "mcontroller.DataProto", "version": 9}, [], 3],
    ids=["weights", "a newer version", "a list", "a number"],
)
def test_files_of_another_kind_or_version_are_rejected(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "file")
    with pytest.raises(DataError) as raised:
        DataProto.load_from_disk(tmp_path / "file")
    assert raised.value.fields == {"path": tmp_path / "file"}


def test_a_file_that_was_cut_off_is_rejected(tmp_path: Path) -> None:
    numbered(100).save_to_disk(tmp_path / "batch")
    content = (tmp_path / "batch").read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 1):
        (tmp_path / "batch").write_bytes(content[:length])
        with pytest.raises(DataError) as raised:
            DataProto.load_from_disk(tmp_path / "batch")
        assert raised.value.path == tmp_path / "batch"


def test_a_file_with_a_changed_byte_is_rejected(tmp_path: Path) -> None:
    batch = numbered(100)
    batch.save_to_disk(tmp_path / "batch")
    content = bytearray((tmp_path / "batch").read_bytes())
    element = content.index(next(iter(batch.tensors().values())).numpy().tobytes()) + 9
    for position in (element, len(content) - 48):  # and where the archive says what is in it
        changed = bytearray(content)
        changed[position] ^= 0xFF
        (tmp_path / "batch").write_bytes(changed)
        with pytest.raises(DataError) as raised:
            DataProto.load_from_disk(tmp_path / "batch")
        assert raised.value.path == tmp_path / "batch"
