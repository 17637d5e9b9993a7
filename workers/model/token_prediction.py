"""Layers of multi-token prediction after the last stage of a model (DeepSeek-V3, arXiv:2412.19437, section 2.2).

They are Megatron's. Passes for scores, values and generation leave them out; ``workers.train.forward`` runs them where
they are trained. A model that only keeps them has none of what their training needs: a copy of the embedding on the
last stage, and the reduction of its gradients over the two.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from workers.config import ModelConfig
from workers.model.local_spec import LocalProvider

METRIC = "mtp_loss"


def add_prediction_layers(
    chunk: Any,
    model: ModelConfig,
    blocks: TransformerBlockSubmodules,
    implementation: str,
    pg: ProcessGroupCollection,
) -> None:
    """Add the layers of multi-token prediction that a ModelConfig has to a chunk of its model, if it has any.

    Args:
        chunk: a GPTModel or a HybridModel; the last one gets the layers.
        model: ``transformer.mtp_num_layers``, and ``mtp_loss_scaling_factor``: 0 if the layers are not trained.
        blocks: the spec of the layers of the chunk; the last one is inside each layer of multi-token prediction.
        implementation: as ``workers.model.gpu_defaults.chosen_implementation`` returns it.
        pg: the groups of the layout.
    """
    chunk.prediction_layers = model.prediction_layers  # read by workers.weights.hf
    if not model.prediction_layers:
        return
    config = chunk.config
    config.mtp_num_layers = model.prediction_layers
    if chunk.post_process:
        if implementation == "transformer_engine":
            from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

            backend: Any = TESpecProvider()
        else:
            backend = LocalProvider()
        layers = [get_mtp_layer_spec_for_backend(blocks.layer_specs[-1], backend)] * model.prediction_layers
        spec = MultiTokenPredictionBlockSubmodules(layer_specs=layers)
        chunk.mtp = MultiTokenPredictionBlock(config, spec, vp_stage=chunk.vp_stage, pg_collection=pg)
        chunk.mtp.loss = PredictionLoss(config.mtp_loss_scaling_factor, pg.tp.size())
    config.mtp_num_layers = None  # other chunks of this rank are built with the same config
    if model.trains_prediction:
        _share_embedding(chunk, pg)


def finish_prediction_layers(chunk: Any, model: ModelConfig) -> None:
    """Prepare the layers for training, or freeze them, when all chunks of this rank are built."""
    layers = getattr(chunk, "prediction_layers", 0)
    if layers and model.trains_prediction:
        _Outside(chunk.post_process, layers).attach(chunk)
    elif layers and chunk.post_process:
        chunk.mtp.requires_grad_(False)


def is_trained(chunk: Any) -> bool:
    """Return whether the chunk is the last one of a model whose layers of multi-token prediction are trained."""
    return hasattr(chunk, "mtp") and chunk.config.mtp_num_layers is not None


class PredictionLoss:
    """The loss of the layers, which counts as router losses do (``workers.train.router_losses``).

    Args:
        weight: ``mtp_loss_scaling_factor``.
        ranks: ranks of tp, each of which computes the whole loss.

    Attributes:
        share: what the main loss counts in the mini-batch divided by its targets that count.
        ratio: tokens of the mini-batch divided by its targets that count: sums are divided by tokens.
        sums: by metric, the sum of the loss in this step; a float64 scalar.
    """

    def __init__(self, weight: float, ranks: int) -> None:
        self._weight, self._ranks = weight, ranks
        self.share = self.ratio = 1.0
        self.sums: dict[str, Tensor] = {}

    def attached(self, hidden: Tensor, loss: Tensor) -> Tensor:
        """Return ``hidden``, whose backward pass is also that of the loss, a sum over targets."""
        self.sums[METRIC] = self.sums.get(METRIC, 0.0) + loss.detach().double() * (self.ratio / self._ranks)
        attached: Tensor = MTPLossAutoScaler.apply(hidden, loss * (self._weight * self.share))
        return attached


def _share_embedding(chunk: Any, pg: ProcessGroupCollection) -> None:
    """Give the last chunk a copy of the embedding, and mark both as Megatron marks tied weights of two stages."""
    if chunk.pre_process and chunk.post_process:
        return
    if chunk.post_process:
        chunk.embedding = LanguageModelEmbedding(
            config=chunk.config,
            vocab_size=chunk.vocab_size,
            max_sequence_length=chunk.max_sequence_length,
            position_embedding_type=chunk.position_embedding_type,
            tp_group=pg.tp,
        )
        chunk.embedding.word_embeddings.weight.shared = True
    if chunk.pre_process or chunk.post_process:
        weight = chunk.embedding.word_embeddings.weight
        weight.shared_embedding = weight.is_embedding_or_output_parameter = True


class _Outside:
    """Hooks that hide the layers from Megatron's own forward pass, which would run them for logits too.

    Megatron reduces the gradients of the embedding, saves it once and scales the loss by the two attributes.
    """

    def __init__(self, last: bool, layers: int) -> None:
        self._shown = last, layers

    def attach(self, chunk: nn.Module) -> None:
        self._set(chunk, *self._shown)
        chunk.register_forward_pre_hook(lambda chunk, args: self._set(chunk, False, None))
        chunk.register_forward_hook(lambda chunk, args, output: self._set(chunk, *self._shown), always_call=True)

    @staticmethod
    def _set(chunk: Any, process: bool, layers: int | None) -> None:
        chunk.mtp_process, chunk.config.mtp_num_layers = process, layers
