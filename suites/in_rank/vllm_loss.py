"""A vLLM server that is lost while a trainer uses it: the test process ends or restarts it when a rank says so.

They meet at files; see ``suites/vllm/server_faults.py``.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

__all__ = ["DONE", "LOST_AFTER", "REQUEST", "request_loss"]

LOST_AFTER = 1
"""Steps after which the server is lost."""
_POLL = 0.1
_TIMEOUT = 300.0
"""Seconds that a rank waits; a server takes one to start on a busy machine."""
REQUEST, DONE = "request", "done"
"""Files by which a rank asks for the loss, and is told that it has happened."""


def request_loss(trainer: Any, folder: str) -> None:
    """In a rank: lose the server once, after step :data:`LOST_AFTER` and the evaluation that follows it.

    The trainer has handed its weights over for that, and asks again with none in between.
    """
    from transformers import TrainerCallback

    class Loss(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == LOST_AFTER and state.is_world_process_zero:
                (Path(folder) / REQUEST).touch()
                _wait_for(Path(folder) / DONE)

    trainer.add_callback(Loss())


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the test process does not answer")
        time.sleep(_POLL)
