"""Receive the policy's weights in the processes of an engine, as vLLM's ``worker_extension_cls``.

Tensors have the names and shapes of a Hugging Face checkpoint. vLLM fuses and packs them again layer by layer, and
copies the result into its own tensors, as ``reload_weights`` does.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from bit_sums import IndexKeys, sum_of_bits  # workers/weights/in_engine, on the path of the engine's processes
from registered_memory import register_memory, unregister_memory
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform


class PolicyReceiver:
    """Methods that are added to each of vLLM's own workers; the attributes used are theirs."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    policy_temperature: float | None = None
    policy_loading: tuple[str, tuple[int, ...]] = ("", ())
    policy_names_expected: frozenset[str]
    policy_names_received: set[str]
    policy_sums: dict[tuple[str, str], torch.Tensor]
    policy_keys: IndexKeys | None

    def begin_policy_update(self, hashes: bool = True) -> None:
        """Prepare the layers for new weights, which are hashed as they arrive if ``hashes``."""
        model = self.model_runner.get_model()
        # Before the layers are prepared: a tied output layer has a separate parameter afterwards, with no weight.
        names = (name for name, _ in model.named_parameters())
        self.policy_names_expected = frozenset(name.replace(".base_layer.", ".") for name in names)  # with an adapter
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
        self.policy_names_received = set()
        self.policy_sums, self.policy_keys = {}, IndexKeys() if hashes else None

    def receive_policy_bucket(
        self, paths: Sequence[str], tensors: Sequence[tuple[str, str, tuple[int, ...], int]]
    ) -> None:
        """Load the tensors of a bucket, which may be filled again when this returns, and hash them as they arrived.

        Args:
            paths: of the shared memory, by node of the engine.
            tensors: name, dtype, shape and first byte of each.

        Raises:
            RuntimeError: vLLM cannot load a tensor, such as one of another model.
        """
        model = self.model_runner.get_model()
        path = paths[self.vllm_config.parallel_config.node_rank_within_dp]
        loading = self._copied(self._mapped_bucket(path), tensors)
        try:
            with set_current_vllm_config(self.vllm_config):  # complete layers are repacked, with kernels of its choice
                self.policy_names_received |= model.load_weights(loading)
        except Exception as error:
            name, shape = self.policy_loading
            raise RuntimeError(
                f"the engine has another model than the policy, or an untested vLLM: it cannot load {name} of "
                f"{list(shape)} with the weights before it: {type(error).__name__}: {str(error)[:300]}"
            ) from error
        if not current_platform.is_cpu():
            torch.cuda.current_stream().synchronize()

    def finish_policy_update(self) -> list[tuple[str, str, int]]:
        """Repack what depends on the new weights.

        Returns:
            Name, dtype and sum of the bits of every tensor that has arrived: see ``workers.weights.fingerprints``.

        Raises:
            RuntimeError: weights of the model are missing.
        """
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_runner.model_config)
            if current_platform.is_cpu():
                _repack(model)
        missing = sorted(self.policy_names_expected - self.policy_names_received)
        if missing:
            raise RuntimeError(f"the update had no values for {len(missing)} weights of vLLM's model: {missing[:8]}")
        sums, self.policy_sums, self.policy_keys = self.policy_sums, {}, None
        values = torch.stack(list(sums.values())).tolist() if sums else []
        return [(name, dtype, value) for (name, dtype), value in zip(sums, values, strict=True)]

    def set_policy_temperature(self, temperature: float) -> None:
        """Divide all logits by ``temperature``, in float32, before vLLM computes log-probabilities from them.

        vLLM's own temperature changes only its ``processed_logprobs``, which are also after top-k and top-p.
        """
        if self.policy_temperature is None:
            self._divide_logits()
        self.policy_temperature = temperature

    def free_device_memory(self) -> int:
        """Return the free bytes of this process's GPU; 0 on a CPU."""
        return 0 if current_platform.is_cpu() else torch.cuda.mem_get_info(self.device)[0]

    def _mapped_bucket(self, path: str) -> torch.Tensor:
        """The memory of a bucket, which stays mapped and registered until the bucket has grown."""
        buckets: dict[str, torch.Tensor] = self.__dict__.setdefault("policy_buckets", {})
        size, memory = os.stat(path).st_size, buckets.get(path)
        if memory is None or memory.nbytes < size:
            if memory is not None:
                unregister_memory(memory)
            memory = buckets[path] = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            register_memory(memory)
        return memory

    def _copied(
        self, memory: torch.Tensor, tensors: Sequence[tuple[str, str, tuple[int, ...], int]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies of the tensors: vLLM keeps the tensors of a layer until it has all of them."""
        for name, dtype, shape, first in tensors:
            self.policy_loading = name, shape
            content = memory[first : first + _nbytes(dtype, shape)].view(getattr(torch, dtype)).view(shape)
            copy = content.to(self.device, copy=True, non_blocking=True)
            if self.policy_keys is not None:
                whole = copy if shape else copy.view(1)
                self.policy_sums[name, dtype] = sum_of_bits(whole, [0] * whole.dim(), copy.dtype, self.policy_keys)
            yield name, copy

    def _divide_logits(self) -> None:
        model = self.model_runner.get_model()
        compute_logits = model.compute_logits

        def divided(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits = compute_logits(*args, **kwargs)
            return (
                logits if logits is None or self.policy_temperature == 1.0 else logits.float() / self.policy_temperature
            )

        model.compute_logits = divided


def _nbytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * getattr(torch, dtype).itemsize


def _repack(model: torch.nn.Module) -> None:
    """Repack on a CPU what vLLM 0.32 keeps from the old weights: a tied output layer, and the experts."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(module)
