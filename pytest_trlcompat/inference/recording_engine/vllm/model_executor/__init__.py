"""``vllm.model_executor``."""
