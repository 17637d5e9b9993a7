"""The head of a critic or a reward model: one number for each token instead of logits."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config

from mcontroller.errors import ConfigError


class ValueHead(torch.nn.Module):
    """A linear layer with one output and the interface of Megatron's output layer; the same on every tp rank.

    Args:
        config: the configuration of the model.
        tp_group: the ranks that hidden states are divided over under sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group
        weight = torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = torch.nn.Parameter(torch.nn.init.normal_(weight, std=config.init_method_std))
        # Megatron sums the gradients of parameters with this attribute over tp, whose ranks have different tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden: torch.Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Return float32 ``[seq, batch, 1]`` of the whole sequence, from this rank's hidden states."""
        # Returns are learned in float32: a bfloat16 product would round a value to steps of 1/128 of itself.
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # Every tp rank computes the same loss of all values: each keeps its own tokens' gradient, none is summed.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None


def put_value_head(chunk: torch.nn.Module, tp_group: torch.distributed.ProcessGroup) -> None:
    """Replace the output layer of the last stage's model chunk by a ``ValueHead``.

    Args:
        chunk: the last chunk of the model.
        tp_group: the tensor-parallel ranks of the chunk.

    Raises:
        ConfigError: the chunk has no output layer, or shares it with the embedding.
    """
    if not isinstance(getattr(chunk, "output_layer", None), torch.nn.Module):
        text = f"{type(chunk).__name__} has no output_layer that a value head could replace"
        raise ConfigError(text, key="value_head", value=True)
    if getattr(chunk, "share_embeddings_and_output_weights", False):
        raise ConfigError(
            f"{type(chunk).__name__} shares its output layer with the embedding: a value head needs a model that does "
            "not (share_embeddings_and_output_weights=False)",
            key="value_head",
            value=True,
        )
    chunk.output_layer = ValueHead(get_model_config(chunk), tp_group)
