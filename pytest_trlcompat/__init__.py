"""Does this combination of TRL, Transformers, Accelerate, DeepSpeed, PEFT and PyTorch train correctly?

Imports nothing: pytest loads this package at every start, and users of :mod:`pytest_trlcompat.trainers` need no more.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
