"""``vllm.worker.worker``."""

from pytest_trlcompat.inference.recording_engine.llm import Worker

__all__ = ["Worker"]
