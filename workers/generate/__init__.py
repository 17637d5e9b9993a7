"""Generation: sampling, decoding, and the rollout protocol."""
