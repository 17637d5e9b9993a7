"""Update the weights of the engine that generates, and verify that they have arrived."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from mcontroller.errors import ConfigError
from parallel_state.agreement import all_gather_values
from workers.config.rollout import RolloutConfig
from workers.generate.rollout_protocol import ReadableRollout, Rollout
from workers.weights.fingerprints import Verification, dtypes_by_name
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
        why, name = "", type(rollout).__name__
        if config.verify_weights == "never":
            why = "rollout.verify_weights is never"
        elif not isinstance(rollout, ReadableRollout):
            why = "it has no method fingerprints (see workers.generate.rollout_protocol.ReadableRollout)"
        self._rollout: Any = rollout
        self._verifies = rollout.holds_weights and not why
        self._verification = Verification("the engine")
        if not why or not rollout.holds_weights:
            return
        if config.verify_weights == "fingerprints":
            text = f"rollout.verify_weights is 'fingerprints', and {name} does not report any: {why}"
            raise ConfigError(text, key="rollout.verify_weights", value=config.verify_weights)
        logger.warning("the weights of %s are not verified after an update: %s", name, why)

    def update(self, weights: WholeTensors | StreamedTensors, update: int) -> Mapping[str, float]:
        """Update the weights of the engine, and verify that they have arrived (a collective over all ranks).

        Args:
            weights: the weights that it is to have.
            update: the number of the update, for the error.

        Returns:
            What the update returns, and ``verify_seconds`` of the slowest rank, if engines are compared.

        Raises:
            WeightsNotArrived: on every rank.
        """
        metrics: Mapping[str, float] = self._rollout.update_weights(weights)
        if not self._verifies:
            return metrics
        start = time.perf_counter()
        loaded = all_gather_values(self._rollout.fingerprints())
        policy = all_gather_values(weights.fingerprints(dtypes_by_name(loaded)))
        self._verification.check(policy, loaded, update)
        return {**metrics, "verify_seconds": max(all_gather_values(time.perf_counter() - start))}
