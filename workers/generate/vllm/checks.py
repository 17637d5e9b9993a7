"""Checks that an engine of vLLM can generate with a policy, before any process of the group starts."""

from __future__ import annotations

from mcontroller.errors import ConfigError
from workers.config import ActorConfig
from workers.config.trained_weights import base_is_frozen
from workers.generate.vllm.interpreter import has_vllm, interpreter_of, is_for_cpus, is_present
from workers.planning import is_planned
from workers.weights.hf.config import hf_config_of

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of ``max_lora_rank`` (vLLM 0.32)."""


def check_vllm(config: ActorConfig) -> None:
    """Check what follows from the configuration and from the vLLM of the engines' interpreter.

    The controller's node may lack an interpreter that ``rollout.vllm.python`` names: ``check_installed`` follows where
    an engine starts. A planned run may lack vLLM altogether.

    Raises:
        ConfigError: ``key`` is the field that an engine cannot run with.
    """
    check_settings(config)
    python = config.rollout.vllm.python
    on_other_nodes = python is not None and (is_planned() or not is_present(python))
    if not on_other_nodes and not (is_planned() and not has_vllm(interpreter_of(config))):
        check_installed(config)


def check_installed(config: ActorConfig) -> None:
    """Check that the engines' interpreter is on this node, and that its vLLM can run the configuration.

    Raises:
        ConfigError: ``key`` is the field that an engine cannot run with.
    """
    chosen, python = config.rollout.vllm.python, interpreter_of(config)
    if not has_vllm(python):
        key, value = ("rollout.engine", "vllm") if chosen is None else ("rollout.vllm.python", chosen)
        raise ConfigError(
            f"rollout.engine is 'vllm', which is not installed for {python}: install it in a separate environment "
            "(docs/index.md), and set rollout.vllm.python to its interpreter",
            key=key,
            value=value,
        )
    if config.router_replay == "rollout" and is_for_cpus(python):
        raise ConfigError(
            f"router_replay is 'rollout', and the vLLM of {python} is its CPU build, which does not return the experts "
            "of tokens: set router_replay to old_log_probs or none, or rollout.engine to megatron",
            key="router_replay",
            value="rollout",
        )


def check_settings(config: ActorConfig) -> None:
    """Check what follows from the configuration alone.

    Raises:
        ConfigError: ``key`` is the field that an engine cannot run with.
    """
    config.check_lengths()
    hf_config_of(config.model)  # the engine is built from it
    _check_adapter_alone(config)
    _check_tensor_parallelism(config)


def _check_adapter_alone(config: ActorConfig) -> None:
    key, model, lora = "rollout.vllm.adapter_alone", config.model, config.model.lora
    if not config.rollout.vllm.adapter_alone:
        return
    why = ""
    if lora is None:
        why = "there is no adapter: set model.lora"
    elif not base_is_frozen(model):
        why = (
            "updates change the base, which the engine would not get: leave model.train_only out, and set "
            "model.transformer.moe_router_bias_update_rate=0 if routers have biases"
        )
    elif model.num_moe_experts and lora.experts:
        why = "vLLM gets no adapters of experts: set model.lora.experts=false"
    elif lora.rank > LORA_RANKS[-1]:
        why = f"model.lora.rank is {lora.rank}, and vLLM computes adapters of rank {LORA_RANKS[-1]} at most"
    if why:
        raise ConfigError(f"{key} is true, and {why}", key=key, value=True)


def _check_tensor_parallelism(config: ActorConfig) -> None:
    key, tp = "rollout.vllm.tp", config.rollout.vllm.tp
    heads = config.model.num_attention_heads
    groups = config.model.num_query_groups or heads
    if heads % tp or (groups % tp and tp % groups):
        text = f"{key} is {tp}, which does not divide {heads} attention heads and {groups} query groups of the model"
        raise ConfigError(text, key=key, value=tp)
