"""A :class:`subprocess.Popen` that looks like an ended process, for a program that ran in this process instead.

Runs in ranks.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any

__all__ = ["fill"]


def fill(process: Any, arguments: Mapping[str, Any], run: Callable[[], int]) -> None:
    """Run a program in this process, and fill in ``process`` as one that has ended; its output is in files.

    Args:
        process: a :class:`subprocess.Popen` whose ``__init__`` has not run.
        arguments: those of that ``__init__``.
        run: returns the exit status.
    """
    process._child_created = False  # nothing to wait for when it is collected
    # What communicate(), wait() and poll() look at, and Popen.__init__ would have set; see Lib/subprocess.py.
    process._communication_started, process._input = False, None
    process._waitpid_lock, process._sigint_wait_secs = threading.Lock(), 0
    process.args, process.pid, process.returncode = arguments["args"], os.getpid(), None
    process.stdin = process.stdout = process.stderr = None
    process.encoding, process.errors = arguments["encoding"], arguments["errors"]
    process.text_mode = bool(
        arguments["text"] or arguments["universal_newlines"] or arguments["encoding"] or arguments["errors"]
    )
    process.pipesize = -1
    # What was printed before would otherwise be written out into the program's files.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    before = [os.dup(number) for number in (1, 2)]
    pipes: dict[str, IO[bytes]] = {}
    try:
        # In this order, since stderr=STDOUT takes what stdout has become.
        for number, name in ((1, "stdout"), (2, "stderr")):
            _redirect(number, name, arguments[name], pipes)
        process.returncode = run()
    finally:
        # What the program has printed, and Python still keeps, belongs into its own files.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, copy in zip((1, 2), before, strict=True):
            os.dup2(copy, number)
            os.close(copy)
    for name, file in pipes.items():
        file.seek(0)
        text = io.TextIOWrapper(file, arguments["encoding"], arguments["errors"]) if process.text_mode else file
        setattr(process, name, text)


def _redirect(number: int, name: str, target: Any, pipes: dict[str, IO[bytes]]) -> None:
    if target is None:
        return
    if target == subprocess.STDOUT:
        os.dup2(1, number)
    elif target == subprocess.PIPE:
        # A file and no pipe: nobody reads until the program has ended, and a full pipe would stop it for ever.
        pipes[name] = tempfile.TemporaryFile()  # noqa: SIM115 - the program's to close
        os.dup2(pipes[name].fileno(), number)
    elif target == subprocess.DEVNULL:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
    else:
        os.dup2(target if isinstance(target, int) else target.fileno(), number)
