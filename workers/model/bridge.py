"""Models that Megatron-Bridge builds, reads and writes: ``model.provider=bridge``, an optional library.

Bridge maps ``config.json`` to Megatron's configuration, builds the layers, and converts weights between the names and
shapes of Hugging Face and of Megatron. Axes, dtype and what training relies on are this project's, as for its own
models. A chunk has its ``BridgeWeights`` as attribute ``bridge``, which ``workers.weights.hf`` uses in the place of a
model family.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.moe.router import Router
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from mcontroller.errors import ConfigError, DataError
from parallel_state.agreement import all_gather_values
from parallel_state.megatron import MegatronContext
from workers.config import ModelConfig, ParallelConfig
from workers.config.fit import padded_vocab_size
from workers.lora.adapters import Adapters
from workers.model.local_spec import block_spec
from workers.model.transformer_config import checked_fields, parallel_fields
from workers.model.value_head import ValueHead
from workers.weights.hf.config import read_config
from workers.weights.hf.family import ModelFamily
from workers.weights.hf.files import WeightFiles
from workers.weights.hf.hub import local_directory
from workers.weights.hf.names import OUTPUT_LAYER
from workers.weights.shards import WeightShard, whole_shard
from workers.weights.whole_tensors import StreamedTensors

# What Bridge turns on for training on GPUs with Transformer Engine, and this project's layers and losses do without.
_WITHOUT_ENGINE = {
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "moe_permute_fusion": False,
    "moe_shared_expert_overlap": False,
}
_DIGITS = "0123456789"
_OF_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_ALWAYS = {
    "cross_entropy_loss_fusion": False,
    "moe_router_bias_update_rate": 0.0,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "alltoall",
    "mtp_num_layers": None,
    "should_pad_vocab": False,
    "use_cpu_initialization": False,
}


class BridgeModel:
    """The provider of a model that Megatron-Bridge builds from the directory ``model.hf_path``.

    Args:
        model: ``hf_path``, ``dtype``, dropout and ``transformer`` are used; all else is in ``config.json``.
        parallel: the axes.
        context: the layout that the model is built in.
        value_head: whether the model gets a value head, for which its output layer is not that of its embedding.

    Raises:
        ConfigError: Bridge is not installed, or does not have the model; a field of ``model.transformer`` is unknown;
            or the model needs layers of Transformer Engine where there is none.
    """

    def __init__(
        self, model: ModelConfig, parallel: ParallelConfig, context: MegatronContext, value_head: bool
    ) -> None:
        _check_installed()
        self.bridge = _opened(local_directory(str(model.hf_path)))
        self.config = _provider_of(self.bridge)
        dtype = getattr(torch, model.dtype)
        fields = {
            **_ALWAYS,
            **parallel_fields(parallel),
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "autocast_dtype": dtype,
            "bf16": dtype is torch.bfloat16,
            "fp16": dtype is torch.float16,
            "vocab_size": padded_vocab_size(model.vocab_size, parallel.tp),
            "seq_length": model.max_sequence_length,
            "attention_dropout": model.attention_dropout,
            "hidden_dropout": model.hidden_dropout,
        }
        if value_head:
            fields["share_embeddings_and_output_weights"] = False
        self.value_head = value_head
        if not (torch.cuda.is_available() and _has_engine()):
            fields |= _WITHOUT_ENGINE
        set_elsewhere = dict.fromkeys(fields.keys() - _ALWAYS.keys() - _WITHOUT_ENGINE.keys(), "model.* and parallel.*")
        fields |= checked_fields(type(self.config), model.transformer, "model.transformer", set_elsewhere)
        for name, value in fields.items():
            if hasattr(self.config, name):
                setattr(self.config, name, value)
        self.config._pg_collection = context.pg
        if not _has_engine():
            _use_local_layers(self.config, context, str(model.hf_path))
        try:
            self.config.finalize()
        except (AssertionError, ValueError) as error:
            raise ConfigError(f"Megatron-Bridge rejects the model: {error}", key="model", value=model) from error

    def __call__(self, pre_process: bool, post_process: bool, vp_stage: int | None) -> nn.Module:
        """Return one chunk; see ``workers.model.build.ModelProvider``."""
        chunk = self.config.provide(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
        if not isinstance(chunk, GPTModel):
            raise ConfigError(
                f"model.provider is 'bridge', which builds a {type(chunk).__name__}: only a GPTModel can be trained",
                key="model.provider",
                value="bridge",
            )
        chunk.bridge = BridgeWeights(self.bridge, self.value_head)
        return chunk


class BridgeWeights:
    """The conversion of weights between a model's chunks and Hugging Face; every method is a collective.

    Args:
        bridge: Bridge's own object for the checkpoint.
        value_head: whether the model ends in a value head.

    Attributes:
        value_head: as passed.
    """

    def __init__(self, bridge: Any, value_head: bool) -> None:
        self._bridge, self.value_head = bridge, value_head
        self._parts: list[WeightShard] = []

    def load(self, chunks: Sequence[nn.Module]) -> frozenset[str]:
        """Fill the chunks from the checkpoint, and return the names of tensors left out, as ``load_hf``.

        Raises:
            DataError: Bridge cannot: a tensor is missing, or has another shape.
        """
        path = str(self._bridge.hf_pretrained.model_name_or_path)
        _register_classes(chunks)
        try:
            with _without_own_modules(chunks):
                self._bridge.load_hf_weights(list(chunks))
        except (AssertionError, AttributeError, KeyError, RuntimeError, ValueError) as error:
            raise DataError(f"Megatron-Bridge cannot load {path}: {error}", path=path) from error
        if not self.value_head:
            return frozenset()
        files = WeightFiles(Path(path))
        if ModelFamily.value_head not in files.names:
            return frozenset({OUTPUT_LAYER})
        for head in _value_heads(chunks):
            if files.shape(ModelFamily.value_head) != tuple(head.weight.shape):
                shape = list(files.shape(ModelFamily.value_head))
                text = f"{ModelFamily.value_head} at {path} is {shape}, the model's is {list(head.weight.shape)}"
                raise DataError(text, path=path)
            head.weight.data.copy_(files.read(ModelFamily.value_head))
        return frozenset()

    def names(self, chunks: Sequence[nn.Module]) -> Callable[[str], tuple[str, ...]]:
        """Return what maps Megatron's name of a weight to those of its tensors in the files; see ``hf_names_of``."""
        hf_names: dict[str, tuple[str, ...]] = {}
        for task in filter(None, self._tasks(chunks)):
            names = task.mapping.hf_param
            of_weight = (names,) if isinstance(names, str) else tuple(names.values())
            hf_names[task.global_param_name] = of_weight
            hf_names.setdefault(task.global_param_name.rstrip(_DIGITS), of_weight)  # an expert of this rank for others
        return lambda name: hf_names.get(name) or hf_names.get(name.rstrip(_DIGITS), ())

    def _tasks(self, chunks: Sequence[nn.Module]) -> list[Any]:
        _register_classes(chunks)
        with _without_own_modules(chunks):
            tasks: list[Any] = self._bridge.get_conversion_tasks(list(chunks))
        return tasks

    def exported(self, chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Iterate over all tensors of the whole model under their names in the files, on every rank.

        Weights have the adapters merged that are enabled.
        """
        chunk = unwrap_model(chunks[0])
        tasks = self._tasks(chunks)
        for name, tensor in self._bridge.export_hf_weights(
            list(chunks),
            cpu=False,
            show_progress=False,
            merge_adapter_weights=False,
            conversion_tasks=(_merged(task, chunks) for task in tasks),
        ):
            padded = name.endswith(_OF_VOCABULARY) and len(tensor) == chunk.vocab_size
            yield name, tensor[: chunk.unpadded_vocab_size] if padded else tensor
        if self.value_head:
            local_head = next((head.weight.detach().cpu() for head in _value_heads(chunks)), None)
            head = next(value for value in all_gather_values(local_head) if value is not None)
            yield ModelFamily.value_head, head.to(torch.cuda.current_device())

    def tensors(self, chunks: Sequence[nn.Module], bucket_bytes: int) -> StreamedTensors:
        """Return the tensors for engines and export, to be read as often as they change."""
        return StreamedTensors(functools.partial(self.exported, chunks), bucket_bytes, collective=True)

    def shards(self, chunks: Sequence[nn.Module]) -> list[WeightShard]:
        """Return whole tensors as this rank's parts, of which each rank keeps its share, with the current values.

        All ranks together keep one copy of the model, in the same memory at every call.
        """
        share = dist.get_world_size()
        mine = (tensor for number, tensor in enumerate(self.exported(chunks)) if number % share == dist.get_rank())
        kept = {shard.part.name: shard for shard in self._parts}
        self._parts = [
            whole_shard(name, kept[name].param.copy_(tensor) if name in kept else tensor.clone())
            for name, tensor in mine
        ]
        return self._parts


def _check_installed() -> None:
    if importlib.util.find_spec("megatron.bridge") is None:
        raise ConfigError(
            "model.provider is 'bridge', and megatron-bridge is not installed: install mcontroller[bridge] with Python "
            "3.12 (docs/models.md), or set model.provider=native",
            key="model.provider",
            value="bridge",
        )


def _merged(task: Any, chunks: Sequence[nn.Module]) -> Any:
    """Return a conversion of Bridge with the weight that has its adapter merged."""
    if task is None or task.param_weight is None:
        return task
    adapters = getattr(unwrap_model(chunks[task.vp_stage]), "lora", None)
    merge = None if adapters is None else adapters.merging(task.param_name)
    return task if merge is None else dataclasses.replace(task, param_weight=merge(task.param_weight))


def _value_heads(chunks: Sequence[nn.Module]) -> Iterator[ValueHead]:
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, ValueHead))


@contextlib.contextmanager
def _without_own_modules(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager in which the chunks have no modules that Bridge does not know: adapters and a value head."""
    modules = [unwrap_model(chunk)._modules for chunk in chunks]
    kept = [dict(children) for children in modules]
    for children in modules:
        for name in [name for name, child in children.items() if isinstance(child, Adapters | ValueHead)]:
            del children[name]
    try:
        yield
    finally:
        for children, before in zip(modules, kept, strict=True):
            children.clear()
            children.update(before)


def _has_engine() -> bool:
    """Whether Megatron uses Transformer Engine: on a GPU, or a stand-in on a CPU."""
    return importlib.import_module("megatron.core.models.gpt.gpt_layer_specs").HAVE_TE


def _register_classes(chunks: Sequence[nn.Module]) -> None:
    """Register classes of modules that are whole on every rank: Bridge knows those of Megatron by their names."""
    mapping = importlib.import_module("megatron.bridge.models.conversion.param_mapping").AutoMapping
    for module in (module for chunk in chunks for module in chunk.modules() if isinstance(module, Router | Linear)):
        mapping.register_module_type(type(module).__name__, "replicated")


def _opened(path: str) -> Any:
    bridge = importlib.import_module("megatron.bridge").AutoBridge
    try:
        if not str(read_config(path).get("architectures")).endswith("ForSequenceClassification']"):
            return bridge.from_hf_pretrained(path)
        pretrained = importlib.import_module("megatron.bridge.models.hf_pretrained.causal_lm").PreTrainedCausalLM
        # A model with a value head, which is built like one with logits.
        classifier = pretrained.from_pretrained(path, trust_remote_code=False)
        kinds = classifier.config.architectures
        classifier.config.architectures = [kind.partition("For")[0] + "ForCausalLM" for kind in kinds]
        return bridge(classifier)
    except ValueError as error:
        text = (
            f"Megatron-Bridge has no model for {path}: {error}; model.provider=native uses the families of this package"
        )
        raise ConfigError(text, key="model.hf_path", value=path) from error


def _provider_of(bridge: Any) -> Any:
    """Return Bridge's provider of a model, with which Bridge builds it."""
    config = bridge.hf_pretrained.config
    rope = getattr(config, "rope_parameters", None) or {}
    if "partial_rotary_factor" in rope and not hasattr(config, "partial_rotary_factor"):
        config.partial_rotary_factor = rope["partial_rotary_factor"]  # where transformers had it until 5.13
    return bridge.to_megatron_provider(load_weights=False)


def _use_local_layers(config: Any, context: MegatronContext, path: str) -> None:
    """Replace Transformer Engine's layers of a plain GPT by local ones, which have the same names."""
    spec = config.transformer_layer_spec
    plain = getattr(spec, "func", None) is get_gpt_decoder_block_spec or getattr(spec, "__name__", "") == (
        "default_layer_spec"
    )
    if not plain:
        raise ConfigError(
            f"Megatron-Bridge's layers of the model at {path} need Transformer Engine, which needs a GPU",
            key="model.provider",
            value="bridge",
        )

    def local(config: Any, vp_stage: int | None = None) -> Any:
        return block_spec(config, "local", context.pg.pp.rank(), vp_stage)

    config.transformer_layer_spec = local
