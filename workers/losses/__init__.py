"""Policy losses, averages over tokens, and estimators of the KL divergence, by name."""

import workers.losses.policy  # noqa: F401
