"""The loop of a process in the role of pytest's: a line on stdin is one launch, a line on stdout its losses."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["serve"]


def serve(launch: Callable[[Path, int], None]) -> None:
    """Answer every line with the losses of each rank, which ``launch`` has left in a folder, until stdin is closed.

    Args:
        launch: called with the folder and a number that grows with every launch.
    """
    for number, _ in enumerate(sys.stdin):
        with tempfile.TemporaryDirectory() as folder:
            launch(Path(folder), number)
            files = sorted(Path(folder).glob("*.json"))
            losses = [json.loads(file.read_text()) for file in files]
        print("losses", json.dumps(losses), flush=True)
