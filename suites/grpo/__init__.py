"""Known issues of GRPO itself."""
