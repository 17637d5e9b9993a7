"""Workers whose weights can be compared, and that end or hang in the middle of a transfer."""

from __future__ import annotations

import hashlib
import os
import signal
import time

from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from tests.workers.full_state import full_state_dict
from workers.actor import ActorRolloutRefWorker
from workers.weights.transfer.endpoint import TransferOutcome


class Policy(ActorRolloutRefWorker):
    fault = ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digest(self) -> str:
        """A number that changes with any bit of the weights of the whole model."""
        whole = full_state_dict(self.model, self.context)
        sha256 = hashlib.sha256()
        for name, tensor in sorted(whole.items()):
            sha256.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
        return sha256.hexdigest()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change_weights(self) -> None:
        for chunk in self.model:
            for parameter in chunk.parameters():
                parameter.data.add_(0.01)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_in_the_next_transfer(self, fault: str) -> None:
        self.fault = fault

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, transfer: str, timeout: float) -> TransferOutcome:
        if self.fault == "lose the connection":
            self.fault = ""
            self.sender.close_weights(transfer)
            return TransferOutcome(0.0, 0, 0)
        return self.sender.send_weights(transfer, timeout)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights(self, transfer: str, timeout: float) -> TransferOutcome:
        if self.fault == "die" and self.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while self.fault == "hang" and self.rank == 0:
            time.sleep(0.1)
        if self.fault in ("die after the answer", "lose the connection") and self.rank == 0:
            self.sender.close_weights(transfer)
            return TransferOutcome(0.0, 0, None)
        return self.sender.receive_weights(transfer, timeout)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close_weights(self, transfer: str) -> None:
        if self.fault == "die after the answer" and self.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.sender.close_weights(transfer)
