"""Fields of TransformerConfig that are set on a GPU if the configuration does not set them.

Status: run on one H100.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs

from mcontroller.devices import compute_capability
from mcontroller.errors import ConfigError
from workers.config import ModelConfig, ParallelConfig
from workers.planning import is_planned

_logger = logging.getLogger(__name__)

_WRAPPERS = (
    "megatron.core.extensions.transformer_engine",
    "megatron.core.extensions.transformer_engine_spec_provider",
)
"""What Megatron imports to use Transformer Engine; if that fails, its layer specifications do without."""
_CHANGED_SWIGLU = ("use_te_activation_func", "glu_linear_offset", "activation_func_clamp_value")
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def chosen_implementation(transformer_impl: str) -> str:
    """Return ``"transformer_engine"`` or ``"local"``.

    Args:
        transformer_impl: one of these, or ``"auto"``: Transformer Engine if it is installed and there is a GPU.

    Raises:
        ConfigError: Transformer Engine is requested and cannot run, unless the run is planned; or it is installed and
            Megatron cannot use it.
    """
    runs_here = torch.cuda.is_available() and gpt_layer_specs.HAVE_TE
    if transformer_impl != "local" and torch.cuda.is_available() and not runs_here:
        _check_wrapper(transformer_impl)
    if transformer_impl == "transformer_engine" and not runs_here and not is_planned():
        missing = "package transformer_engine" if torch.cuda.is_available() else "GPU"
        raise ConfigError(
            f"model.transformer_impl is 'transformer_engine', but there is no {missing}: set 'auto' or 'local'",
            key="model.transformer_impl",
            value=transformer_impl,
        )
    return "transformer_engine" if transformer_impl != "local" and runs_here else "local"


def _check_wrapper(transformer_impl: str) -> None:
    """Raise ConfigError if Transformer Engine is installed: Megatron has found that it cannot use it."""
    if importlib.util.find_spec("transformer_engine") is None:
        return
    cause = "Megatron does not say why"
    for module in _WRAPPERS:
        try:
            importlib.import_module(module)
        except ImportError as error:
            cause = f"{module} cannot be imported: {error}"
            break
    raise ConfigError(
        f"Transformer Engine is installed, and megatron-core cannot use it: {cause}. Install versions that fit each "
        "other, or set model.transformer_impl=local for layers without it",
        key="model.transformer_impl",
        value=transformer_impl,
    )


def gpu_defaults(model: ModelConfig) -> dict[str, bool]:
    """Return the fields that are set on this machine for this model and that its configuration leaves open.

    The process of rank 0 prints them when it builds the model. Without a GPU there are none.

    Args:
        model: the model; fields in ``model.transformer`` are left as they are.

    Raises:
        ConfigError: as ``chosen_implementation``.
    """
    if not torch.cuda.is_available():
        return {}
    return defaults_with(model, with_engine=chosen_implementation(model.transformer_impl) == "transformer_engine")


def defaults_with(model: ModelConfig, *, with_engine: bool) -> dict[str, bool]:
    """Return the fields as ``gpu_defaults`` on any machine, with Transformer Engine's layers or with local ones."""
    given = model.transformer
    plain_swiglu = model.activation == "silu" and model.gated_linear_unit and not any(map(given.get, _CHANGED_SWIGLU))
    fields = {
        # Transformer Engine's kernel; multi-latent attention has another one
        "apply_rope_fusion": with_engine
        and model.position_embedding_type == "rope"
        and not given.get("multi_latent_attention"),
        # other activations would change their values: the fused GELU is the approximation by tanh
        "bias_activation_fusion": plain_swiglu,
        # Megatron does not support it for experts with biases
        "bias_dropout_fusion": model.num_moe_experts is None or not model.add_bias_linear,
        # Transformer Engine adds weight gradients to their sum
        "gradient_accumulation_fusion": with_engine,
    }
    return {name: value for name, value in fields.items() if name not in given}


def max_connections(parallel: ParallelConfig, capability: tuple[int, int] | None) -> tuple[str | None, str]:
    """Return the value that CUDA_DEVICE_MAX_CONNECTIONS should have, None for CUDA's own, and the reason.

    Megatron's layers start a collective and then a product, and rely on one hardware queue to start them in this order:
    see ``validate_args`` of Megatron-LM.

    Args:
        parallel: the axes.
        capability: compute capability of the GPU; None if it is unknown.
    """
    if parallel.tp == 1 and parallel.cp == 1:
        return None, "tp and cp are 1, so no layer overlaps a collective with a product"
    if capability is not None and capability >= (10, 0):
        return None, f"compute capability {capability[0]}.{capability[1]} keeps the order of kernels without it"
    return "1", f"with tp={parallel.tp} and cp={parallel.cp}, collectives start before the products they overlap with"


def connection_variables(arguments: Iterable[Any], capability: tuple[int, int] | None) -> dict[str, str]:
    """Return CUDA_DEVICE_MAX_CONNECTIONS with its value, or nothing, for a worker with these arguments.

    Args:
        arguments: the arguments of its constructor, of which the axes, and configurations that have the axes, are read.
        capability: compute capability of the GPUs; None if it is unknown.
    """
    for argument in arguments:
        parallel = argument if isinstance(argument, ParallelConfig) else getattr(argument, "parallel", None)
        if isinstance(parallel, ParallelConfig) and (value := max_connections(parallel, capability)[0]) is not None:
            return {_CONNECTIONS: value}
    return {}


def set_max_connections(parallel: ParallelConfig) -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS, or warn if the environment has another value or it is too late.

    The driver reads the variable when the CUDA context of the process is created, so this comes before the first use of
    the device.

    Args:
        parallel: the axes.
    """
    value, reason = max_connections(parallel, compute_capability())
    if value is None:
        return
    if not torch.cuda.is_initialized():
        os.environ.setdefault(_CONNECTIONS, value)
    if os.environ.get(_CONNECTIONS) != value:
        _logger.warning(
            "%s is %s and should be %s before the process uses CUDA: %s; set it in the environment of the workers",
            _CONNECTIONS,
            os.environ.get(_CONNECTIONS),
            value,
            reason,
        )
