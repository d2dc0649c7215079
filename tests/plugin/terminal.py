"""pytest in a pseudo-terminal, as a person runs it who types at a debugger's prompt."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

from .running import PLUGIN, ROOT

__all__ = ["Terminal"]

_LIMIT = 120.0


class Terminal:
    """A run of pytest in ``folder``; use it as a context manager."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.seen = ""
        self._ours, theirs = pty.openpty()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRLCOMPAT_"))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "--color=no", *arguments],
            cwd=folder,
            env={**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT), "TERM": "dumb"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._ours)
        self._process.kill()
        self._process.wait()

    def wait_for(self, text: str) -> str:
        """What is printed until ``text`` and with it, since the last time.

        Raises:
            AssertionError: it is never printed.
        """
        deadline = time.monotonic() + _LIMIT
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    data = os.read(self._ours, 1 << 16)
                except OSError:  # the other side has closed
                    data = b""
                assert data, self.seen
                self.seen += data.decode(errors="replace").replace("\r\n", "\n")
        before, found, self.seen = self.seen.partition(text)
        return re.sub(r"\x1b\[[?\d;]*[a-z]", "", before + found)

    def type(self, line: str) -> None:
        os.write(self._ours, f"{line}\n".encode())
