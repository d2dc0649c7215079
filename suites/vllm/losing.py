"""The part of the test process in losing a vLLM server, see ``suites/in_rank/vllm_loss.py``. Imports no stack."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..in_rank.vllm_loss import DONE, REQUEST

__all__ = ["lost_on_request"]

_POLL = 0.1


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
        while not (folder / REQUEST).exists():
            if over.wait(_POLL):
                return
        try:
            lose()
        except Exception as error:
            failures.append(error)
        (folder / DONE).touch()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
    for failure in failures:
        raise failure
    assert (folder / DONE).exists(), "the server was not lost: the training ended before"
