from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ray

from mcontroller.ray.values import wire
from mcontroller.ray.values.wire import MAPPED_BYTES, private_copies


@pytest.fixture
def stored(ray_cluster: None) -> np.ndarray:
    """Bytes as Ray maps them from its object store, for many readers and no writer."""
    return ray.get(ray.put(np.full(2 * MAPPED_BYTES, 7, np.uint8)))


def written(buffer: Any) -> np.ndarray:
    array = np.frombuffer(private_copies([buffer])[0], np.uint8)
    assert (array == 7).all()
    array[:] = 1
    return array


def base_of(array: np.ndarray) -> Any:
    view: Any = array.base
    return view.obj if isinstance(view, memoryview) else view


def test_a_buffer_of_the_store_is_mapped_again_and_written_without_a_trace(stored: np.ndarray) -> None:
    assert isinstance(base_of(written(stored)), wire._Mapping)
    assert (stored == 7).all()


def test_without_access_to_the_stores_file_the_buffer_is_copied(
    stored: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_store_file", lambda inode: None)
    assert isinstance(base_of(written(stored)), bytearray)
    assert (stored == 7).all()


def test_without_a_mapped_store_the_buffer_is_copied(stored: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_store", lambda: None)
    assert isinstance(base_of(written(stored)), bytearray)
    assert (stored == 7).all()


def test_a_buffer_outside_the_store_is_copied() -> None:
    outside = bytes([7]) * (2 * MAPPED_BYTES)
    assert isinstance(base_of(written(outside)), bytearray)
    assert outside.count(7) == len(outside)


def test_the_buffers_of_one_object_share_a_mapping_and_keep_to_themselves(ray_cluster: None) -> None:
    sizes = (MAPPED_BYTES, 100, MAPPED_BYTES + 1)
    stored = ray.get(ray.put([np.full(size, place, np.uint8) for place, size in enumerate(sizes)]))
    copies = [np.frombuffer(buffer, np.uint8) for buffer in private_copies(stored)]
    assert len({id(base_of(array)) for array in copies}) == 1
    assert isinstance(base_of(copies[0]), wire._Mapping)
    for place, array in enumerate(copies):
        assert array.tolist() == [place] * sizes[place]
        array[:] = 9
    assert [array.max() for array in stored] == [0, 1, 2]
