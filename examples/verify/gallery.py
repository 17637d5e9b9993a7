"""Twelve faulty programs, each of a kind that teams have reported, and the layout in which verify shows the fault.

    python -m mcontroller verify examples/verify/gallery.py:label_smoothing --layouts tp=2

In one process, and in most layouts, each of them trains as it should. ``cured_label_smoothing`` and others work around
faults of Megatron itself.
"""

import dataclasses
from functools import partial

import gpt
import moe
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    get_cuda_rng_tracker,
    set_tensor_model_parallel_attributes,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from torch.nn.functional import cross_entropy

from workers.model.local_spec import block_spec


def with_step(output, loss=gpt.loss, program=gpt.program, **changes):
    def forward_step(data_iterator, model):
        data = next(data_iterator)
        return output(model, data), partial(loss, data["loss_mask"])

    return dataclasses.replace(program, forward_step=forward_step, **changes)


def losses(model, data):
    return model(data["tokens"], data["position_ids"], None, labels=data["labels"])


# Megatron-LM#7452: the smoothed part is a mean over this rank's part of the vocabulary.
def smoothed(model, data):
    logits = model(data["tokens"], data["position_ids"], None)
    return vocab_parallel_cross_entropy(logits, data["labels"], 0.1)


label_smoothing = with_step(smoothed)


def smoothed_over_vocabulary(model, data):
    logits = gather_from_tensor_model_parallel_region(model(data["tokens"], data["position_ids"], None))
    smoothing = 0.1 * gpt.VOCABULARY / (gpt.VOCABULARY - 1)  # as in Megatron, spread over the wrong labels
    return cross_entropy(logits.transpose(1, 2), data["labels"], reduction="none", label_smoothing=smoothing)


cured_label_smoothing = with_step(smoothed_over_vocabulary)


def gpt_model(config, pre_process, post_process, vp_stage=None, spec=None, **arguments):
    spec = spec or block_spec(config, "local", parallel_state.get_pipeline_model_parallel_rank(), vp_stage)
    return GPTModel(
        config, spec, gpt.VOCABULARY, gpt.LENGTH, pre_process=pre_process, post_process=post_process,
        position_embedding_type="rope", vp_stage=vp_stage, **arguments,
    )  # fmt: skip


# Megatron-LM#7452: logits of the whole vocabulary go into a loss that expects this rank's part.
# With one rank, torch does not let the loss overwrite what such a model returns.
def with_gathered_logits(config, *args):
    return gpt_model(config, *args, parallel_output=config.tensor_model_parallel_size == 1)


gathered_logits = dataclasses.replace(gpt.program, model_provider=with_gathered_logits)


# Megatron-LM#7452: the sinks of attention are divided over tp and not marked: the gradient norm leaves some out.
def with_sinks(config, pre_process, post_process, vp_stage=None):
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return gpt_model(config, pre_process, post_process, vp_stage, spec)


def causal(model, data):
    mask = torch.ones(gpt.LENGTH, gpt.LENGTH).triu(1).bool()[None, None]
    return model(data["tokens"], data["position_ids"], mask, labels=data["labels"])


attention_sinks = with_step(
    causal,
    model_provider=with_sinks,
    config=lambda **parallel: gpt.config(softmax_type="learnable", masked_softmax_fusion=False, **parallel),
)


def with_marked_sinks(config, pre_process, post_process, vp_stage=None):
    model = with_sinks(config, pre_process, post_process, vp_stage)
    for name, parameter in model.named_parameters():
        if name.endswith("softmax_offset"):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
            with get_cuda_rng_tracker().fork():
                config.init_method(parameter)
    return model


cured_attention_sinks = dataclasses.replace(attention_sinks, model_provider=with_marked_sinks)


def ranks_of_a_sequence(**parallel):
    size = parallel["tensor_model_parallel_size"] if parallel["sequence_parallel"] else 1
    return size * parallel["context_parallel_size"]


# Megatron-LM PR #5047: the auxiliary loss of the router is a mean over each micro-batch, and is divided by all tokens.
def with_auxiliary_loss(**parallel):
    config = moe.config(**parallel)
    config.moe_router_load_balancing_type, config.moe_aux_loss_coeff = "aux_loss", 1.0
    return config


auxiliary_loss = dataclasses.replace(gpt.program, config=with_auxiliary_loss)


def with_cured_auxiliary_loss(**parallel):
    config = with_auxiliary_loss(**parallel)
    config.moe_aux_loss_coeff *= ranks_of_a_sequence(**parallel)
    return config


cured_auxiliary_loss = dataclasses.replace(gpt.program, config=with_cured_auxiliary_loss)


# A fault of megatron-core itself: with averages over all tokens, the gradient of the auxiliary loss of each sequence is
# too small by the ranks that share the sequence: tp with sequence parallelism, and cp. A larger coefficient cures it.
def with_sequence_loss(coefficient=1.0, **parallel):
    config = with_auxiliary_loss(**parallel)
    config.moe_router_load_balancing_type, config.moe_aux_loss_coeff = "seq_aux_loss", coefficient
    return config


def with_cured_sequence_loss(**parallel):
    return with_sequence_loss(coefficient=float(ranks_of_a_sequence(**parallel)), **parallel)


sequence_loss = dataclasses.replace(gpt.program, config=with_sequence_loss)
cured_sequence_loss = dataclasses.replace(gpt.program, config=with_cured_sequence_loss)


# Megatron-LM#7452: the padding mask of the router is divided by ranks of another group than the tokens that it masks.
def with_masked_routers(config, pre_process, post_process, vp_stage=None):
    model = gpt.model_provider(config, pre_process, post_process, vp_stage)
    size = config.tensor_model_parallel_size if config.sequence_parallel else 1

    def masked(router, inputs):
        return inputs[0], model.padding.chunk(size)[parallel_state.get_data_parallel_rank() % size]

    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_pre_hook(masked)
    return model


def with_padding(data_iterator, model):
    data = next(data_iterator)
    unwrap_model(model).padding = data["loss_mask"].T == 0
    return gpt.forward_step(iter([data]), model)


def without_bias(**parallel):
    config = with_auxiliary_loss(**parallel)
    config.moe_router_enable_expert_bias = False
    return config


padding_mask = dataclasses.replace(
    gpt.program, config=without_bias, model_provider=with_masked_routers, forward_step=with_padding
)


# verl#5983: the tokens of a step are counted over data-parallel ranks alone: each cp rank has a mean of its own.
def with_tokens_of_step(index):
    first = index - index % gpt.program.micro_batches
    step = [gpt.batch(first + each)["loss_mask"] for each in range(gpt.program.micro_batches)]
    return gpt.batch(index) | {"loss_mask": gpt.batch(index)["loss_mask"] / torch.stack(step).sum()}


def mean_of_step(mask, values):
    total, count = (values * mask).sum(), gpt.program.micro_batches
    return total * count, {"lm loss": torch.stack([total.detach(), torch.tensor(1 / count)])}


def without_token_counts(**parallel):
    config = gpt.config(**parallel)
    config.calculate_per_token_loss = False
    return config


tokens_over_dp = with_step(losses, mean_of_step, config=without_token_counts, batch=with_tokens_of_step)


# Megatron-LM#7452: Megatron divides the sum of a loss by the tokens that count on this context-parallel rank.
counted_on_each_rank = dataclasses.replace(gpt.program, config=without_token_counts)


# The first and the last stage have a copy of the embedding each, and Megatron does not know that they are one weight.
class TiedByHand(GPTModel):
    def forward(self, *args, **kwargs):
        self.share_embeddings_and_output_weights = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.share_embeddings_and_output_weights = False


def tied_by_hand(config, pre_process, post_process, vp_stage=None):
    model = gpt.model_provider(config, pre_process, post_process, vp_stage)
    model.__class__ = TiedByHand
    return model


tied_embeddings = dataclasses.replace(gpt.program, model_provider=tied_by_hand)


# Norms of a team's own, without the mark that makes Megatron sum their gradients under sequence parallelism.
def with_own_norms(config, pre_process, post_process, vp_stage=None):
    model = gpt.model_provider(config, pre_process, post_process, vp_stage)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.sequence_parallel = False
    return model


norm_weights = dataclasses.replace(gpt.program, model_provider=with_own_norms)


# Each context-parallel rank gets one contiguous piece of the sequence; rope and attention expect two, one of each end.
def contiguous_pieces(index):
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    return {name: value.chunk(size, 1)[rank].contiguous() for name, value in gpt.whole_batch(index).items()}


rope_positions = dataclasses.replace(gpt.program, batch=contiguous_pieces)


# The bias of experts follows the tokens of each data-parallel rank, so that replicas route differently.
def with_local_bias(config, pre_process, post_process, vp_stage=None):
    model = gpt.model_provider(config, pre_process, post_process, vp_stage)
    for module in model.modules():
        if hasattr(module, "expert_bias"):
            module.register_forward_hook(balance)
    return model


def balance(router, inputs, outputs):
    counts = outputs[1].sum(0).float()
    router.expert_bias += 0.01 * torch.sign(counts.mean() - counts)


def without_update(**parallel):
    config = moe.config(**parallel)
    config.moe_router_bias_update_rate = 0.0
    return config


expert_bias = dataclasses.replace(gpt.program, config=without_update, model_provider=with_local_bias)
