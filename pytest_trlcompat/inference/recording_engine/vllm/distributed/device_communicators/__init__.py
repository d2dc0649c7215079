"""``vllm.distributed.device_communicators``."""
