"""What is computed? Megatron-Core models and their training. No controller code."""
