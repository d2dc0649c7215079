"""``vllm.sampling_params``."""

from pytest_trlcompat.inference.recording_engine.sampling import GuidedDecodingParams, SamplingParams

__all__ = ["GuidedDecodingParams", "SamplingParams", "StructuredOutputsParams"]

StructuredOutputsParams = GuidedDecodingParams
