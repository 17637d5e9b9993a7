"""Megatron-Core's own results, from a separate process, so that the process of the tests never imports megatron.

Run as a script it reads pickled questions from stdin and writes pickled answers to stdout; `Oracle` is the client.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

GROUP_GETTERS = {
    ("tp",): "get_tensor_model_parallel_group",
    ("pp",): "get_pipeline_model_parallel_group",
    ("cp",): "get_context_parallel_group",
    ("dp",): "get_data_parallel_group",
    ("tp", "pp"): "get_model_parallel_group",
    ("tp", "cp"): "get_tensor_and_context_parallel_group",
    ("tp", "dp"): "get_tensor_and_data_parallel_group",
    ("ep",): "get_expert_model_parallel_group",
    ("etp",): "get_expert_tensor_parallel_group",
    ("edp",): "get_expert_data_parallel_group",
    ("etp", "ep"): "get_expert_tensor_and_model_parallel_group",
    ("etp", "ep", "pp"): "get_expert_tensor_model_pipeline_parallel_group",
}
AXIS_GETTERS = {
    "tp": "tensor_model_parallel",
    "cp": "context_parallel",
    "dp": "data_parallel",
    "pp": "pipeline_model_parallel",
    "etp": "expert_tensor_parallel",
    "ep": "expert_model_parallel",
    "edp": "expert_data_parallel",
}


class Oracle:
    """A running oracle process; each method takes a batch of questions and returns the answers in their order."""

    def __init__(self) -> None:
        environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def groups(self, questions: list[tuple[dict[str, int], str, list[str]]]) -> list[list[list[list[int]]]]:
        """RankGenerator(**sizes, order=order).get_ranks(token) for every token of every question."""
        groups: list[list[list[list[int]]]] = self._ask("groups", questions)
        return groups

    def errors(self, questions: list[tuple[int, dict[str, Any]]]) -> list[str | None]:
        """The error of initialize_model_parallel(**arguments) for (world_size, arguments); None if it accepts them."""
        errors: list[str | None] = self._ask("errors", questions)
        return errors

    def coordinates(self, questions: list[tuple[int, int, dict[str, Any]]]) -> list[dict[str, dict[Any, Any]]]:
        """Indices, sizes and groups after initialize_model_parallel on (world_size, rank, arguments)."""
        answers: list[dict[str, dict[Any, Any]]] = self._ask("coordinates", questions)
        return answers

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _ask(self, kind: str, questions: list[Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump((kind, questions), self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)


def answer(questions: BinaryIO, answers: BinaryIO) -> None:
    kinds: dict[str, Callable[..., Any]] = {"groups": _groups, "errors": _error, "coordinates": _coordinates}
    with contextlib.suppress(EOFError):  # the client has closed its end
        while True:
            kind, batch = pickle.load(questions)
            pickle.dump([kinds[kind](*question) for question in batch], answers)
            answers.flush()


def _groups(sizes: dict[str, int], order: str, tokens: list[str]) -> list[list[list[int]]]:
    from megatron.core.parallel_state import RankGenerator

    generator = RankGenerator(**sizes, order=order)
    return [generator.get_ranks(token) for token in tokens]


def _error(world_size: int, arguments: dict[str, Any]) -> str | None:
    try:
        with _model_parallel(world_size, 0, arguments):
            return None
    except (RuntimeError, AssertionError, ValueError) as error:
        return str(error)


def _coordinates(world_size: int, rank: int, arguments: dict[str, Any]) -> dict[str, dict[Any, Any]]:
    import torch.distributed as dist

    with _model_parallel(world_size, rank, arguments) as mpu:
        groups = {axes: getattr(mpu, name)() for axes, name in GROUP_GETTERS.items()}
        groups["dp", "cp"] = mpu.get_data_parallel_group(with_context_parallel=True)
        groups["tp", "dp", "cp"] = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return {
            "indices": {axis: getattr(mpu, f"get_{name}_rank")() for axis, name in AXIS_GETTERS.items()},
            "sizes": {axis: getattr(mpu, f"get_{name}_world_size")() for axis, name in AXIS_GETTERS.items()},
            "groups": {axes: dist.get_process_group_ranks(group) for axes, group in groups.items()},
        }


@contextlib.contextmanager
def _model_parallel(world_size: int, rank: int, arguments: dict[str, Any]) -> Iterator[Any]:
    """Megatron's parallel state on `rank`, with torch's fake process groups."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        mpu.initialize_model_parallel(**arguments, create_gloo_process_groups=False)
        yield mpu
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of the imports must not mix with the answers
    answer(sys.stdin.buffer, answers)
