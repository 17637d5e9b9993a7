"""Ray's object store, as ported code uses it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["parallel_put"]


def parallel_put(data_list: Sequence[Any], max_workers: int | None = None) -> list[Any]:
    """Put values into Ray's object store with several threads; a worker's method gets the value of a reference.

    Args:
        data_list: The values.
        max_workers: Number of threads; by default one for each value, and at most 16.

    Returns:
        Ray's references, in the order of the values.
    """
    import ray

    with ThreadPoolExecutor(max_workers or max(1, min(len(data_list), 16))) as threads:
        return list(threads.map(ray.put, data_list))
