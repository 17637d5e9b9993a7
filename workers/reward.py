"""The reward worker: a model with a value head, whose output at the last token of a response is the score."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from workers.config import RewardConfig
from workers.model.build import build_model
from workers.model_worker import ModelWorker
from workers.train.batches import TokenBatch
from workers.train.forward import forward_values


class RewardModelWorker(ModelWorker):
    """A model that computes a score for every response. It is not trained; load its weights from a checkpoint.

    Args:
        config: the configuration of the reward model.

    Raises:
        LayoutError: the axes do not divide the world size.
    """

    config_class = RewardConfig

    def __init__(self, config: RewardConfig) -> None:
        super().__init__(config.model, config.parallel, timeout_s=config.timeout_s, packed=config.packed)
        self.config = config

    def build_model(self) -> list[nn.Module]:
        """Return this rank's chunks of the reward model, which ends in a value head."""
        return build_model(self.config.model, self.config.parallel, self.context, value_head=True)

    def forward_step(self, model: nn.Module, rows: TokenBatch) -> Tensor:
        """Return hidden states, or on the last stage the head's output, float32 ``[rows, targets]``."""
        return forward_values(model, rows, self.context.pg)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the model, with the weights of ``model.hf_path`` or of ``model.seed`` until a checkpoint is loaded."""
        self.set_up({})
        for chunk in self.model:
            chunk.requires_grad_(False)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto | None:
        """Compute the scores of the responses.

        The score is the head's output at the last token of the response, not at the position that predicts it.

        Args:
            data: ``input_ids``, ``attention_mask`` ``[rows, prompt + response]`` and ``responses``
                ``[rows, response]``, int64.

        Returns:
            ``rm_scores``, float32 ``[rows, response]``: the score at a response's last token, 0 elsewhere. None off
            the last stage.

        Raises:
            DataError: a column is missing or of a wrong shape.
        """
        rows = self.reader.responses(data, "compute_rm_score")
        rows.predictors = (rows.predictors + 1).clamp(max=rows.tokens.size(1) - 1)
        scores = self.scorer.score(self.model, rows, self.config.scoring_size)
        return None if scores is None else DataProto.from_dict({"rm_scores": scores * _last(rows.mask)})


def _last(mask: Tensor) -> Tensor:
    """1 at each row's last nonzero entry, 0 elsewhere."""
    following = torch.flip(torch.flip(mask, [1]).cumsum(1), [1])
    return ((mask != 0) & (following == 1)).float()
