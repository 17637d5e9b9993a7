"""``verify`` for what needs models: the roles of a run, and Megatron-LM's own training scripts."""
