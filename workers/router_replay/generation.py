"""The experts that are chosen while tokens are generated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from workers.router_replay.routers import NOT_RECORDED, ModelRouters

__all__ = ["GeneratedExperts"]


class GeneratedExperts:
    """The experts of prompts and of their responses, in the columns of both, with prompts at the right edge of theirs.

    Args:
        routers: those of this rank.
        lengths: int64 ``[rows]``, the tokens of each prompt.
        prompt_columns: columns of the prompts.
        response_columns: columns of the responses.
        device: of the model.
    """

    def __init__(
        self,
        routers: ModelRouters,
        lengths: Tensor,
        prompt_columns: int,
        response_columns: int,
        device: torch.device,
    ) -> None:
        self._routers, self._prompt_columns = routers, prompt_columns
        sizes = (len(lengths), prompt_columns + response_columns, len(routers.own), routers.topk)
        self._own = torch.full(sizes, NOT_RECORDED, dtype=routers.dtype, device=device)
        self._place = torch.arange(prompt_columns, device=device) - prompt_columns + lengths.to(device)[:, None]

    @contextlib.contextmanager
    def in_pass(self, chunk: nn.Module, response_column: int | None) -> Iterator[None]:
        """Context manager of a pass through an unwrapped chunk.

        Args:
            chunk: the chunk.
            response_column: the column of the one new token of every row. None: the pass is that of the prompts
                ``[rows, seq]``, each from its first token on.
        """
        with self._routers.recording(chunk) as found:
            yield
        places = self._routers.places(chunk)
        for chosen in found:
            by_row = chosen.unflatten(0, (-1, len(self._own))).transpose(0, 1)  # from [seq, rows]
            if response_column is not None:
                self._own[:, self._prompt_columns + response_column, places] = by_row[:, 0]
                continue
            rows = torch.arange(len(self._own), device=by_row.device)[:, None]
            prompts = by_row[rows, self._place.clamp(min=0)]
            prompts.masked_fill_((self._place < 0)[:, :, None, None], NOT_RECORDED)
            self._own[:, : self._prompt_columns, places] = prompts

    def of_responses(self, mask: Tensor) -> Tensor:
        """Return the experts of all layers, ``[rows, prompt + response, layers, topk]`` (a collective over pp).

        The last token of a response has none: it does not go through the model.

        Args:
            mask: int64 ``[rows, response]``, 1 for the tokens of the response.
        """
        without = torch.ones_like(mask, dtype=torch.bool)
        without[:, :-1] = mask[:, 1:] == 0
        self._own[:, self._prompt_columns :].masked_fill_(without[:, :, None, None], NOT_RECORDED)
        return self._routers.of_all_stages(self._own)
