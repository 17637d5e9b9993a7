"""The operations of training, and the share of the GPU's peak that they reach (MFU)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor, nn

# Dense bfloat16 TFLOP/s from NVIDIA's data sheets, by a part of the device's name; the first match counts.
_PEAK_TFLOPS = (
    (r"GB300|B300", 2500.0),
    (r"GB200|B200", 2250.0),
    (r"B100", 1750.0),
    (r"H100 PCIe", 756.0),
    (r"H100 NVL", 835.0),
    (r"GH200|H200|H100|H800", 989.0),
    (r"H20\b", 148.0),
    (r"A100|A800", 312.0),
    (r"A40\b", 149.7),
    (r"A30\b", 165.0),
    (r"A10G?\b", 125.0),
    (r"L40S", 362.0),
    (r"L40\b", 181.0),
    (r"L4\b", 121.0),
    (r"RTX 6000 Ada", 364.0),
    (r"RTX PRO 6000", 504.0),
    (r"5090", 209.5),
    (r"4090", 165.2),
    (r"3090", 71.0),
)


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bfloat16 peak of a GPU in TFLOP/s; None if its name is unknown."""
    return next((peak for pattern, peak in _PEAK_TFLOPS if re.search(pattern, device_name)), None)


def training_flops(chunks: Sequence[nn.Module], lengths: Tensor, pg: ProcessGroupCollection) -> float:
    """Return this rank's operations of a forward and a backward pass: of the model, not of what it computes again.

    6 for each token and parameter outside of the input embedding, whose weights count as the output projection if the
    two are tied, and for causal attention 6 x length x width of the
    queries for each token and layer (Narayanan et al. 2021, with half of the attention). Experts are assumed to get
    equal shares of the tokens.

    Args:
        chunks: this rank's model chunks.
        lengths: ``[rows]`` tokens of the rows of this data-parallel rank.
        pg: the groups of the layout.
    """
    config = get_model_config(chunks[0])
    tokens, squares = float(lengths.sum()), float((lengths.double() ** 2).sum())
    ahead = getattr(config, "mtp_num_layers", None) or 0
    used, layers = 0.0, (config.num_layers + ahead) / pg.pp.size()
    for chunk in chunks:
        for name, parameter in unwrap_model(chunk).named_parameters():
            if name.startswith("mtp.") and not ahead:
                continue  # kept, and not computed
            if name.startswith("output_layer."):
                used += parameter.numel() * ahead / pg.cp.size()  # for each layer of multi-token prediction again
            if ".experts." in name:
                chosen = config.moe_router_topk / config.num_moe_experts
                used += parameter.numel() * chosen * pg.dp.size() / pg.expt_dp.size()
            elif not name.startswith("embedding.") or _is_output_projection(chunk, name):
                used += parameter.numel() / pg.cp.size()
    width = config.num_attention_heads * config.kv_channels / pg.tp.size()
    return 6.0 * (used * tokens + layers * width * squares / pg.cp.size())


def _is_output_projection(chunk: nn.Module, name: str) -> bool:
    """Return whether the input embedding of this chunk is the matrix that the logits are computed with."""
    model = unwrap_model(chunk)
    tied = getattr(model, "share_embeddings_and_output_weights", False) and getattr(model, "post_process", False)
    return tied and name == "embedding.word_embeddings.weight"


def model_flops_utilization(
    chunks: Sequence[nn.Module], lengths: Tensor, pg: ProcessGroupCollection, seconds: float
) -> dict[str, float]:
    """Return ``mfu``, the share of the GPU's dense bfloat16 peak; nothing on a CPU or an unknown GPU.

    Args:
        chunks: this rank's model chunks.
        lengths: ``[rows]`` tokens of the rows that this data-parallel rank trained on, of all epochs.
        pg: the groups of the layout.
        seconds: of the update.
    """
    peak = peak_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return {} if peak is None else {"mfu": training_flops(chunks, lengths, pg) / seconds / (peak * 1e12)}
