"""Faults that are reported of Megatron-LM, most in its issue 7452, and what their open fixes repair.

    python -m examples.verify.findings

For each fault: a program, the layouts in which it differs from one process, and those in which it still does with the
change that the pull request describes, written anew here.
"""

import contextlib
import dataclasses
import logging
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch

from parallel_state import cpu

_PROGRAMS = ("gallery", "gpt", "hybrid", "mla", "moe")
cpu.install(packages=[name for name in _PROGRAMS if name not in sys.modules])
sys.path.insert(0, str(Path(__file__).parent))

import gallery  # noqa: E402
import gpt  # noqa: E402
import mla  # noqa: E402
import moe  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec_for_backend  # noqa: E402
from megatron.core.models.multimodal import llava_model  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.ssm.gated_delta_net import GatedDeltaNet  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    gather_split_1d_tensor,
    get_cuda_rng_tracker,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
    split_tensor_into_1d_equal_chunks,
)
from megatron.core.transformer import (  # noqa: E402
    ModuleSpec,
    multi_latent_attention,
    multi_token_prediction,
    transformer_block,
)
from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType, ModelType  # noqa: E402
from megatron.core.transformer.moe import router  # noqa: E402
from megatron.core.utils import unwrap_model  # noqa: E402

from parallel_state.releases import language_models  # noqa: E402
from parallel_state.verify import Program, Verifier, VerifyError  # noqa: E402
from parallel_state.verify.training import Training  # noqa: E402
from workers.model.local_modules import TENorm  # noqa: E402
from workers.model.local_spec import LocalProvider, block_spec, layer_spec  # noqa: E402

HAS_HYBRID = len(language_models()) > 1  # megatron-core 0.19 and later
if HAS_HYBRID:
    import hybrid


def total_over(group, value):
    total = value.clone()
    torch.distributed.all_reduce(total, group=group)
    return total


# Finding 2: logits that are gathered, because of parallel_output=False, go into a loss of one rank's part of them.
@contextlib.contextmanager
def loss_of_own_logits():
    compute = GPTModel.compute_language_model_loss

    def computed(self, labels, logits):
        own = scatter_to_tensor_model_parallel_region(logits, group=self.pg_collection.tp)
        return compute(self, labels, own.clone())  # the loss overwrites it

    with mock.patch.object(GPTModel, "compute_language_model_loss", computed):
        yield


# Finding 3 and PR 7498: the loss of multi-token prediction is divided by the tokens of a micro-batch on a rank.
def predicting(config, pre_process, post_process, vp_stage=None, **arguments):
    stage = parallel_state.get_pipeline_model_parallel_rank()
    spec = block_spec(config, "local", stage, vp_stage)
    predictors = get_gpt_mtp_block_spec_for_backend(config, spec, LocalProvider(), vp_stage=vp_stage)
    return gallery.gpt_model(
        config, pre_process, post_process, vp_stage, spec, share_embeddings_and_output_weights=True,
        mtp_block_spec=predictors, **arguments,
    )  # fmt: skip


def with_mask(model, data):
    mask = data["loss_mask"]
    return model(data["tokens"], data["position_ids"], None, labels=data["labels"], loss_mask=mask)


mtp_loss = gallery.with_step(
    with_mask,
    model_provider=predicting,
    config=lambda **parallel: gpt.config(mtp_num_layers=1, mtp_loss_scaling_factor=1.0, **parallel),
)


@contextlib.contextmanager
def counts_over_cp():
    roll = multi_token_prediction.roll_tensor

    def rolled(tensor, *args, cp_group=None, **options):
        result, count = roll(tensor, *args, cp_group=cp_group, **options)
        if cp_group is None or cp_group.size() == 1 or not tensor.is_floating_point() or tensor.dim() != 2:
            return result, count
        before = tensor.sum()  # Megatron multiplies by it
        return result, total_over(cp_group, count) * before / total_over(cp_group, before)

    with mock.patch.object(multi_token_prediction, "roll_tensor", rolled):
        yield


# Findings 4 to 7 are of models that have process groups of their own, beside Megatron's global ones.
GLOBAL_GROUP = "_TENSOR_MODEL_PARALLEL_GROUP"  # simulated ranks have one each


def other_group():
    """Return ranks of several replicas, such as 0 and 2 in tp=2,dp=2, if there are as many as in tp."""
    replicas = parallel_state.get_data_parallel_group()
    size = parallel_state.get_tensor_model_parallel_world_size()
    return replicas if replicas.size() == size else parallel_state.get_tensor_model_parallel_group()


def global_group(group):
    return mock.patch.object(parallel_state, GLOBAL_GROUP, group)


class TrainingAmongOthers(Training):
    """Forward and backward with another global tensor-parallel group than the model has."""

    def forward_backward(self, step):
        own = parallel_state.get_tensor_model_parallel_group()
        with global_group(own):  # until the forward step changes it
            return super().forward_backward(step)


class AmongOthers(Program):
    """A program whose ``model_provider`` takes groups: those of the layout, while the global one is another."""

    trained_by: ClassVar[Any] = TrainingAmongOthers


def among_others(program, model_provider, **changes):
    def build(*args):
        groups = ProcessGroupCollection.use_mpu_process_groups()
        with global_group(other_group()):
            return model_provider(*args, pg_collection=groups)

    def forward_step(data_iterator, model):
        vars(parallel_state)[GLOBAL_GROUP] = other_group()
        return program.forward_step(data_iterator, model)

    fields = vars(program) | {"model_provider": build, "forward_step": forward_step} | changes
    return AmongOthers(**fields)


def own_group_in(module, method):
    """Return a change: calls in a method that name no group have that of the module, as though they named it."""
    call = getattr(module, method)

    def called(self, *args, **arguments):
        groups = arguments.get("pg_collection") or getattr(self, "pg_collection", None)
        with global_group(groups.tp if groups else self.tp_group):
            return call(self, *args, **arguments)

    return partial(mock.patch.object, module, method, called)


# Finding 4 and PR 6760: with FP8, a layer that predicts tokens divides what it saves for recomputation among the ranks
# of the global group. Transformer Engine's function is written anew; FP8 itself is not computed here.
class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, group, hidden, *others):
        ctx.function, ctx.group, ctx.shape = function, group, hidden.shape
        ctx.save_for_backward(split_tensor_into_1d_equal_chunks(hidden, new_buffer=True, tp_group=group), *others)
        with torch.no_grad():
            return function(hidden, *others)

    @staticmethod
    def backward(ctx, *gradients):
        part, *others = ctx.saved_tensors
        inputs = [gather_split_1d_tensor(part, tp_group=ctx.group).view(ctx.shape), *others]
        inputs = [
            None if tensor is None else tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs
        ]
        with torch.enable_grad():
            outputs = ctx.function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0] is not None]
        torch.autograd.backward(*zip(*pairs, strict=True))
        return None, None, *(None if tensor is None else tensor.grad for tensor in inputs)


def te_checkpoint(function, is_distributed, rng_tracker, group, *inputs):
    return Recomputed.apply(function, group, *inputs)


for _module in ("extensions.transformer_engine", "recompute", "transformer.transformer_block"):
    if f"megatron.core.{_module}" in sys.modules:
        sys.modules[f"megatron.core.{_module}"].te_checkpoint = te_checkpoint


def as_many_tokens_on_each_rank(index):  # so that finding 3, with which tokens are counted on a rank, does not differ
    mask = torch.ones(1, gpt.LENGTH)
    mask[0, [0, gpt.LENGTH // 4 + 1]] = 0
    return gpt.batch(index) | {"loss_mask": mask.index_select(1, gpt.own_positions())}


def recomputed(fp8=None, **parallel):
    return gpt.config(
        mtp_num_layers=1, fp8=fp8, fp8_recipe="tensorwise", recompute_granularity="full", recompute_method="uniform",
        recompute_num_layers=1, distribute_saved_activations=True, **parallel,
    )  # fmt: skip


recomputation = among_others(mtp_loss, predicting, config=recomputed, batch=as_many_tokens_on_each_rank)
mtp_recomputation = dataclasses.replace(recomputation, config=partial(recomputed, "hybrid"))


# Finding 5: the padding mask is divided over the global group. Its mean over valid tokens is exact in the z-loss.
def with_z_loss(**parallel):
    config = moe.config(**parallel)
    config.moe_z_loss_coeff, config.moe_router_enable_expert_bias = 1.0, False
    return config


# Finding 10 and PR 7481: with a padding mask, a rank's tokens are counted after the sum over ranks has replaced them.
def padded(model, data):
    mask = data["loss_mask"] == 0
    return model(data["tokens"], data["position_ids"], None, labels=data["labels"], padding_mask=mask)


masked_routing = gallery.with_step(padded, config=gallery.without_bias)
scattered_mask = among_others(masked_routing, gallery.gpt_model, config=with_z_loss)


@contextlib.contextmanager
def counts_before_the_sum():
    count = router.get_tokens_per_expert_and_token_count

    def counted(routing_map, reduce_group, topk=None, with_padding_mask=False):
        everywhere, own, total = count(routing_map, reduce_group, topk, with_padding_mask)
        return everywhere, routing_map.sum() / topk if with_padding_mask else own, total

    with mock.patch.object(router, "get_tokens_per_expert_and_token_count", counted):
        yield


# Finding 6: the projections of cross attention are divided over the global group.
def attending_to_context(config, pre_process, post_process, vp_stage=None, **arguments):
    spec = block_spec(config, "local", parallel_state.get_pipeline_model_parallel_rank(), vp_stage)
    provider = LocalProvider()
    cross_attention = CrossAttentionSubmodules(
        linear_q=provider.column_parallel_linear(), linear_kv=provider.column_parallel_linear(),
        core_attention=provider.core_attention(), linear_proj=provider.row_parallel_linear(),
    )  # fmt: skip
    for layer in spec.layer_specs:
        layer.submodules.pre_cross_attn_layernorm = provider.layer_norm()
        layer.submodules.cross_attention = ModuleSpec(
            CrossAttention, {"attn_mask_type": AttnMaskType.no_mask}, cross_attention
        )
        layer.submodules.cross_attn_bda = get_bias_dropout_add
    return gallery.gpt_model(config, pre_process, post_process, vp_stage, spec, **arguments)


def with_context(index):
    context = torch.randn(1, gpt.LENGTH, 32, generator=torch.Generator().manual_seed(index))
    return gpt.batch(index) | {"context": context.index_select(1, gpt.own_positions())}


def of_context(model, data):
    context, own = data["context"].transpose(0, 1).contiguous(), unwrap_model(model)
    if own.config.sequence_parallel:
        context = scatter_to_sequence_parallel_region(context, group=own.pg_collection.tp)
    inputs = {"labels": data["labels"], "extra_block_kwargs": {"context": context}}
    return model(data["tokens"], data["position_ids"], None, **inputs)


cross_attention = among_others(gallery.with_step(of_context), attending_to_context, batch=with_context)


# Finding 7: a multimodal model divides its embeddings over the global group.
def multimodal(config, pre_process, post_process, vp_stage=None, pg_collection=None):
    spec, attention = layer_spec(config, with_experts=False), LocalProvider().core_attention()
    engine = {"HAVE_TE": True, "TEDotProductAttention": attention}  # Megatron requires it for sequence parallelism
    no_images = {
        "vision_transformer_config": SimpleNamespace(vision_model_type="clip"),
        "vision_transformer_layer_spec": None,
        "vision_projection_config": None,
        "vision_projection_layer_spec": None,
        "drop_vision_class_token": False,
        "add_encoder": False,
    }
    with (
        mock.patch.multiple(llava_model, create=True, **engine),
        mock.patch.object(transformer_block, "LayerNormImpl", TENorm),
    ):
        model = llava_model.LLaVAModel(
            config, spec, gpt.VOCABULARY, gpt.LENGTH, language_position_embedding_type="rope", pre_process=pre_process,
            post_process=post_process, pg_collection=pg_collection, vp_stage=vp_stage, **no_images,
        )  # fmt: skip
    model.model_type = ModelType.encoder_or_decoder  # as megatron.training sets it
    return model


def of_text(model, data):
    unwrap_model(model).encoder_hidden_state = torch.empty(0, 1, 32)  # no images
    inputs = {"input_ids": data["tokens"], "position_ids": data["position_ids"], "labels": data["labels"]}
    inputs |= {"loss_mask": data["loss_mask"], "num_image_tiles": torch.empty(0, dtype=torch.int)}
    return model(images=None, attention_mask=None, **inputs)[0]


scattered_embeddings = among_others(gallery.with_step(of_text), multimodal)


# Finding 11: each rank has some heads of a gated delta net, and the gradient of the norm after them is not summed. The
# convolution starts with the same values on all ranks, which is another fault, and is mended here.
def with_delta_nets(build, *args):
    model = build(*args)
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            with get_cuda_rng_tracker().fork():
                torch.nn.init.uniform_(module.conv1d.weight, -0.5, 0.5)
    return model


@contextlib.contextmanager
def summed_out_norm():
    create = GatedDeltaNet.__init__

    def created(self, *args, **options):
        create(self, *args, **options)
        if not self.config.sequence_parallel:
            self.out_norm.weight.register_hook(partial(total_over, self.tp_group))

    with mock.patch.object(GatedDeltaNet, "__init__", created):
        yield


# Finding 1 and PR 7466: labels are smoothed over the whole vocabulary.
@contextlib.contextmanager
def smoothing_over_the_vocabulary():
    def smoothed(logits, labels, smoothing):
        whole = gather_from_tensor_model_parallel_region(logits)
        logarithms = whole.float().log_softmax(-1)
        share = smoothing * whole.shape[-1] / (whole.shape[-1] - 1)
        right = logarithms.gather(-1, labels[..., None]).squeeze(-1)
        return -(1 - share) * right - share * logarithms.mean(-1)

    with mock.patch.object(gallery, "vocab_parallel_cross_entropy", smoothed):
        yield


# Finding 8 and PR 7530: the offsets of attention's softmax are marked as divided.
@contextlib.contextmanager
def marked_sinks():
    create = DotProductAttention.__init__

    def created(self, *args, **options):
        create(self, *args, **options)
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    with mock.patch.object(DotProductAttention, "__init__", created):
        yield


# Finding 9 and PR 7513: a loss is divided by the tokens of the whole sequence, and multiplied by cp: Megatron averages.
@contextlib.contextmanager
def tokens_of_the_sequence():
    calculate = schedules.forward_step_calc_loss

    def calculated(model, output, loss, config, *args, **options):
        def whole(tensor):
            total, tokens, report = loss(tensor)
            group = parallel_state.get_context_parallel_group()
            return total * group.size(), total_over(group, tokens), report

        return calculate(model, output, whole, config, *args, **options)

    with mock.patch.object(schedules, "forward_step_calc_loss", calculated):
        yield


# Issue 1699 and PR 6839: all tp ranks share one rotary key, and its gradient is not summed over them.
@contextlib.contextmanager
def summed_shared_key():
    rotate = multi_latent_attention.apply_rotary_pos_emb

    def rotated(tensor, *args, **options):
        result = rotate(tensor, *args, **options)
        return copy_to_tensor_model_parallel_region(result) if tensor.shape[-2] == 1 else result

    with mock.patch.object(multi_latent_attention, "apply_rotary_pos_emb", rotated):
        yield


FINDINGS = {
    "label_smoothing": ("1", gallery.label_smoothing, "#7466", smoothing_over_the_vocabulary),
    "gathered_logits": ("2", gallery.gathered_logits, "a loss of the rank's logits", loss_of_own_logits),
    "mtp_loss": ("3", mtp_loss, "#7498", counts_over_cp),
    "mtp_recomputation": (
        "4",
        mtp_recomputation,
        "#6760",
        own_group_in(multi_token_prediction.MultiTokenPredictionLayer, "_checkpointed_forward"),
    ),
    "recomputation": ("4, without FP8", recomputation, "", None),
    "scattered_mask": ("5", scattered_mask, "the model's group", own_group_in(GPTModel, "_preprocess")),
    "cross_attention": ("6", cross_attention, "the model's group", own_group_in(CrossAttention, "__init__")),
    "scattered_embeddings": (
        "7",
        scattered_embeddings,
        "the model's group",
        own_group_in(llava_model.LLaVAModel, "_process_embedding_token_parallel"),
    ),
    "attention_sinks": ("8", gallery.attention_sinks, "#7530", marked_sinks),
    "counted_on_each_rank": ("9", gallery.counted_on_each_rank, "#7513", tokens_of_the_sequence),
    "masked_routing": ("10", masked_routing, "#7481", counts_before_the_sum),
}
"""Program -> the number of the finding, the program, the pull request or what else is done, and its change."""

if HAS_HYBRID:
    delta_net = hybrid.hybrid("G-*-", **hybrid.delta_net.config.args[1])
    out_norm = dataclasses.replace(delta_net, model_provider=partial(with_delta_nets, delta_net.model_provider))
    FINDINGS["out_norm"] = ("11", out_norm, "its sum over tp", summed_out_norm)
FINDINGS["mla"] = ("issue 1699", mla.program, "#6839", summed_shared_key)


def differing(program):
    """Return the layouts that differ, of those in which the model can be built, and how many those are."""
    verifier = Verifier(program, steps=1)
    verifier.locates = False
    layouts = verifier.default_layouts() + ["tp=2,dp=2"] * isinstance(program, AmongOthers)
    outcomes = [verifier.verify(layout) for layout in layouts]
    built = [outcome for outcome in outcomes if outcome.failure is None]
    return [outcome.layout for outcome in built if not outcome.equal], len(built)


def main():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print("| finding | program | differs in | with |\n|---|---|---|---|")
    for name in sys.argv[1:] or FINDINGS:
        finding, program, request, change = FINDINGS[name]
        program = program if name == "out_norm" else program.smaller(num_layers=2)
        repaired = "-"
        try:
            layouts, count = differing(program)
            if change is not None:
                with change():
                    still, _ = differing(program)
                repaired = f"{request}: " + (f"differs in {'; '.join(still)}" if still else "equal in all")
        except VerifyError as error:
            print(f"{name} cannot be verified with this Megatron: {error}", file=sys.stderr)
            continue
        print(f"| {finding} | `{name}` | {len(layouts)} of {count}: {'; '.join(layouts)} | {repaired} |", flush=True)


if __name__ == "__main__":
    main()
