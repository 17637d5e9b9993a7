"""Patch Megatron for runs without Transformer Engine and Apex, on a GPU as on a CPU.

Each patch checks what it replaces, so it changes nothing if one of the two is installed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from parallel_state.patches.adam import FusedAdam
from parallel_state.patches.import_hook import Patch


def _moe_utils(module: Any) -> None:
    """Define the name that the router reads without Transformer Engine too (megatron-core 0.16)."""
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


def _random(module: Any) -> None:
    """Recompute parts of layers outside FP8, which only Transformer Engine has.

    Megatron takes the default of ``fp8``, False, for FP8, because it is not None: ``recompute_modules=["moe_act"]``
    fails without Transformer Engine (megatron-core 0.16 to 0.19).
    """
    if module.HAVE_TE:
        return
    initialize = module.CheckpointWithoutOutput.__init__

    @functools.wraps(initialize)
    def outside_fp8(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        self.fp8 = False

    module.CheckpointWithoutOutput.__init__ = outside_fp8


def _optimizer(module: Any) -> None:
    if module.USING_PYTORCH_OPTIMIZER:
        module.Adam = FusedAdam
        module.USING_PYTORCH_OPTIMIZER = False


def _distributed_optimizer(module: Any) -> None:
    """Load checkpoints of the distributed optimizer, which PyTorch's AdamW fails an assertion of Megatron's for."""
    if not module.HAVE_APEX_OR_TE:
        module.Adam = FusedAdam
        module.HAVE_APEX_OR_TE = module.USING_APEX_OPTIMIZER = True


def _layers(module: Any) -> None:
    """Accept ``gradient_accumulation_fusion`` without Apex, and compute the gradients of Megatron's own linears apart.

    Transformer Engine's linears need no Apex for it. Megatron rejects the field for the whole model because of the
    output layer, which is its own.
    """
    if not module._grad_accum_fusion_available:
        fuse_gradients(module, lambda weight: False)


def fuse_gradients(module: Any, is_fused: Callable[[Any], bool]) -> None:
    """Accept ``gradient_accumulation_fusion`` in Megatron's linears, and fuse it for some weights only."""
    linear = module.linear_with_grad_accumulation_and_async_allreduce

    @functools.wraps(linear)
    def fused_for_some(
        input: Any, weight: Any, bias: Any, gradient_accumulation_fusion: bool, *args: Any, **kwargs: Any
    ) -> Any:
        return linear(input, weight, bias, gradient_accumulation_fusion and is_fused(weight), *args, **kwargs)

    module.linear_with_grad_accumulation_and_async_allreduce = fused_for_some
    module._grad_accum_fusion_available = True


def _utils(module: Any) -> None:
    """Return False for any version of a Transformer Engine that is not installed, instead of a TypeError."""
    is_min_version = module.is_te_min_version

    @functools.wraps(is_min_version)
    def is_installed_and_min_version(version: str, check_equality: bool = True) -> bool:
        return module.get_te_version() is not None and is_min_version(version, check_equality)

    module.is_te_min_version = is_installed_and_min_version


def _latent_attention(module: Any) -> None:
    """Build multi-latent attention of local layers without Transformer Engine.

    Its classes are mocks then (0.16), or its one class of linear layers that needs none is None (0.19).
    """
    if not isinstance(getattr(module, "TELinear", None), type | None):
        module.HAVE_TE = False
    if getattr(module, "Linear", module) is None:
        module.Linear = importlib.import_module("megatron.core.post_training.modelopt.layers").Linear


def _latent_norms(module: Any) -> None:
    """Build the norms and projections that the specification has: others are Transformer Engine's (0.19)."""
    if importlib.import_module("megatron.core.extensions.transformer_engine").HAVE_TE:
        return

    def as_specified(self: Any) -> dict[str, Any]:
        names = "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm"
        return {name: getattr(self.submodules, name) or module.IdentityOp for name in names}

    module.QKNormConfigResolver.resolve = as_specified


def _inference_layers(module: Any) -> None:
    """Take no module for one of Transformer Engine's: its classes are mocks then (main after 0.19)."""
    if not module.HAVE_TE and hasattr(module, "is_inference_column_parallel_linear"):
        module.is_inference_column_parallel_linear = lambda module: False


PATCHES: dict[str, Patch] = {
    "megatron.core.utils": _utils,
    "megatron.core.tensor_parallel.random": _random,
    "megatron.core.tensor_parallel.inference_layers": _inference_layers,
    "megatron.core.transformer.moe.moe_utils": _moe_utils,
    "megatron.core.transformer.mla_qk_norm_config": _latent_norms,
    "megatron.core.transformer.multi_latent_attention": _latent_attention,
    "megatron.core.optimizer": _optimizer,
    "megatron.core.tensor_parallel.layers": _layers,
    "megatron.core.optimizer.distrib_optimizer": _distributed_optimizer,
}
"""Module name -> the function that patches it."""
