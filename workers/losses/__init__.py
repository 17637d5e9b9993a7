"""Policy losses, averages over tokens, and estimators of the KL divergence, by name."""
