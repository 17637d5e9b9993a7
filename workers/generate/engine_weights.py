"""Update the weights of the engine that generates, and verify that they have arrived."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from mcontroller.errors import ConfigError
from parallel_state.agreement import all_gather_values
from workers.config.rollout import RolloutConfig
from workers.generate.rollout_protocol import ReadableRollout, Rollout
from workers.weights.moves import dtypes_by_name
from workers.weights.verification import Verification
from workers.weights.whole_tensors import StreamedTensors, WholeTensors

logger = logging.getLogger(__name__)


class EngineWeights:
    """Updates the weights of an engine, and compares them with the policy's, by fingerprints.

    An engine without a copy of the weights is not compared.

    Args:
        config: ``verify_weights`` decides whether engines are compared.
        rollout: the engine.

    Raises:
        ConfigError: ``verify_weights`` is ``fingerprints``, and the engine does not report any.
    """

    def __init__(self, config: RolloutConfig, rollout: Rollout) -> None:
        self._on = config.verify_weights != "never"
        self._verification = Verification("the engine")
        if not rollout.holds_weights:
            return
        engine = type(rollout).__name__
        if not self._on:
            logger.warning("the weights of %s are not verified: rollout.verify_weights is never", engine)
        elif not isinstance(rollout, ReadableRollout):
            text = f"{engine} has no method fingerprints (see workers.generate.rollout_protocol.ReadableRollout)"
            if config.verify_weights == "fingerprints":
                raise ConfigError(
                    f"rollout.verify_weights is 'fingerprints', and {text}",
                    key="rollout.verify_weights",
                    value=config.verify_weights,
                )
            logger.warning("the weights of the rollout are not verified after an update: %s", text)

    def update(self, rollout: Rollout, weights: WholeTensors | StreamedTensors, update: int) -> Mapping[str, float]:
        """Update the weights of the engine, and verify that they have arrived (a collective over all ranks).

        Args:
            rollout: the engine.
            weights: the weights that it is to have.
            update: the number of the update, for the error.

        Returns:
            What the update returns, and ``verify_seconds`` of the slowest rank, if engines are compared.

        Raises:
            WeightsNotArrived: on every rank.
        """
        metrics = rollout.update_weights(weights)
        if not self._on or not rollout.holds_weights or not isinstance(rollout, ReadableRollout):
            return metrics
        start = time.perf_counter()
        loaded = all_gather_values(rollout.fingerprints())
        policy = all_gather_values(weights.fingerprints(dtypes_by_name(loaded)))
        self._verification.check(policy, loaded, update)
        return {**metrics, "verify_seconds": max(all_gather_values(time.perf_counter() - start))}
