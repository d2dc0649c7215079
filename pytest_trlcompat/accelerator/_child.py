"""Run a compiler or an interpreter, and leave nothing of it running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["run"]


def run(command: Sequence[str], source: str, temporary: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a command to its end. When this process is interrupted, the command and its children are killed.

    Args:
        source: what the command reads from its standard input.
        temporary: the folder for its temporary files.

    Returns:
        The exit status, and the output of both streams together.
    """
    # In English, since build.py looks for the system's message of a full disk in the output.
    environment = {**environment, "LC_ALL": "C", "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    try:
        output, _ = process.communicate(source)
    except BaseException:
        _kill_with_children(process.pid)
        process.wait()
        raise
    return process.returncode, output


def _kill_with_children(pid: int) -> None:
    """g++ is a driver, and the compiler proper, its child, would go on without it."""
    with contextlib.suppress(OSError):  # no /proc, or the process has ended
        # Children before their parent: once that has ended, nobody lists them as its own.
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            _kill_with_children(int(child))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
