"""Tiny random Qwen2 and Mistral models with a tokenizer and prompts: offline, and the same in every process.

A :class:`TinyModel` is a small, picklable description. It travels to the ranks of a launch as an argument and is
rebuilt there from its seed, so that no rank reads another's files. Imports torch, transformers and datasets only when
something is built, and nothing of this package.
"""

from __future__ import annotations

from pytest_trlcompat.tiny.models import TinyModel, mistral, qwen2
from pytest_trlcompat.tiny.prompt_rows import prompts
from pytest_trlcompat.tiny.tokenizer import EOS_TOKEN_ID, PAD_TOKEN_ID, UNK_TOKEN_ID

__all__ = ["EOS_TOKEN_ID", "PAD_TOKEN_ID", "UNK_TOKEN_ID", "TinyModel", "mistral", "prompts", "qwen2"]
