"""What TRL imports as vLLM where the recording engine stands for it; see the folder above for what that is."""

from importlib.metadata import version

from pytest_trlcompat.inference.recording_engine.llm import LLM, CompletionOutput, RequestOutput
from pytest_trlcompat.inference.recording_engine.sampling import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

__version__ = version("vllm")
