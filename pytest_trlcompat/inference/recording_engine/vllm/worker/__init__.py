"""``vllm.worker``."""
