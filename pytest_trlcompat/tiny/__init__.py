"""Tiny random models of several architectures, with a tokenizer and datasets: offline, the same in every process.

A :class:`TinyModel` is a small, picklable description. It travels to the ranks of a launch as an argument and is
rebuilt there from its seed, so that no rank depends on another's files. The stack is imported only when something is
built.
"""

from __future__ import annotations

from pytest_trlcompat.tiny.architectures import ArchitectureAbsent
from pytest_trlcompat.tiny.examples import conversations, preferences, prompts, unpaired_preferences
from pytest_trlcompat.tiny.models import TinyModel, checkpoint_tensors, gemma, llama, mistral, moe, qwen2, vlm
from pytest_trlcompat.tiny.tokenizer import EOS_TOKEN_ID, PAD_TOKEN_ID, UNK_TOKEN_ID

__all__ = [
    "EOS_TOKEN_ID",
    "PAD_TOKEN_ID",
    "UNK_TOKEN_ID",
    "ArchitectureAbsent",
    "TinyModel",
    "checkpoint_tensors",
    "conversations",
    "gemma",
    "llama",
    "mistral",
    "moe",
    "preferences",
    "prompts",
    "qwen2",
    "unpaired_preferences",
    "vlm",
]
