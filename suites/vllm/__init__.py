"""Known issues of trainers that generate with vLLM: GRPO, RLOO and distillation."""
