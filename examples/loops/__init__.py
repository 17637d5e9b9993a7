"""Programs over groups, one file each: GRPO, on-policy distillation, DPO and best-of-n fine-tuning."""
