"""Serve an engine of vLLM, or its part on one node: ``python serve_engine.py DESCRIPTOR FOLDER...``.

The folders have what it imports. The worker that started it calls methods of ``Engine`` on a connection, one at a time.
Messages are pickled tuples. The first one to arrive contains the arguments of vLLM's engine, later ones a method and
its arguments. Each is answered with ``("result", value)`` or ``("error", text, traceback)``. In between,
``("progress",)`` reports that the process that computes still answers.

Programs send requests to the socket that ``listen`` opens, any number at a time: see ``RequestServer``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hmac
import itertools
import os
import select
import signal
import sys
import threading
import time
import traceback
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

_PR_SET_PDEATHSIG = 1
_PARENT = "ENGINE_PARENT_PID"  # of the processes that this one starts
_END_S = 5.0
_PROGRESS_S = 1.0
_TAGS = ("weights", "kv_cache")  # of vLLM's memory
_DRAIN_ROUNDS = 100  # of the event loop, after which outputs that vLLM has sent are with their requests


async def serve_engine() -> None:
    """Answer calls until the worker closes the connection."""
    connection, loop = Connection(int(sys.argv[1])), asyncio.get_running_loop()
    engine: Engine | RemotePart | None = None
    while True:
        try:
            method, arguments = await loop.run_in_executor(None, connection.recv)
        except (EOFError, ConnectionResetError):
            break
        reports, result = None, None
        try:
            if engine is None:
                engine = RemotePart(arguments) if arguments.get("node_rank") else Engine(arguments)
            else:
                if isinstance(engine, Engine):
                    reports = loop.create_task(engine.report_progress(partial(connection.send, ("progress",))))
                result = await getattr(engine, method)(**arguments)
            answer: tuple[Any, ...] = ("result", result)
        except Exception as error:
            if engine is not None:
                engine.end_if_dead()
            answer = ("error", f"{type(error).__name__}: {error}", traceback.format_exc())
        finally:
            if reports is not None:
                reports.cancel()
        connection.send(answer)
    if engine is not None:
        engine.shutdown()


class Response(NamedTuple):
    """What an engine generated for one request.

    Attributes:
        tokens: token ids.
        log_probs: of every token, at the temperature and before all filters.
        versions: the version of the policy and how many tokens it made, in the order of the tokens.
        reason: why it ended: ``stop``, ``length`` or ``abort``.
        experts: ``[prompt + response - 1, layers, topk]``; None if ``enable_return_routed_experts`` is not set.
    """

    tokens: list[int]
    log_probs: list[float]
    versions: list[list[int]]
    reason: str
    experts: Any


class Engine:
    """An engine that generates by itself: requests join and leave its batch, and weights change under them.

    Args:
        arguments: of ``vllm.AsyncEngineArgs``.

    Attributes:
        version: of the policy whose weights it has.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        engine_arguments = AsyncEngineArgs(**_engine_arguments(arguments))
        self._llm = AsyncLLM.from_engine_args(engine_arguments, usage_context=UsageContext.LLM_CLASS)
        self.version, self._numbers = 0, itertools.count()
        # Of every request in flight, version and last token at each pause.
        self._pauses: dict[str, list[tuple[int, int]]] = {}
        self._adapter: Any = None
        self._asleep: frozenset[str] = frozenset()
        self._temperatures = _Temperatures(self._llm)
        self._server: RequestServer | None = None

    async def generate(
        self,
        prompt: Sequence[int],
        parameters: dict[str, Any],
        temperature: float,
        request_id: str = "",
        on_part: Callable[[Response], None] | None = None,
    ) -> Response:
        """Generate a response to a prompt; the request waits while the engine sleeps or is paused.

        Cancelling the coroutine ends the request, also in vLLM.

        Args:
            prompt: token ids.
            parameters: arguments of ``vllm.SamplingParams``.
            temperature: divides the logits. Requests with another one wait until those in flight have ended.
            request_id: a name of its own.
            on_part: called with what was generated since the last call; what is returned is the rest.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # An output for every token costs several times as much as one for the response.
        kind = RequestOutputKind.DELTA if on_part else RequestOutputKind.FINAL_ONLY
        settings = {"logprobs": 0, "flat_logprobs": True, "detokenize": False, "ignore_eos": True, "output_kind": kind}
        sampling = SamplingParams(**parameters, **settings)
        request_id = request_id or f"request-{next(self._numbers)}"
        pauses = list[tuple[int, int]]()
        if on_part is None:  # otherwise all tokens before a pause have been handed out
            self._pauses[request_id] = pauses
        response = Response([], [], [], "abort", None)
        try:
            async with self._temperatures.at(temperature):
                outputs = self._llm.generate(
                    {"prompt_token_ids": list(prompt)}, sampling, request_id, lora_request=self._adapter
                )
                async for output in outputs:
                    [made] = output.outputs
                    tokens, reason = list(made.token_ids), made.finish_reason or "abort"
                    log_probs = made.logprobs.logprobs[: len(tokens)]
                    versions = _versions([*pauses, (self.version, len(tokens))])
                    response = Response(tokens, log_probs, versions, reason, made.routed_experts)
                    if on_part is not None and tokens and not output.finished:
                        on_part(response)
        finally:
            self._pauses.pop(request_id, None)
        return response

    async def pause(self, mode: str = "keep") -> None:
        """Stop to generate until ``resume``, and drop the keys and values of all tokens.

        Args:
            mode: of the requests in flight: ``abort`` ends them; ``wait`` finishes them; ``keep`` continues them after
                ``resume``, which computes their keys and values again.
        """
        # AsyncLLM.pause_generation does the same, and then sleeps.
        await self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=True)
        for _ in range(_DRAIN_ROUNDS):
            await asyncio.sleep(0)
        for state in self._llm.output_processor.request_states.values():
            if state.external_req_id in self._pauses:
                self._pauses[state.external_req_id].append((self.version, state.detokenizer.num_output_tokens()))

    async def resume(self, version: int) -> None:
        """Go on after ``pause`` with the weights of a version; an engine without its cache goes on with ``listen``."""
        self.version = version
        if not self._asleep:
            await self._llm.resume_generation()

    async def begin_update(self, hashes: bool = True, beside_policy: bool = True, mode: str = "keep") -> None:
        """Pause, and start an update of the weights, which are hashed as they arrive if ``hashes``.

        On a GPU, ``beside_policy``, only the engine's weights get memory until ``listen``: the cache would not fit
        beside the policy's weights and the tensors in flight.
        """
        await self.pause(mode)
        if beside_policy:
            await self.sleep()
        await self._wake("weights")
        await self._llm.collective_rpc("begin_policy_update", args=(hashes,))

    async def receive_bucket(
        self, paths: Sequence[str], tensors: Sequence[tuple[str, str, tuple[int, ...], int]]
    ) -> None:
        """Load the tensors of a bucket; see ``policy_receiver``."""
        await self._llm.collective_rpc("receive_policy_bucket", args=(paths, tensors))

    async def finish_update(self) -> list[list[tuple[str, str, int]]]:
        """Finish an update: repack the weights, and return what has arrived. ``resume`` follows.

        Returns:
            By process of the engine, name, dtype and sum of all tensors: see ``policy_receiver``.

        Raises:
            RuntimeError: a weight was not received.
        """
        of_processes: list[list[tuple[str, str, int]]] = await self._llm.collective_rpc("finish_policy_update")
        return of_processes

    async def receive_adapter(self, path: str, mode: str = "keep") -> None:
        """Pause, and generate with the adapter in a folder from ``resume`` on, instead of the one before it.

        Raises:
            RuntimeError: vLLM did not load it.
        """
        from vllm.lora.request import LoRARequest

        await self.pause(mode)
        if not await self._llm.add_lora(LoRARequest("policy", 1, path, load_inplace=True)):
            raise RuntimeError("vLLM did not load the adapter")
        self._adapter = LoRARequest("policy", 1, path)  # by its number: the folder is not read again

    async def sleep(self) -> int:
        """Free the memory of the GPUs, and return how many bytes; on a CPU vLLM frees nothing.

        Requests in flight go on after ``listen``.
        """
        before = sum(await self._llm.collective_rpc("free_device_memory"))
        if before == 0 or "weights" in self._asleep:
            return 0
        await self._llm.sleep(level=2, mode="keep")  # the weights are not kept
        self._asleep = frozenset(_TAGS)
        return sum(await self._llm.collective_rpc("free_device_memory")) - before

    async def listen(self, host: str, token: str, expert_layers: Sequence[int] = (), expert_code: str = "h") -> int:
        """Take requests from programs that know ``token`` on a socket, and return its port.

        After an update has filled the memory of the weights, that of the cache is taken again.

        Args:
            host: the address to listen at.
            token: what a program sends first.
            expert_layers: the layers whose experts are returned.
            expert_code: the type code of their indices.
        """
        await self._wake("kv_cache")
        if self._server is None:
            self._server = RequestServer(self, token, expert_layers, expert_code)
            await self._server.start(host)
        return self._server.port

    async def check(self) -> None:
        """Return when the process that computes has answered."""
        await self._llm.is_paused()

    async def report_progress(self, report: Callable[[], Any]) -> None:
        """Call ``report`` every second, as long as the process that computes answers between two of its steps."""
        while True:
            await asyncio.sleep(_PROGRESS_S)
            await self._llm.is_paused()
            report()

    def end_if_dead(self) -> None:
        """End this process, which the worker and programs notice, if that of vLLM has ended."""
        if self._llm.errored:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def shutdown(self) -> None:
        """End vLLM's processes."""
        self._llm.shutdown()

    async def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            await self._llm.wake_up(tags=[tag])
            self._asleep -= {tag}


class RemotePart:
    """The part of an engine on another node than its first: processes that the engine there calls.

    Args:
        arguments: of ``vllm.AsyncEngineArgs``, those of the engine with another ``node_rank``.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        engine_arguments = _engine_arguments(arguments)
        config = AsyncEngineArgs(**engine_arguments).create_engine_config(UsageContext.LLM_CLASS, headless=True)
        self._executor = MultiprocExecutor(config)
        self._executor.register_failure_callback(lambda: os._exit(1))  # the worker notices

    def end_if_dead(self) -> None:
        """Do nothing: the process has ended with vLLM's."""

    def shutdown(self) -> None:
        """End vLLM's processes of this node."""
        self._executor.shutdown()


def _versions(ends: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return versions and how many tokens each made, from versions and the last token of each."""
    starts = (0, *(end for _, end in ends))
    return [[version, end - start] for (version, end), start in zip(ends, starts, strict=False) if end > start]


def _engine_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"disable_log_stats": True, "worker_extension_cls": "policy_receiver.PolicyReceiver", **arguments}


class _Temperatures:
    """Lets requests in whose temperature the engine has, in the order of their arrival.

    vLLM's own temperature changes only its log-probabilities after top-k and top-p, so all logits are divided by one.
    """

    def __init__(self, llm: Any) -> None:
        self._llm, self._value, self._in_flight = llm, 0.0, 0
        self._lock, self._idle = asyncio.Lock(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def at(self, temperature: float) -> AsyncIterator[None]:
        """Wait until logits are divided by a temperature."""
        async with self._lock:
            if temperature != self._value:
                while self._in_flight:
                    self._idle.clear()
                    await self._idle.wait()
                await self._llm.collective_rpc("set_policy_temperature", args=(temperature,))
                self._value = temperature
            self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()


class RequestServer:
    """Answers the requests of programs, each when its response has ended.

    A program sends ``{"token": ...}`` first, and gets ``{}``. A request has ``id``, ``sampling``
    (arguments of ``vllm.SamplingParams``) and ``temperature``, and the token ids of the prompt. Its answer has the
    ``id``, ``reason`` and ``versions``, and tokens and log-probabilities; or ``id`` and ``error``. If the request has
    ``parts``, answers without ``reason`` come before, and the last one is the rest. ``{"abort": id}`` ends a request.
    ``{}`` follows every second in which the process that computes answers.
    """

    def __init__(self, engine: Engine, token: str, expert_layers: Sequence[int], expert_code: str) -> None:
        self._engine, self._token = engine, token
        self._expert_layers, self._expert_code = list(expert_layers), expert_code
        self._connections = itertools.count()
        self.port = 0

    async def start(self, host: str) -> None:
        """Listen on a free port of an address."""
        self._server = await asyncio.start_server(self._serve, host)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from engine_messages import packed, read_message

        tasks: dict[int, asyncio.Task[None]] = {}
        name = next(self._connections)
        try:
            head, _ = await asyncio.wait_for(read_message(reader), 10.0)
            if not hmac.compare_digest(str(head.get("token")), self._token):
                return
            report = partial(writer.write, packed({}))
            report()
            tasks = {-1: asyncio.ensure_future(self._engine.report_progress(report))}
            while True:
                head, arrays = await read_message(reader)
                if "abort" in head:
                    if (task := tasks.get(head["abort"])) is not None:
                        task.cancel()
                    continue
                number, prompt = head["id"], arrays[0].tolist()
                task = asyncio.ensure_future(self._answer(writer, f"{name}-{number}", head, prompt))
                tasks[number] = task
                task.add_done_callback(partial(tasks.pop, number))
        except (TimeoutError, EOFError):
            pass
        finally:
            for task in tasks.values():  # nobody waits for them any more
                task.cancel()
            writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, request_id: str, head: dict[str, Any], prompt: list[int]
    ) -> None:
        from engine_messages import packed

        def send_part(part: Response) -> None:
            arrays = array("q", part.tokens), array("d", part.log_probs)
            writer.write(packed({"id": head["id"], "versions": part.versions}, *arrays))

        on_part = send_part if head.get("parts") else None
        try:
            response = await self._engine.generate(prompt, head["sampling"], head["temperature"], request_id, on_part)
        except Exception as error:
            self._engine.end_if_dead()
            writer.write(packed({"id": head["id"], "error": f"{type(error).__name__}: {error}"}))
            return
        answer = {"id": head["id"], "reason": response.reason, "versions": response.versions}
        arrays = [array("q", response.tokens), array("d", response.log_probs)]
        if response.experts is not None:
            experts = response.experts[:, self._expert_layers].astype(self._expert_code)
            answer["experts"] = experts.shape
            arrays.append(array(self._expert_code, experts.tobytes()))
        writer.write(packed(answer, *arrays))


def _end_with(parent: int) -> None:
    """End this process of vLLM when the one that has started it has ended: it would run on if that was killed."""
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(parent)], [], [])
    os.kill(os.getpid(), signal.SIGTERM)  # vLLM unlinks its shared memory, unless it has just started or hangs
    time.sleep(_END_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__mp_main__":  # processes that vLLM starts load this file first
    threading.Thread(target=_end_with, args=(int(os.environ[_PARENT]),), daemon=True).start()
if __name__ in ("__main__", "__mp_main__"):
    os.environ[_PARENT] = str(os.getpid())
if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the worker, however it ends
    # Not PYTHONPATH: the interpreter may be a script that sets it. Spawned processes start with this process's path.
    sys.path[:0] = sys.argv[2:]
    asyncio.run(serve_engine())
