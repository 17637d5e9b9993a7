"""Patch Megatron's own functions to run on a CPU: one small patch per module, applied when it is imported.

A name that only some versions of megatron-core have is patched if it exists: one table works for all of them.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from parallel_state import releases
from parallel_state.cpu.mamba import patch_mixer
from parallel_state.cpu.products import add_product_of_transposed
from parallel_state.patches.import_hook import Patch
from parallel_state.patches.packed_rope import PATCHES as PACKED_ROPE
from parallel_state.patches.without_te import PATCHES as WITHOUT_TE
from parallel_state.patches.without_te import fuse_gradients


def _jit(module: Any) -> None:
    """Run functions eagerly: compiling one takes longer than it saves in a CPU run."""
    module.disable_jit_fuser()


def _layers(module: Any) -> None:
    """Support ``gradient_accumulation_fusion``, which needs Apex; a weight without ``main_grad`` is not fused."""
    function = module.LinearWithGradAccumulationAndAsyncCommunication
    backward = function.backward

    def without_dummy_grad(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        """Return None as the gradient of a weight whose gradient is already added to ``main_grad``.

        Megatron returns uninitialized memory to autograd. Other gradients of the same weight would be added to it, and
        dropped with it.
        """
        of_input, of_weight, *others = backward(ctx, grad_output)
        return of_input, None if ctx.gradient_accumulation_fusion else of_weight, *others

    function.backward = staticmethod(without_dummy_grad)
    fuse_gradients(module, lambda weight: hasattr(weight, "main_grad"))
    module.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=_add_weight_gradient, wgrad_gemm_accum_fp16=_add_weight_gradient
    )


def _data_parallel(module: Any) -> None:
    """Call Megatron's hook with a dummy gradient if the gradient is None: the hook requires one.

    The gradient of a weight is None if all of it is already added to ``main_grad``.
    """
    ddp = module.DistributedDataParallel
    make_hook = ddp._make_backward_post_hook

    def make_patched_hook(self: Any, param: torch.nn.Parameter) -> Callable[..., None]:
        hook = make_hook(self, param)

        def with_dummy_grad(*unused: Any) -> None:
            param.grad_added_to_main_grad = param.grad is None  # type: ignore[attr-defined]
            if param.grad is None:
                param.grad = param.new_zeros(()).expand_as(param)
            hook(*unused)

        return with_dummy_grad

    ddp._make_backward_post_hook = make_patched_hook


def _fsdp_buffer(module: Any) -> None:
    """Note the stream of buffers in memory of the CPU too: FSDP asserts that gradients have the current stream."""
    create = module.DBuffer.__init__

    @functools.wraps(create)
    def with_stream(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        self.allocation_stream = torch.cuda.current_stream()

    module.DBuffer.__init__ = with_stream


def _add_weight_gradient(tokens: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add the gradient of a weight to ``main_grad``.

    If all dtypes are the same, MKL does it in one pass, without a temporary for the gradient.

    Args:
        tokens: ``[n, in]``.
        grad_output: ``[n, out]``.
        main_grad: ``[out, in]``.
    """
    if main_grad.dtype == tokens.dtype == grad_output.dtype:
        add_product_of_transposed(main_grad, grad_output, tokens)
    else:
        main_grad.add_(grad_output.t() @ tokens)


def _utils(module: Any) -> None:
    WITHOUT_TE[module.__name__](module)
    module.local_multi_tensor_scale = _scale


def _scale(chunk_size: int, noop_flag: Any, tensors: list[list[torch.Tensor]], scale: Any) -> None:
    """Scale tensors as Apex's kernel does, without the temporaries of Megatron's own replacement."""
    for source, destination in zip(*tensors, strict=True):
        torch.mul(source, scale, out=destination)


def _random(module: Any) -> None:
    """Use the CPU's random generator as the device's."""
    WITHOUT_TE[module.__name__](module)
    module._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    # Megatron warns if the CPU's generator changes while the device's is forked; here they are the same generator
    logging.getLogger(module.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _moe_utils(module: Any) -> None:
    WITHOUT_TE[module.__name__](module)
    module.maybe_move_tensor_to_cpu = _maybe_to_numpy


def _maybe_to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert the sizes of splits to numpy, which Megatron does only for tensors on a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _checkpoint_writer(module: Any) -> None:
    """Fork the manager process of the results queue: a spawned one imports torch again, for every rank."""

    def results_queue(*args: Any, **kwargs: Any) -> Any:
        if module._results_queue is None:
            module._results_queue = multiprocessing.get_context("fork").Manager().Queue()
        return module._results_queue

    for name in ("_get_write_results_queue", "get_write_results_queue"):
        if hasattr(module, name):
            setattr(module, name, results_queue)


def _inference_communication(module: Any) -> None:
    module._is_cuda = lambda tensor: None  # it asserts that the tensor is on a GPU


def _gated_delta_net(module: Any) -> None:
    """Compute with Megatron's own functions in PyTorch (``deterministic_mode``), which need fla for one norm only."""
    if not module.HAVE_FLA:
        module.HAVE_FLA = True
        module.l2norm = _l2norm


def _l2norm(values: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    return values * torch.rsqrt(values.square().sum(dim, keepdim=True) + eps)


PATCHES: dict[str, Patch] = (
    WITHOUT_TE
    | PACKED_ROPE
    | releases.PATCHES
    | {
        "megatron.core.distributed.distributed_data_parallel": _data_parallel,
        "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.dbuffer": _fsdp_buffer,
        "megatron.core.jit": _jit,
        "megatron.core.tensor_parallel.layers": _layers,
        "megatron.core.tensor_parallel.random": _random,
        "megatron.core.ssm.gated_delta_net.common": _gated_delta_net,
        "megatron.core.ssm.mamba_mixer": patch_mixer,
        "megatron.core.utils": _utils,
        "megatron.core.transformer.moe.moe_utils": _moe_utils,
        "megatron.core.dist_checkpointing.strategies.filesystem_async": _checkpoint_writer,
        "megatron.core.inference.communication_utils": _inference_communication,
    }
)
"""Module name -> the function that patches it."""
