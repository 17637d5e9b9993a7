"""Programs over groups, one file each: GRPO, distillation, DPO, best-of-n fine-tuning, and asynchronous training."""
