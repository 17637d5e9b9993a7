"""An engine that receives weights with vLLM's own transfer engine ``nccl``: a program for ``EngineProcess``.

The folders of ``serve_engine`` and of this file are on the path of the process.
"""

from __future__ import annotations

from typing import Any

import policy_receiver
import serve_engine
from pipe_transport import Pipe, run_without_cuda


def connect(worker: Any, path: str, buffer_bytes: int) -> None:
    engine = worker.weight_transfer_engine
    engine.model_update_group = Pipe(path, sends=False)
    engine.packed, engine.packed_buffer_size_bytes, engine.packed_num_buffers = True, buffer_bytes, 2


class Receiving(serve_engine.Served):
    def connect(self, path: str, buffer_bytes: int) -> None:
        run_without_cuda()
        self._llm.collective_rpc(connect, args=(path, buffer_bytes))

    def start_weight_update(self) -> None:
        self._llm.collective_rpc("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.collective_rpc("update_weights", args=(update_info,))

    def finish_weight_update(self) -> None:
        self._llm.collective_rpc("finish_weight_update")
        self._llm.apply_model(policy_receiver._repack)  # which vLLM's CPU build leaves out


serve_engine.Served = Receiving  # type: ignore[misc]
if __name__ == "__main__":
    serve_engine.serve_engine()
