"""The experts that ``router_replay`` of an actor records and replays in each of its calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from mcontroller.errors import DataError
from workers.columns import ROUTED_EXPERTS
from workers.router_replay.routers import NOT_RECORDED, ModelRouters
from workers.router_replay.rows import RecordedExperts, ReplayedExperts, at_columns, from_first_token


class RouterReplay:
    """The recording and the replay of the experts that the routers of a policy choose.

    Args:
        mode: ``router_replay`` of the configuration.
        routers: the policy's routers on this rank; None if there is no replay.
    """

    def __init__(self, mode: str, routers: ModelRouters | None) -> None:
        self.mode, self.routers = mode, routers

    def replays(self, method: str, columns: Collection[str]) -> bool:
        """Return whether a method replays the experts of a batch.

        Without the pass that computes ``old_log_probs``, an update makes one step, with weights that have not changed
        since: there is nothing to record and to replay.

        Args:
            method: of the actor.
            columns: names of the columns of the batch.
        """
        if self.mode == "old_log_probs":
            return method != "compute_log_prob" and "old_log_probs" in columns
        return self.mode == "rollout"

    def replayed(self, batch: Mapping[str, Tensor], lengths: Tensor, width: int, method: str) -> ReplayedExperts:
        """Return the experts that the routers are to choose for rows, which begin with their first token.

        Args:
            batch: the columns ``routed_experts``, ``input_ids`` and ``attention_mask``.
            lengths: int64 ``[rows]``, the tokens of each row.
            width: tokens of a padded row.
            method: of the actor, for error messages.

        Raises:
            DataError: ``routed_experts`` is missing, has another shape than the model needs or another type, or does
                not name ``topk`` different experts for each layer of a token.
        """
        routers = self._routers()
        column = self._checked(batch, method, routers)
        local = from_first_token(column[:, :, routers.local], _first_columns(batch), lengths, width)
        return ReplayedExperts(routers, local)

    def recording(self, rows: int, width: int) -> RecordedExperts:
        """Return what records the experts of rows of ``width`` tokens in their next passes."""
        return RecordedExperts(self._routers(), rows, width)

    def column(
        self, recorded: RecordedExperts, lengths: Tensor, batch: Mapping[str, Tensor], pg: ProcessGroupCollection
    ) -> dict[str, Tensor]:
        """Return the column ``routed_experts`` of recorded rows by its name (a collective over tp, cp and pp).

        Args:
            recorded: the experts of the rows, after their passes.
            lengths: int64 ``[rows]``, the tokens of each row.
            batch: the column ``attention_mask``.
            pg: the process groups of the layout.
        """
        width = batch["attention_mask"].size(1)
        return {ROUTED_EXPERTS: at_columns(recorded.gather(pg), _first_columns(batch), lengths, width)}

    def _routers(self) -> ModelRouters:
        assert self.routers is not None
        return self.routers

    def _checked(self, batch: Mapping[str, Tensor], method: str, routers: ModelRouters) -> Tensor:
        column = batch.get(ROUTED_EXPERTS)
        recorded_by = {"rollout": "generate_sequences", "old_log_probs": "compute_log_prob"}[self.mode]
        if column is None:
            raise DataError(
                f"{method} needs the column {ROUTED_EXPERTS!r}, which {recorded_by} returns with "
                f"router_replay={self.mode}; the batch has {sorted(batch)}",
                method=method,
                missing=[ROUTED_EXPERTS],
                present=sorted(batch),
            )
        expected = (*batch["input_ids"].shape, routers.layers, routers.topk)
        if tuple(column.shape) != expected or column.is_floating_point():
            raise DataError(
                f"{method}: {ROUTED_EXPERTS} is {column.dtype} {list(column.shape)}, expected integers "
                f"{list(expected)}: for each token of input_ids the experts of {routers.layers} layers",
                method=method,
                column=ROUTED_EXPERTS,
            )
        ordered = column.sort(-1).values
        repeated = (ordered[..., 1:] == ordered[..., :-1]) == (ordered[..., :1] != NOT_RECORDED)
        low, high = int(ordered[..., 0].min()), int(ordered[..., -1].max())
        if low < NOT_RECORDED or high >= routers.experts or bool(repeated.any()):
            raise DataError(
                f"{method}: {ROUTED_EXPERTS} has values from {low} to {high}; expected {routers.topk} different ones "
                f"from 0 to {routers.experts - 1} for every token and layer, or {NOT_RECORDED} in place of all of them",
                method=method,
                column=ROUTED_EXPERTS,
            )
        return column


def _first_columns(batch: Mapping[str, Tensor]) -> Tensor:
    """The column of the first token of every row, int64 ``[rows]``."""
    return (batch["attention_mask"] != 0).int().argmax(1)
