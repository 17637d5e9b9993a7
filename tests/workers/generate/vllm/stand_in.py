"""A stand-in for vLLM 0.32 under the real ``serve_engine``, and for the process that it runs in.

It refuses to start as vLLM does if too little of a GPU is free, takes and frees the memory of weights and cache, and
asserts where vLLM would read or write memory that is not there: it only warns, waits for ever, or ends with a fault.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.machinery
import json
import math
import sys
import tempfile
import threading
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file

import workers.generate.vllm.in_engine as in_engine
import workers.weights.in_engine as weights_in_engine
from tests.workers.generate.vllm.signatures import check_arguments
from workers.generate.vllm import checks, start
from workers.generate.vllm.engine_process import EngineError, EngineHung

TAGS = frozenset(("weights", "kv_cache"))
WEIGHTS_BYTES = 1 << 30
CONTEXT_BYTES = 512 << 20
NCCL_BYTES = 512 << 20
"""The context of an engine's process, and the communicators of several: both exist before vLLM measures the GPU."""


class Gpu:
    """The memory of a GPU.

    Args:
        total: its bytes.
        used: bytes that other processes have.
    """

    def __init__(self, total: int, used: int = 0) -> None:
        self.total, self.used = total, used

    def free(self) -> int:
        return self.total - self.used

    def take(self, size: int) -> None:
        assert size <= self.free(), f"CUDA out of memory: {size} bytes, {self.free()} free"
        self.used += size


class StandInLLM:
    """vLLM's ``AsyncLLM``: its arguments, memory, sleep and wake-ups, and the calls of ``serve_engine``.

    Attributes:
        gpu: makes the GPU of an engine; None on a CPU.
        answer: returns the tokens of a response from the tokens of the prompt.
        token_s: [s] of a token.
        started: all engines.
        events: what happened to this one, in order.
        weights: the tensors of the last update.
        weights_by_node: those that arrived on each of its nodes; ``weights`` on the first.
    """

    gpu: Callable[[], Gpu] | None = None
    answer: Callable[[Sequence[int]], list[int]] = staticmethod(lambda prompt: [sum(prompt) % 61, 2])
    token_s = 0.0
    started: list[StandInLLM] = []  # noqa: RUF012  # emptied by ``standing_in``

    def __init__(self, **arguments: Any) -> None:
        check_arguments("AsyncEngineArgs", arguments)
        self.arguments = arguments
        self.asleep: set[str] = set()
        self.events: list[str] = []
        self.parameters: list[dict[str, Any]] = []
        self.adapters: list[dict[str, torch.Tensor]] = []
        self.prompts: list[list[int]] = []
        self.weights: dict[str, torch.Tensor] = {}
        others = (dict[str, torch.Tensor]() for _ in range(arguments.get("nnodes", 1) - 1))
        self.weights_by_node = [self.weights, *others]
        self.config = json.loads((Path(arguments["model"]) / "config.json").read_text())
        self.errored, self.in_flight = False, dict[str, bool]()  # True: aborted
        self.tokens_made, self.is_hanging = 0, False
        self.output_processor = types.SimpleNamespace(request_states={})
        self.engine_core = types.SimpleNamespace(pause_scheduler_async=self._pause_scheduler)
        self.running, self.admitting = asyncio.Event(), asyncio.Event()
        self.running.set()
        self.admitting.set()
        self.sizes = {"weights": WEIGHTS_BYTES, "kv_cache": 0}
        self.device = None if type(self).gpu is None else type(self).gpu()  # type: ignore[misc]
        if self.device is not None:
            self._admit(self.device, arguments.get("gpu_memory_utilization", 0.92))
        type(self).started.append(self)

    def _admit(self, gpu: Gpu, share: float) -> None:
        """``request_memory`` of vLLM, and the size of the cache that follows from it."""
        gpu.take(CONTEXT_BYTES + NCCL_BYTES * (self.arguments.get("tensor_parallel_size", 1) > 1))
        requested = math.ceil(gpu.total * share)
        if gpu.free() < requested:
            raise ValueError(
                f"Free memory on device cuda:0 ({gpu.free() / 2**30:.2f}/{gpu.total / 2**30:.2f} GiB) on startup is "
                f"less than desired GPU memory utilization ({share}, {requested / 2**30:.2f} GiB). Decrease GPU memory "
                "utilization or reduce GPU memory used by other processes."
            )
        self.sizes["kv_cache"] = self.arguments["kv_cache_memory_bytes"] or requested - WEIGHTS_BYTES
        assert self.sizes["kv_cache"] > 0, "No available memory for the cache blocks"
        gpu.take(sum(self.sizes.values()))

    @classmethod
    def from_engine_args(cls, engine_args: Mapping[str, Any], usage_context: str) -> StandInLLM:
        return cls(**engine_args)

    def shutdown(self) -> None: ...

    async def generate(
        self, prompt: Mapping[str, list[int]], sampling_params: Any, request_id: str, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        """One token of each request in a round of the event loop; all wait while the engine is paused or asleep.

        Outputs have one token each, or are one with all, as ``output_kind`` of the request says.
        """
        assert (lora_request is not None) == bool(self.adapters)
        given = prompt["prompt_token_ids"]
        if len(given) >= self.arguments["max_model_len"]:
            raise ValueError(f"the prompt has {len(given)} tokens")
        await self.admitting.wait()
        if self.events[-1:] != ["generate"]:
            self.events.append("generate")
        self.parameters.append(sampling_params.values)
        self.prompts.append(given)
        self.in_flight[request_id] = False
        made, sent = list[int](), 0
        self.output_processor.request_states[request_id] = types.SimpleNamespace(
            external_req_id=request_id, detokenizer=types.SimpleNamespace(num_output_tokens=lambda: len(made))
        )
        try:
            tokens = type(self).answer(given)
            experts = self._experts([*given, *tokens[:-1]])
            while True:
                await asyncio.sleep(self.token_s)
                await self.running.wait()
                assert not self.asleep, f"generate while {sorted(self.asleep)} are asleep"
                aborted = self.in_flight[request_id]
                if not aborted:
                    made.append(tokens[len(made)])
                    self.tokens_made += 1
                ended = aborted or len(made) == len(tokens)
                if ended or sampling_params.values["output_kind"] == "DELTA":
                    output = types.SimpleNamespace(
                        token_ids=made[sent:],
                        logprobs=types.SimpleNamespace(logprobs=[-float(token) for token in made[sent:]]),
                        routed_experts=experts if ended else None,
                        finish_reason=("abort" if aborted else "stop") if ended else None,
                    )
                    sent = len(made)
                    yield types.SimpleNamespace(request_id=request_id, finished=ended, outputs=[output])
                if ended:
                    return
        finally:
            del self.in_flight[request_id], self.output_processor.request_states[request_id]

    async def is_paused(self) -> bool:
        while self.is_hanging:
            await asyncio.sleep(0.01)
        return not self.running.is_set()

    async def _pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        assert clear_cache, "keys and values of the old weights would be used"
        if mode != "keep":  # requests that have begun end, and others wait
            self.admitting.clear()
            self.in_flight |= dict.fromkeys(self.in_flight, mode == "abort")
            while self.in_flight:
                await asyncio.sleep(0)
        self.running.clear()

    async def resume_generation(self) -> None:
        assert not self.asleep, f"resumed while {sorted(self.asleep)} are asleep"
        self.admitting.set()
        self.running.set()

    async def sleep(self, level: int, mode: str) -> None:
        assert self.arguments["enable_sleep_mode"] and self.device is not None
        assert self.asleep != TAGS, "asleep already"
        assert mode == "keep", mode
        before = self.device.free()
        self.device.used -= sum(self.sizes[tag] for tag in TAGS - self.asleep)
        assert self.device.free() >= before, "Memory usage increased after sleeping."
        self.asleep = set(TAGS)
        self.running.clear()
        self.events.append(f"sleep {level}")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        woken = set(TAGS if tags is None else tags)
        assert woken <= self.asleep, f"{sorted(woken - self.asleep)} are awake already"
        assert self.device is not None
        self.device.take(sum(self.sizes[tag] for tag in woken))
        self.asleep -= woken
        self.events += [f"wake {tag}" for tag in sorted(woken)]
        if not self.asleep:
            self.admitting.set()
            self.running.set()

    async def add_lora(self, lora_request: Any) -> bool:
        assert self.arguments["enable_lora"] and lora_request.load_inplace
        self.events.append("add_lora")
        self.adapters.append(load_file(Path(lora_request.path) / "adapter_model.safetensors"))
        return True

    async def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        if "policy_update" in method or "bucket" in method:
            assert "weights" not in self.asleep, f"{method} while the weights are asleep"
            assert not self.running.is_set(), f"{method} while requests are computed"
            self.events.append(method)
        if method == "finish_policy_update":
            return [self._finish_policy_update(weights) for weights in self.weights_by_node]
        return [getattr(self, f"_{method}", lambda *_: None)(*args)]

    def _finish_policy_update(self, weights: Mapping[str, torch.Tensor]) -> list[tuple[str, str, int]]:
        """The sums of all tensors, as ``PolicyReceiver`` returns them."""
        from bit_sums import IndexKeys, sum_of_bits

        keys, found = IndexKeys(), []
        for name, tensor in weights.items():
            value = int(sum_of_bits(tensor, [0] * tensor.dim(), tensor.dtype, keys))
            found.append((name, str(tensor.dtype).removeprefix("torch."), value))
        return found

    def _free_device_memory(self) -> int:
        return 0 if self.device is None else self.device.free()

    def _receive_policy_bucket(self, paths: Sequence[str], tensors: Sequence[Any]) -> None:
        assert len(paths) == len(self.weights_by_node) == self.arguments.get("nnodes", 1)
        for path, weights in zip(paths, self.weights_by_node, strict=True):
            content = Path(path).read_bytes()
            for name, dtype, shape, first in tensors:
                empty = torch.empty(shape, dtype=getattr(torch, dtype))
                part = bytearray(content[first : first + empty.nbytes])
                weights[name] = torch.frombuffer(part, dtype=empty.dtype).view(shape)

    def _experts(self, tokens: Sequence[int]) -> np.ndarray | None:
        """The experts of tokens, ``[tokens, layers, topk]``: their sum with the layer and the place, if asked for."""
        if not self.arguments.get("enable_return_routed_experts"):
            return None
        layers, topk = (np.arange(self.config[name]) for name in ("num_hidden_layers", "num_experts_per_tok"))
        numbers = np.array(tokens)[:, None, None] + layers[:, None] + topk
        return (numbers % self.config["num_experts"]).astype("uint8")


class _AsyncEngineArgs(dict[str, Any]):
    def create_engine_config(self, usage_context: str, headless: bool) -> types.SimpleNamespace:
        assert headless and 0 < self["node_rank"] < self["nnodes"]
        return types.SimpleNamespace(arguments=dict(self))


class StandInExecutor:
    """vLLM's ``MultiprocExecutor`` on another node than the engine's first.

    Attributes:
        started: the arguments of all.
    """

    started: list[dict[str, Any]] = []  # noqa: RUF012  # emptied by ``standing_in``

    def __init__(self, vllm_config: Any) -> None:
        check_arguments("AsyncEngineArgs", vllm_config.arguments)
        self.started.append(vllm_config.arguments)

    def register_failure_callback(self, callback: Callable[[], Any]) -> None: ...

    def shutdown(self) -> None: ...


class _LoRARequest:
    def __init__(self, lora_name: str, lora_int_id: int, lora_path: str, load_inplace: bool = False) -> None:
        self.path, self.load_inplace = lora_path, load_inplace


class _SamplingParams:
    def __init__(self, **values: Any) -> None:
        check_arguments("SamplingParams", values)
        self.values = values


class _Meta(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(types.ModuleType):
    """A module of vLLM in which every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Meta(name, (), {"__init__": lambda self, *args: None})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        found = name == "vllm" or name.startswith("vllm.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        name = spec.name
        if name == "vllm":
            module.SamplingParams = _SamplingParams  # type: ignore[attr-defined]
        if name == "vllm.engine.arg_utils":
            module.AsyncEngineArgs = _AsyncEngineArgs  # type: ignore[attr-defined]
        if name == "vllm.v1.executor.multiproc_executor":
            module.MultiprocExecutor = StandInExecutor  # type: ignore[attr-defined]
        if name == "vllm.v1.engine.async_llm":
            module.AsyncLLM = StandInLLM  # type: ignore[attr-defined]
        if name == "vllm.lora.request":
            module.LoRARequest = _LoRARequest  # type: ignore[attr-defined]
        if name == "vllm.config":
            module.current, module.set_current_vllm_config = None, _current_config(module)  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def _current_config(module: Any) -> Any:
    @contextmanager
    def set_current_vllm_config(config: Any) -> Iterator[None]:
        module.current, before = config, module.current
        try:
            yield
        finally:
            module.current = before

    return set_current_vllm_config


class EngineInProcess:
    """``EngineProcess`` without a process: calls of the real ``serve_engine.Engine``, on an event loop.

    The loop runs in calls, on the thread of the caller, whose CUDA device is the engine's; and on a thread of its own
    once the engine listens.
    """

    pid = 0

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, Any], **_: Any) -> None:
        import serve_engine

        self.environment = environment
        self.loop, self.listens = asyncio.new_event_loop(), False

        async def created() -> Any:
            program = serve_engine.RemotePart if arguments.get("node_rank") else serve_engine.Engine
            return program(dict(arguments))

        self.served = self._in_engine("start", created())
        self.llm: StandInLLM = getattr(self.served, "_llm", None)  # type: ignore[assignment]

    def call(self, method: str, **arguments: Any) -> Any:
        self.send(method, **arguments)
        return self.result()

    def check(self, *, was_silent: bool) -> None:
        if self.llm.is_hanging:
            assert was_silent
            raise EngineHung("no progress", method="check", pid=self.pid, setting="silence_timeout_s", timeout_s=0.0)

    def send(self, method: str, **arguments: Any) -> None:
        self._answer = self._in_engine(method, getattr(self.served, method)(**arguments))

    def result(self) -> Any:
        return self._answer

    def close(self) -> None: ...

    def _in_engine(self, method: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            if self.listens:
                return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)
            result = self.loop.run_until_complete(coroutine)
            if method == "listen":
                self.listens = True
                threading.Thread(target=self.loop.run_forever, daemon=True).start()
            return result
        except ValueError as error:
            text = f"vLLM's engine failed in {method}: {type(error).__name__}: {error}"
            raise EngineError(text, method=method, pid=self.pid, log_tail="") from error


@contextmanager
def standing_in(gpu: Callable[[], Gpu] | None = None) -> Iterator[type[StandInLLM]]:
    """Let engines be stand-ins in this process, on GPUs that ``gpu`` makes, or on a CPU."""
    folders = [*in_engine.__path__, *weights_in_engine.__path__]
    finder, process, asked = _Finder(), start.EngineProcess, (checks.has_vllm, checks.is_for_cpus)
    known = set(sys.modules)
    sys.meta_path.insert(0, finder)
    sys.path[:0] = folders
    start.EngineProcess = EngineInProcess  # type: ignore[misc,assignment]
    checks.has_vllm, checks.is_for_cpus = lambda python: True, lambda python: False
    StandInLLM.gpu, StandInLLM.started, StandInExecutor.started = gpu, [], []
    try:
        with tempfile.TemporaryDirectory() as caches, mock.patch.dict("os.environ", XDG_CACHE_HOME=caches):
            yield StandInLLM
    finally:
        start.EngineProcess, (checks.has_vllm, checks.is_for_cpus) = process, asked  # type: ignore[misc]
        StandInLLM.gpu = None
        sys.meta_path.remove(finder)
        sys.path[:] = [path for path in sys.path if path not in folders]
        own = {path.stem for folder in folders for path in Path(folder).glob("*.py")}
        for name in set(sys.modules) - known:
            if name in own or name.split(".")[0] == "vllm":
                del sys.modules[name]
