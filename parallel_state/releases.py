"""Differences between the supported releases of megatron-core, each behind a function or a patch.

Code above this module has no branches on a version. megatron-core is imported inside the functions, because it must be
patched before its first import.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from parallel_state.errors import ParallelStateError
from parallel_state.patches.import_hook import Patch


def moe_metrics() -> tuple[ModuleType, tuple[str, ...]]:
    """Return the module and the names of the globals in which Megatron collects the router's losses."""
    module = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if hasattr(module, "_MOE_LAYER_WISE_LOGGING_TRACKER"):  # until 0.16
        return module, ("_MOE_LAYER_WISE_LOGGING_TRACKER",)
    return importlib.import_module("megatron.core.transformer.moe.moe_logging"), ("_MOE_METRICS_TRACKER",)


def build_optimizer(config: Any, chunks: list[Any], pg: Any, overrides: dict[Any, Any]) -> Any:
    """Return Megatron's optimizer over the parameters of ``chunks``.

    From 0.17 on, one function builds every optimizer; in 0.16 another one builds muon.

    Args:
        config: an OptimizerConfig.
        chunks: model chunks inside DistributedDataParallel.
        pg: the groups of the layout.
        overrides: ParamKey -> ParamGroupOverride, for single parameters.

    Raises:
        ParallelStateError: the installed release has no such optimizer.
    """
    optimizers = importlib.import_module("megatron.core.optimizer")
    arguments = {"config_overrides": overrides, "pg_collection": pg, "use_gloo_process_groups": False}
    if hasattr(optimizers, "HAVE_EMERGING_OPTIMIZERS") or config.optimizer in ("adam", "sgd"):
        return optimizers.get_megatron_optimizer(config, chunks, **arguments)
    if config.optimizer == "muon":
        muon = importlib.import_module("megatron.core.optimizer.muon")
        return muon.get_megatron_muon_optimizer(config, chunks, **arguments)
    raise ParallelStateError(
        f"the installed megatron-core has no optimizer {config.optimizer!r}; it has adam, sgd and muon",
        optimizer=config.optimizer,
    )


def experts_builder(linears: dict[str, Any], submodules_class: type) -> Any:
    """Return what a layer specification expects in place of grouped experts.

    From 0.17 on that is a function that builds them, before it the class and its submodules.

    Args:
        linears: the classes of ``linear_fc1`` and ``linear_fc2``.
        submodules_class: Megatron's MLPSubmodules.
    """
    experts = importlib.import_module("megatron.core.transformer.moe.experts")
    if hasattr(experts, "GroupedMLPSubmodules"):
        submodules = experts.GroupedMLPSubmodules(**linears, activation_func=None)
        return functools.partial(experts.TEGroupedMLP, submodules=submodules)
    return experts.TEGroupedMLP, submodules_class(**linears)


@functools.cache
def language_models() -> tuple[Any, ...]:
    """Return the classes of language models: GPTModel, and from 0.19 on HybridModel."""
    gpt = importlib.import_module("megatron.core.models.gpt").GPTModel
    if importlib.util.find_spec("megatron.core.models.hybrid") is None:
        return (gpt,)
    return gpt, importlib.import_module("megatron.core.models.hybrid.hybrid_model").HybridModel


def release() -> str:
    """Return the version of the installed megatron-core."""
    return str(importlib.import_module("megatron.core").__version__)


def _parameter_groups(module: Any) -> None:
    """Identify parameter groups in a checkpoint by their learning rates too, as 0.19 does.

    In 0.16, groups that differ in nothing else are taken for one group when a checkpoint is loaded.
    """
    keys = module.param_group_identifier_keys
    if "max_lr" in keys:
        return
    importer = sys.modules.get("megatron.core.optimizer.distrib_optimizer")  # has its own name for the keys
    for patched in (module, *([importer] if importer is not None else [])):
        patched.param_group_identifier_keys = (*keys, "max_lr", "min_lr")


PATCHES: dict[str, Patch] = {"megatron.core.optimizer.optimizer": _parameter_groups}
"""Module name -> the function that patches it."""
