"""RLOO's adapter: that of GRPO, with the names that TRL and the reference have for RLOO."""

from __future__ import annotations

from typing import ClassVar

from pytest_trlcompat.conformance.grpo.adapter import SamplingAdapter
from pytest_trlcompat.conformance.grpo.methods import RLOO, Method

__all__ = ["ADAPTER"]


class RLOOAdapter(SamplingAdapter):
    trainer: ClassVar[str] = "rloo"
    method: ClassVar[Method] = RLOO


ADAPTER = RLOOAdapter()
