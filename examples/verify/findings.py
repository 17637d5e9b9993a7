"""Faults that are reported of Megatron-LM, most in its issue 7452, and what their open fixes repair.

    python -m examples.verify.findings

For each fault: a program, the layouts in which it differs from one process, and those in which it still does with the
change that the pull request describes, written anew here.
"""

import contextlib
import sys
import warnings
from pathlib import Path
from unittest import mock

import torch

from parallel_state import cpu

cpu.install(packages=["gpt", "moe", "mla", "gallery"])
sys.path.insert(0, str(Path(__file__).parent))

import gallery  # noqa: E402
import gpt  # noqa: E402
import mla  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec_for_backend  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import multi_latent_attention, multi_token_prediction  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.moe import router  # noqa: E402

from parallel_state.verify import Verifier  # noqa: E402
from workers.model.local_spec import LocalProvider, block_spec  # noqa: E402


def total_over(group, value):
    total = value.clone()
    torch.distributed.all_reduce(total, group=group)
    return total


# Finding 3 and PR 7498: the loss of multi-token prediction is divided by the tokens of a micro-batch on a rank.
def predicting(config, pre_process, post_process, vp_stage=None):
    stage = parallel_state.get_pipeline_model_parallel_rank()
    spec = block_spec(config, "local", stage, vp_stage)
    predictors = get_gpt_mtp_block_spec_for_backend(config, spec, LocalProvider(), vp_stage=vp_stage)
    names = {"is_inference_column_parallel_linear": lambda layer: False}  # it fails without Transformer Engine
    with mock.patch.multiple(multi_token_prediction, create=True, **names):
        return GPTModel(
            config, spec, gpt.VOCABULARY, gpt.LENGTH, pre_process=pre_process, post_process=post_process,
            share_embeddings_and_output_weights=True, position_embedding_type="rope", vp_stage=vp_stage,
            mtp_block_spec=predictors,
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


# PR 7481: with a padding mask, a rank's tokens are counted after their sum over the ranks has replaced them.
def padded(model, data):
    mask = data["loss_mask"] == 0
    return model(data["tokens"], data["position_ids"], None, labels=data["labels"], padding_mask=mask)


masked_routing = gallery.with_step(padded, config=gallery.without_bias)


@contextlib.contextmanager
def counts_before_the_sum():
    count = router.get_tokens_per_expert_and_token_count

    def counted(routing_map, reduce_group, topk=None, with_padding_mask=False):
        everywhere, own, total = count(routing_map, reduce_group, topk, with_padding_mask)
        return everywhere, routing_map.sum() / topk if with_padding_mask else own, total

    with mock.patch.object(router, "get_tokens_per_expert_and_token_count", counted):
        yield


# PR 7466: labels are smoothed over the whole vocabulary.
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


# PR 7530: the offsets of attention's softmax are marked as divided.
@contextlib.contextmanager
def marked_sinks():
    create = DotProductAttention.__init__

    def created(self, *args, **options):
        create(self, *args, **options)
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    with mock.patch.object(DotProductAttention, "__init__", created):
        yield


# PR 7513: a loss is divided by the tokens of the whole sequence, and multiplied by cp, by which Megatron averages.
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
    "label_smoothing": ("1", gallery.label_smoothing, "7466", smoothing_over_the_vocabulary),
    "mtp_loss": ("3", mtp_loss, "7498", counts_over_cp),
    "padding_mask": ("5", gallery.padding_mask, "", None),
    "attention_sinks": ("8", gallery.attention_sinks, "7530", marked_sinks),
    "counted_on_each_rank": ("9", gallery.counted_on_each_rank, "7513", tokens_of_the_sequence),
    "gathered_logits": ("", gallery.gathered_logits, "", None),
    "masked_routing": ("", masked_routing, "7481", counts_before_the_sum),
    "mla": ("issue 1699", mla.program, "6839", summed_shared_key),
}
"""Program -> the number of the finding, the program, the pull request that is open, and its change."""


def differing(program):
    """Return the layouts that differ, of those in which the model can be built, and how many those are."""
    verifier = Verifier(program, steps=1)
    verifier.locates = False
    outcomes = [verifier.verify(layout) for layout in verifier.default_layouts()]
    built = [outcome for outcome in outcomes if outcome.failure is None]
    return [outcome.layout for outcome in built if not outcome.equal], len(built)


def main():
    warnings.simplefilter("ignore")
    print("| finding | program | differs in | with the change of |\n|---|---|---|---|")
    for name in sys.argv[1:] or FINDINGS:
        finding, program, request, change = FINDINGS[name]
        program = program.smaller(num_layers=2)
        layouts, count = differing(program)
        repaired = "-"
        if change is not None:
            with change():
                still, _ = differing(program)
            repaired = f"#{request}: " + (f"differs in {'; '.join(still)}" if still else "equal in all")
        print(f"| {finding} | `{name}` | {len(layouts)} of {count}: {'; '.join(layouts)} | {repaired} |", flush=True)


if __name__ == "__main__":
    main()
