"""Generation: the rollout protocol, Megatron's rollout, decoding and sampling."""
