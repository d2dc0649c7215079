"""Settings that decide when the training loop of PPO, and of the legacy RLOO, steps."""

from __future__ import annotations

from typing import Any

__all__ = ["STEPS"]

STEPS: dict[str, dict[str, Any]] = {
    "clipping": {"max_grad_norm": 0.1},
    "accumulation": {"gradient_accumulation_steps": 2},
    "mini-batches": {"gradient_accumulation_steps": 2, "num_mini_batches": 2},
}
