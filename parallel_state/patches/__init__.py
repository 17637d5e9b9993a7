"""Changes to Megatron-Core as it is imported: what a machine without Transformer Engine needs, and fixes."""
