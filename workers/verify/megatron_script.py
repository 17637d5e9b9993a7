"""Megatron-LM's own training scripts, such as ``pretrain_gpt.py``, as programs that ``verify`` trains.

The script runs until it calls ``pretrain``: what it passes there is its model provider, or the config of its model
(megatron-core 0.19), and its forward step. Megatron-LM parses and checks its own arguments, and each rank has them as
its globals.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import io
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from parallel_state import cpu
from parallel_state.cpu.literals import rewrite
from parallel_state.dry_run.transformer_engine import check_counted, engine_kernels
from parallel_state.verify.layouts import Variant, parse_layout
from parallel_state.verify.program import Program, VerifyError, running_file
from workers.model.local_modules import TENorm
from workers.model.local_spec import LocalProvider

_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_LENGTH, _VOCABULARY = 16, 64
_IMAGE = {"img_h": 98, "img_w": 14, "patch_dim": 14}  # 8 tokens with the one of the class, which all layouts divide
_SMALL = {
    "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "kv_channels": 8, "seq_length": _LENGTH,
    "max_position_embeddings": _LENGTH, "vocab_size": _VOCABULARY - 1, "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32, "num_experts": 4,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_state_dim": 8, "mamba_num_groups": 4, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "decoder_seq_length": None,
    "dataloader_seq_length": None, **_IMAGE,
}  # fmt: skip
# What depends on GPUs, on files or on time, or draws other random numbers in every layout.
_FIXED = {
    "tokenizer_type": "NullTokenizer", "mock_data": True, "data_path": None, "load": None, "save": None,
    "tensorboard_dir": None, "wandb_project": "", "distributed_backend": "gloo", "bf16": False, "fp16": False,
    "fp8": None, "fp4": None, "hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_input_jitter_eps": None,
    "gradient_accumulation_fusion": False, "masked_softmax_fusion": False, "tp_comm_overlap": False,
    "overlap_grad_reduce": False, "overlap_param_gather": False, "cross_entropy_loss_fusion": False,
    "use_distributed_optimizer": False, "check_for_nan_in_loss_and_grad": False, "rerun_mode": "disabled",
    "micro_batch_size": 1, "global_batch_size": None, "rampup_batch_size": None, "train_iters": 2,
    "train_samples": None, "lr": 0.1, "min_lr": 0.0, "lr_warmup_fraction": None, "lr_warmup_iters": 0,
    "accumulate_allreduce_grads_in_fp32": False, "cuda_graph_impl": "none", "world_size": None, "rank": 0,
    "num_layers_per_virtual_pipeline_stage": None, "num_virtual_stages_per_pipeline_rank": None,
    "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None,
    "pipeline_model_parallel_layout": None, "moe_permute_fusion": False, "moe_router_fusion": False,
    "apply_rope_fusion": False, "use_precision_aware_optimizer": False,
}  # fmt: skip
_OF_THE_GPU = (
    "apply_rope_fusion", "cross_entropy_loss_fusion", "gradient_accumulation_fusion", "micro_batch_size",
    "moe_permute_fusion",
)  # fmt: skip
"""What a dry run has as it is given: only verify makes the model small, and computes on a CPU."""
_VPP = "virtual_pipeline_model_parallel_size"
_ONE_RANK = {"sequence_parallel": False, "bf16": False, "params_dtype": torch.float32}


class _Called(BaseException):
    """``pretrain`` was called."""


class _Script:
    """A training script.

    Args:
        path: the script.
        arguments: its command line.
        shrinks: whether to make the model small.
    """

    def __init__(self, path: Path, arguments: Sequence[str], shrinks: bool) -> None:
        self._line, self._shrinks = [str(path), *arguments], shrinks
        passed = _passed_to_pretrain(path, self._line, self._parse_and_validate)
        self.forward_step: Any = passed["forward_step_func"]
        self._provider: Any = passed.get("model_provider")
        self._model_type = passed.get("model_type")
        self._model = getattr(passed.get("cfg_container"), "model", None)
        if "cfg_container" not in passed:
            self._read(passed.get("extra_args_provider"), passed.get("args_defaults"))

    def _parse_and_validate(
        self, extra_args_provider: Any = None, ignore_unknown_args: bool = False, args_defaults: Any = None
    ) -> Any:
        """Return what a script parses before it calls ``pretrain``: the arguments of one rank."""
        self._read(extra_args_provider, args_defaults)
        arguments = self.arguments(_ONE_RANK, 1)
        _set_globals(arguments)
        return arguments

    def _read(self, extra: Any, defaults: Mapping[str, Any] | None) -> None:
        self._extra, self._defaults = extra, defaults or {}
        self.given = self._parsed()
        self.rows = 1 if self._shrinks else self.given.micro_batch_size or 1
        self.stages = self._virtual_stages()

    def _parsed(self) -> Any:
        from megatron.training.arguments import parse_args

        with mock.patch.object(sys, "argv", self._line):
            return parse_args(self._extra)

    def _virtual_stages(self) -> int | None:
        given, layers = self.given, self.given.num_layers_per_virtual_pipeline_stage
        if pattern := getattr(given, "hybrid_layer_pattern", None):
            segments = pattern.partition("/")[0].count("|") + 1
            on_rank = segments // given.pipeline_model_parallel_size
            return on_rank if on_rank > 1 else None
        if layers is None or given.num_layers is None:  # Megatron-LM rejects the latter
            stages: int | None = given.num_virtual_stages_per_pipeline_rank
            return stages
        return int(given.num_layers // given.pipeline_model_parallel_size // layers)

    def arguments(self, fields: Mapping[str, Any], ranks: int) -> Any:
        """Return the arguments for a layout.

        Args:
            fields: of the config, as they follow from the layout.
            ranks: the number of ranks.

        Raises:
            VerifyError: Megatron-LM rejects them.
        """
        from megatron.training.arguments import validate_args

        args = self._parsed()
        for name, value in _FIXED.items():
            if hasattr(args, name) and (self._shrinks or name not in _OF_THE_GPU):
                setattr(args, name, value)
        for name, value in (_SMALL if self._shrinks else {}).items():
            if getattr(args, name, None) is not None:
                setattr(args, name, value)
        for name in _AXES.values():
            setattr(args, name, fields.get(name) or (None if name == _AXES["etp"] else 1))
        if self._shrinks:
            args.num_layers = max(self.given.pipeline_model_parallel_size * (self.stages or 1), 2)
            args.num_query_groups = 2 if args.group_query_attention else args.num_query_groups
        args.sequence_parallel, args.world_size = fields["sequence_parallel"], ranks
        args.bf16 = fields["bf16"]
        stages = args.pipeline_model_parallel_size * (fields.get(_VPP) or 1)
        if pattern := getattr(args, "hybrid_layer_pattern", None):
            args.hybrid_layer_pattern = self._divided(pattern, stages)
        elif fields.get(_VPP):
            args.num_virtual_stages_per_pipeline_rank = fields[_VPP]
        # Megatron-LM wants the variable and the capability of some GPUs, and prints what it derives.
        variables = mock.patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1")
        capability = mock.patch.object(torch.cuda, "get_device_capability", lambda *args: (9, 0))
        try:
            with variables, capability, redirect_stdout(io.StringIO()):
                validate_args(args, dict(self._defaults))
        except (AssertionError, ValueError) as error:
            reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line  # an assertion without a text
            raise VerifyError(f"Megatron-LM rejects the arguments of the script: {reason}") from error
        args.padded_vocab_size = -(-(args.vocab_size + 1) // 64) * 64
        args.params_dtype = fields["params_dtype"]
        return args

    def _divided(self, pattern: str, stages: int) -> str:
        """Return a hybrid pattern of layers in equal stages; a small model has a layer of each kind for each stage."""
        layers, *predicting = pattern.split("/")
        if self._shrinks:
            layers = "".join(dict.fromkeys(layers.replace("|", "")))
            layers *= self.given.pipeline_model_parallel_size * (self.stages or 1)
        layers = layers.replace("|", "")
        size = max(len(layers) // stages, 1)
        return "/".join(["|".join(layers[start : start + size] for start in range(0, len(layers), size)), *predicting])

    def config(self, **fields: Any) -> Any:
        """Return the TransformerConfig of a layout; see ``Program``."""
        from megatron.training.arguments import core_transformer_config_from_args

        sizes = {axis: fields.get(name) or 1 for axis, name in _AXES.items()}
        ranks = math.lcm(sizes["tp"] * sizes["cp"], sizes["ep"] * sizes["etp"]) * sizes["pp"]
        if torch.distributed.is_initialized():
            ranks = torch.distributed.get_world_size()
        arguments = self.arguments(fields, ranks)
        if torch.distributed.is_initialized():
            _set_globals(arguments)
        config = core_transformer_config_from_args(arguments)
        if "G" in (getattr(arguments, "hybrid_layer_pattern", None) or ""):
            config.deterministic_mode = True  # gated delta nets in PyTorch
        if self._has_images:
            config.variable_seq_lengths = True  # the model adds the tokens of an image to a row
        for name in ("overlap_p2p_comm", "batch_p2p_comm", "pipeline_dtype"):
            setattr(config, name, fields.get(name, getattr(config, name)))
        return config

    def build(self, config: Any, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
        """Return a stage of the model; see ``Program``."""
        stage = {} if vp_stage is None else {"vp_stage": vp_stage}
        with _layers_without_engine():
            if self._model is not None:
                return _built(self._model, config, pre_process=pre_process, post_process=post_process, **stage)
            chunk = self._provider(pre_process=pre_process, post_process=post_process, config=config, **stage)
        chunk.model_type = self._model_type  # as Megatron-LM's training does
        return chunk

    def batch(self, index: int) -> dict[str, Any]:
        """Return random rows; tokens that do not count are among them if losses are averaged over tokens.

        Those of a model of images (``pretrain_vlm.py``) have an image before the text.
        """
        length, rows = _LENGTH if self._shrinks else self.given.seq_length, self.rows
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(_VOCABULARY - 1, (rows, length + 1), generator=generator)
        mask = torch.ones(rows, length)
        if self.given.calculate_per_token_loss or self.given.eod_mask_loss:
            mask = (torch.rand(rows, length, generator=generator) < 0.7).float()
        row = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "loss_mask": mask}
        row["position_ids"] = torch.arange(length).expand(rows, -1)
        if self.given.create_attention_mask_in_dataloader:
            row["attention_mask"] = torch.ones(rows, 1, length, length).triu(1).bool()
        return self._with_image(row, generator) if self._has_images else row

    @property
    def _has_images(self) -> bool:
        return hasattr(self.given, "freeze_ViT")  # an argument of pretrain_vlm.py

    def _with_image(self, row: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, Any]:
        from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX

        rows, first = self.rows, {"tokens": DEFAULT_IMAGE_TOKEN_INDEX, "labels": 0, "loss_mask": 0.0}
        text = {name: torch.nn.functional.pad(row[name], (1, 0), value=value) for name, value in first.items()}
        text["labels"][:, 0] = row["tokens"][:, 0]
        positions = torch.arange(text["tokens"].shape[1]).expand(rows, -1)
        height, width = (_IMAGE[name] if self._shrinks else getattr(self.given, name) for name in ("img_h", "img_w"))
        return {**text, "position_ids": positions, "image": torch.rand(rows, 3, height, width, generator=generator)}


def script_program(path: str, arguments: Sequence[str], *, shrinks: bool = True) -> tuple[Program, Variant]:
    """Return a training script as a program, and the layout that its arguments ask for.

    Args:
        path: the script, which calls ``megatron.training.pretrain``.
        arguments: its command line.
        shrinks: whether to make the model small.

    Raises:
        VerifyError: there is no such file, no ``megatron.training``, the script raises, or does not call ``pretrain``,
            or the whole model has no ``--seq-length``.
        DryRunError: the whole model stores what is not counted.
    """
    script = _Script(Path(path), arguments, shrinks)
    given = script.given
    if not shrinks:
        check_counted(vars(given))
        if given.seq_length is None:
            raise VerifyError(f"{path} has no --seq-length: give the whole command line of the training", path=path)
    length = _LENGTH if shrinks else given.seq_length
    functions = script.config, script.build, script.forward_step, script.batch
    program = Program(*functions, seq_length=length, micro_batch_size=script.rows)
    sizes = {axis: getattr(given, name, None) for axis, name in _AXES.items()}
    parts = [f"{axis}={size}" for axis, size in sizes.items() if size not in (None, 1) or (axis == "etp" and size)]
    parts += [f"vpp={script.stages}"] * bool(script.stages)
    parts += ["sp"] * bool(given.sequence_parallel and given.tensor_model_parallel_size > 1)
    if given.use_distributed_optimizer:
        parts += ["dp=2", "distopt"]
    return program, parse_layout(",".join(parts) or "dp=2")


def _built(model: Any, config: Any, **stage: Any) -> Any:
    """Return a stage of what a model config of Megatron-LM describes."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import get_args

    changes = {"transformer": config, "vocab_size": get_args().padded_vocab_size, "should_pad_vocab": False}
    if "hybrid_layer_pattern" in {field.name for field in dataclasses.fields(model)}:
        from megatron.core.extensions.transformer_engine import HAVE_TE

        from workers.model.hybrid import local_stack_spec  # older releases of megatron-core have no HybridModel

        changes["hybrid_layer_pattern"] = get_args().hybrid_layer_pattern
        if not HAVE_TE:
            changes["hybrid_stack_spec"] = local_stack_spec(config, changes["hybrid_layer_pattern"])
    model = dataclasses.replace(model, **changes)
    builder = model.get_builder_cls()(model)
    return builder.build_model(ProcessGroupCollection.use_mpu_process_groups(), **stage)


def _passed_to_pretrain(path: Path, line: Sequence[str], parse_and_validate: Callable[..., Any]) -> Mapping[str, Any]:
    """Run a script until it calls ``pretrain``, and return what it passes by the names of the parameters.

    Args:
        path: the script.
        line: its command line.
        parse_and_validate: replaces Megatron-LM's ``parse_and_validate_args``.
    """
    if not path.is_file():
        raise VerifyError(f"there is no file {path}", path=str(path))
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    beside = [script.stem for script in path.resolve().parent.glob("*.py")]
    cpu.install(packages=[module for module in beside if module not in sys.modules])
    if importlib.util.find_spec("megatron.training") is None:
        raise VerifyError(
            f"{path} needs megatron.training, which megatron-core does not contain: put a checkout of Megatron-LM of "
            "the same version on PYTHONPATH, or name a Program as FILE.py:NAME"
        )
    import megatron.training as training
    from megatron.training import arguments

    passed: dict[str, Any] = {}
    signature = inspect.signature(training.pretrain)

    def pretrain(*args: Any, **kwargs: Any) -> None:
        passed.update(signature.bind(*args, **kwargs).arguments)
        raise _Called

    logging.getLogger("megatron").setLevel(logging.WARNING)
    module = ModuleType("__main__")
    module.__file__ = str(path)
    with (
        running_file(str(path)),
        engine_kernels(),  # a config may ask for them
        mock.patch.object(training, "pretrain", pretrain),
        mock.patch.object(arguments, "parse_and_validate_args", parse_and_validate, create=True),
        mock.patch.object(sys, "argv", list(line)),
    ):
        try:
            exec(compile(rewrite(path.read_bytes(), str(path)), str(path), "exec"), vars(module))
        except _Called:
            return passed
    raise VerifyError(
        f"{path} does not call megatron.training.pretrain; name a Program as FILE.py:NAME", path=str(path)
    )


def _set_globals(arguments: Any) -> None:
    """Set the globals of Megatron-LM on this rank."""
    from megatron.core import Timers
    from megatron.core.rerun_state_machine import (
        RerunMode,
        destroy_rerun_state_machine,
        initialize_rerun_state_machine,
    )
    from megatron.training import global_vars

    for name in [variable for variable in vars(global_vars) if variable.startswith("_GLOBAL_")]:
        setattr(global_vars, name, None)
    arguments.rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    global_vars.set_args(arguments)
    global_vars._GLOBAL_TIMERS = Timers(-1, "max")  # of which none is on
    destroy_rerun_state_machine()  # of the process that ran the script
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)


@contextmanager
def _layers_without_engine() -> Iterator[None]:
    """Return a context manager in which specs of Transformer Engine's layers have those of plain PyTorch."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import transformer_block

    if specs.HAVE_TE:
        yield
        return
    provider = LocalProvider()
    changes: dict[str, Any] = {"HAVE_TE": True, "TESpecProvider": LocalProvider, "TENorm": TENorm}
    image_layers: dict[str, Any] = {
        "HAVE_TE": True,
        "TENorm": TENorm,
        "TEDotProductAttention": provider.core_attention(),
        "TELayerNormColumnParallelLinear": provider.column_parallel_layer_norm_linear(),
        "TERowParallelLinear": provider.row_parallel_linear(),
    }
    with ExitStack() as patches:
        patches.enter_context(mock.patch.multiple(specs, create=True, **changes))
        patches.enter_context(mock.patch.object(transformer_block, "LayerNormImpl", TENorm))
        if block := sys.modules.get("megatron.core.models.hybrid.hybrid_block"):
            patches.enter_context(mock.patch.object(block, "TENorm", TENorm))
        for name in ("multimodal.llava_spec", "multimodal.llava_model", "vision.vit_layer_specs"):
            if module := sys.modules.get(f"megatron.core.models.{name}"):
                patches.enter_context(mock.patch.multiple(module, create=True, **image_layers))
        if clip := sys.modules.get("megatron.core.models.vision.clip_vit_model"):
            build = clip.CLIPViTModel.__init__
            norms = tuple(TENorm if value is clip.NORM_IMPL else value for value in build.__defaults__)
            patches.enter_context(mock.patch.object(build, "__defaults__", norms))
        yield
