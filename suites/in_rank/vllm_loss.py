"""A vLLM server that is lost while a trainer uses it: the test process ends or restarts it when a rank says so.

They meet at files. Imports the stack only inside functions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["LOST_AFTER", "lost_on_request", "request_loss"]

LOST_AFTER = 1
"""Steps after which the server is lost."""
_POLL = 0.1
_TIMEOUT = 300.0
"""Seconds that a rank waits; a server takes one to start on a busy machine."""
_REQUEST, _DONE = "request", "done"


def request_loss(trainer: Any, folder: str) -> None:
    """In a rank: lose the server once, after step :data:`LOST_AFTER` and the evaluation that follows it.

    The trainer has handed its weights over for that, and asks again with none in between.
    """
    from transformers import TrainerCallback

    class Loss(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == LOST_AFTER and state.is_world_process_zero:
                (Path(folder) / _REQUEST).touch()
                _wait_for(Path(folder) / _DONE)

    trainer.add_callback(Loss())


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the test process does not answer")
        time.sleep(_POLL)


@contextmanager
def lost_on_request(folder: Path, lose: Callable[[], None]) -> Iterator[None]:
    """In the test process: call ``lose`` when a rank asks for it within the block.

    Raises:
        Exception: of ``lose``, at the end.
        AssertionError: no rank has asked.
    """
    over = threading.Event()
    failures: list[Exception] = []

    def watch() -> None:
        while not (folder / _REQUEST).exists():
            if over.wait(_POLL):
                return
        try:
            lose()
        except Exception as error:
            failures.append(error)
        (folder / _DONE).touch()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
    for failure in failures:
        raise failure
    assert (folder / _DONE).exists(), "the server was not lost: the training ended before"
