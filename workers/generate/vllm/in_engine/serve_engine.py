"""Serve one engine of vLLM on a connection: ``python serve_engine.py DESCRIPTOR FOLDER...``.

The folders have the other files that the engine imports.

Messages are pickled tuples. The first one to arrive contains the arguments of ``vllm.LLM``, later ones a method of
``Served`` and its arguments. Each is answered with ``("result", value)`` or ``("error", text, traceback)``. In between,
``("progress",)`` reports that a long call is running.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1
_PROGRESS_S = 1.0
_TAGS = ("weights", "kv_cache")  # of vLLM's memory


def serve_engine() -> None:
    """Answer calls until the worker closes the connection."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the worker, however it ends
    # Not PYTHONPATH: the interpreter may be a script that sets it. Spawned processes start with this process's path.
    sys.path[:0] = sys.argv[2:]
    connection = Connection(int(sys.argv[1]))
    served: Served | None = None
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            if served is None:
                served = Served(connection, arguments)
            answer: tuple[Any, ...] = ("result", getattr(served, method)(**arguments if method != "start" else {}))
        except Exception as error:
            answer = ("error", f"{type(error).__name__}: {error}", traceback.format_exc())
        connection.send(answer)


class Served:
    """The engine, and the calls that a worker makes of it.

    Args:
        connection: to the worker.
        arguments: arguments of ``vllm.LLM``.
    """

    def __init__(self, connection: Connection, arguments: dict[str, Any]) -> None:
        import vllm

        self._connection = connection
        self._llm = vllm.LLM(**arguments, worker_extension_cls="policy_receiver.PolicyReceiver")
        self._requests = 0
        self._adapter: Any = None
        self._asleep: frozenset[str] = frozenset()
        self._reported = time.monotonic()

    def start(self) -> dict[str, Any]:
        """Return facts about the engine that has started."""
        return {"vocab_size": self._llm.llm_engine.vllm_config.model_config.get_vocab_size()}

    def generate(
        self, prompts: Sequence[Sequence[int]], parameters: Sequence[dict[str, Any]], temperature: float
    ) -> list[tuple[list[int], list[float], Any]]:
        """Generate one response to every prompt.

        Args:
            prompts: token ids.
            parameters: arguments of ``vllm.SamplingParams``, one for each prompt.
            temperature: divides the logits of all rows.

        Returns:
            For each prompt, the tokens of the response, their log-probabilities, and the experts of all tokens but the
            last, an array ``[tokens, layers, topk]``, or None if ``enable_return_routed_experts`` is not set.
        """
        from vllm import SamplingParams

        self._wake("kv_cache")
        self._llm.collective_rpc("set_policy_temperature", args=(temperature,))
        engine, first = self._llm.llm_engine, self._requests
        self._requests += len(prompts)
        for number, (tokens, values) in enumerate(zip(prompts, parameters, strict=True), first):
            sampling = SamplingParams(**values, logprobs=0, detokenize=False, ignore_eos=True)
            prompt = {"prompt_token_ids": list(tokens)}
            engine.add_request(str(number), prompt, sampling, lora_request=self._adapter)
        answers: dict[int, tuple[list[int], list[float], Any]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    [made] = output.outputs
                    tokens = list(made.token_ids)
                    steps = zip(made.logprobs or (), tokens, strict=True)
                    scores = [step[token].logprob for step, token in steps]
                    answers[int(output.request_id)] = tokens, scores, made.routed_experts
            self._report_progress()
        return [answers[number] for number in range(first, self._requests)]

    def begin_update(self, hashes: bool = True, beside_policy: bool = True) -> None:
        """Start an update of the weights, which are hashed as they arrive if ``hashes``.

        On a GPU, ``beside_policy``, only the engine's weights get memory until ``generate``: the cache would not fit
        beside the policy's weights and the tensors in flight.
        """
        if beside_policy:
            self.sleep()
        self._wake("weights")
        self._llm.collective_rpc("begin_policy_update", args=(hashes,))

    def receive_bucket(self, path: str, tensors: Sequence[tuple[str, str, tuple[int, ...], int]]) -> None:
        """Load the tensors of a bucket; see ``policy_receiver``."""
        self._llm.collective_rpc("receive_policy_bucket", args=(path, tensors))

    def finish_update(self) -> list[list[tuple[str, str, int]]]:
        """Finish an update: repack the weights, and return what has arrived.

        Returns:
            By process of the engine, name, dtype and sum of all tensors: see ``policy_receiver``.

        Raises:
            RuntimeError: a weight was not received.
        """
        of_processes: list[list[tuple[str, str, int]]] = self._llm.collective_rpc("finish_policy_update")
        return of_processes

    def receive_adapter(self, path: str) -> None:
        """Generate with the adapter in a folder from now on, instead of the one before it.

        Raises:
            RuntimeError: vLLM did not load it.
        """
        from vllm.lora.request import LoRARequest

        if not self._llm.llm_engine.add_lora(LoRARequest("policy", 1, path, load_inplace=True)):
            raise RuntimeError("vLLM did not load the adapter")
        self._adapter = LoRARequest("policy", 1, path)  # by its number: the folder is not read again
        self.drop_prefixes()

    def drop_prefixes(self) -> None:
        """Drop the keys and values of earlier prompts, which the old weights computed.

        Raises:
            RuntimeError: they are in use.
        """
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache, which has keys and values of the old weights")

    def sleep(self) -> int:
        """Free the memory of the GPUs, and return how many bytes; on a CPU vLLM frees nothing."""
        before = sum(self._llm.collective_rpc("free_device_memory"))
        if before == 0 or "weights" in self._asleep:
            return 0
        self._llm.sleep(level=2)  # the weights are not kept
        self._asleep = frozenset(_TAGS)
        return sum(self._llm.collective_rpc("free_device_memory")) - before

    def _wake(self, tag: str) -> None:
        """Allocate the memory of a part again; vLLM only warns if it is awake already."""
        if tag in self._asleep:
            self._llm.wake_up(tags=[tag])
            self._asleep -= {tag}

    def _report_progress(self) -> None:
        if time.monotonic() - self._reported > _PROGRESS_S:
            self._reported = time.monotonic()
            self._connection.send(("progress",))


if __name__ == "__main__":
    serve_engine()
