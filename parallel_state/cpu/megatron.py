"""What must change inside Megatron itself to run on a CPU: one small patch per module, applied as it is imported.

Each patch looks for what it replaces, so that one table serves every supported version of megatron-core.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from parallel_state.cpu.adam import FusedAdam


def _jit(module: Any) -> None:
    """Eager functions: compiling one takes longer than a CPU run gains from it."""
    module.disable_jit_fuser()


def _layers(module: Any) -> None:
    """What ``gradient_accumulation_fusion`` takes Apex for; a weight without ``main_grad`` has a gradient by itself."""
    linear = module.linear_with_grad_accumulation_and_async_allreduce
    function = module.LinearWithGradAccumulationAndAsyncCommunication
    backward = function.backward

    @functools.wraps(linear)
    def fused_where_summed(
        input: Any, weight: Any, bias: Any, gradient_accumulation_fusion: bool, *args: Any, **kwargs: Any
    ) -> Any:
        return linear(
            input, weight, bias, gradient_accumulation_fusion and hasattr(weight, "main_grad"), *args, **kwargs
        )

    def without_stand_in(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        """Megatron gives autograd memory as it is for a gradient that is in ``main_grad`` already; what else
        contributes to the weight would be added to that, and lost with it.
        """
        of_input, of_weight, *others = backward(ctx, grad_output)
        return of_input, None if ctx.gradient_accumulation_fusion else of_weight, *others

    function.backward = staticmethod(without_stand_in)
    module.linear_with_grad_accumulation_and_async_allreduce = fused_where_summed
    module.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=_add_weight_gradient, wgrad_gemm_accum_fp16=_add_weight_gradient
    )
    module._grad_accum_fusion_available = True


def _data_parallel(module: Any) -> None:
    """A weight of which all is in ``main_grad`` already has no gradient left, which Megatron's hook asks for."""
    ddp = module.DistributedDataParallel
    make = ddp._make_backward_post_hook

    def hook_of(self: Any, param: torch.nn.Parameter) -> Callable[..., None]:
        hook = make(self, param)

        def with_stand_in(*unused: Any) -> None:
            param.grad_added_to_main_grad = param.grad is None  # type: ignore[attr-defined]
            if param.grad is None:
                param.grad = param.new_zeros(()).expand_as(param)
            hook(*unused)

        return with_stand_in

    ddp._make_backward_post_hook = hook_of


def _add_weight_gradient(tokens: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """``main_grad`` ``[out, in]`` += the gradient of a weight; ``tokens`` is ``[n, in]``, ``grad_output`` ``[n, out]``.

    In one pass and without memory for the gradient by itself, where the dtypes are the same.
    """
    if main_grad.dtype == tokens.dtype == grad_output.dtype:
        main_grad.addmm_(grad_output.t(), tokens)
    else:
        main_grad.add_(grad_output.t() @ tokens)


def _utils(module: Any) -> None:
    module.local_multi_tensor_scale = _scale


def _scale(chunk_size: int, noop_flag: Any, tensors: list[list[torch.Tensor]], scale: Any) -> None:
    """Megatron's stand-in for Apex's kernel, without memory for every product by itself."""
    for source, destination in zip(*tensors, strict=True):
        torch.mul(source, scale, out=destination)


def _random(module: Any) -> None:
    """The tracker forks the CPU's generator: there is no other."""
    module._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    # Megatron warns when the CPU's generator moves while the device's is forked; here they are one.
    logging.getLogger(module.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _moe_utils(module: Any) -> None:
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None  # read by the router whether or not Transformer Engine is there (0.16)
    module.maybe_move_tensor_to_cpu = _splits_on_host


def _splits_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron converts to numpy only what was on a GPU, and then splits by what it got."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _optimizer(module: Any) -> None:
    if module.USING_PYTORCH_OPTIMIZER:
        module.Adam = FusedAdam
        module.USING_PYTORCH_OPTIMIZER = False


def _distributed_optimizer(module: Any) -> None:
    if not module.HAVE_APEX_OR_TE:
        module.Adam = FusedAdam
        module.HAVE_APEX_OR_TE = module.USING_APEX_OPTIMIZER = True


def _checkpoint_writer(module: Any) -> None:
    """A forked manager of the results queue: a spawned one imports torch again, in every rank."""

    def results_queue(*args: Any, **kwargs: Any) -> Any:
        if module._results_queue is None:
            module._results_queue = multiprocessing.get_context("fork").Manager().Queue()
        return module._results_queue

    for name in ("_get_write_results_queue", "get_write_results_queue"):
        if hasattr(module, name):
            setattr(module, name, results_queue)


def _inference_communication(module: Any) -> None:
    module._is_cuda = lambda tensor: None  # an assertion that the tensor is on a GPU


PATCHES: dict[str, Callable[[Any], None]] = {
    "megatron.core.distributed.distributed_data_parallel": _data_parallel,
    "megatron.core.jit": _jit,
    "megatron.core.tensor_parallel.layers": _layers,
    "megatron.core.tensor_parallel.random": _random,
    "megatron.core.utils": _utils,
    "megatron.core.transformer.moe.moe_utils": _moe_utils,
    "megatron.core.optimizer": _optimizer,
    "megatron.core.optimizer.distrib_optimizer": _distributed_optimizer,
    "megatron.core.dist_checkpointing.strategies.filesystem_async": _checkpoint_writer,
    "megatron.core.inference.communication_utils": _inference_communication,
}
