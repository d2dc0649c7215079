"""The program ``trlcompat``: passes the arguments of each command to its package.

Imports that package only when its command is run, and no package of the stack.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from pytest_trlcompat import __version__

__all__ = ["main"]

COMMANDS = {
    "doctor": ("pytest_trlcompat.doctor.command", "which known issues affect a stack, and what cures them"),
    "issue": ("pytest_trlcompat.matrix.report.issue_command", "the page of a known issue, or known issues by words"),
    "cures": ("pytest_trlcompat.trainers.curing.command", "what each cure of a trainer does on the installed stack"),
    "init-ci": ("pytest_trlcompat.ci.command", "a file for GitHub or GitLab that tests a project of yours"),
    "bisect": ("pytest_trlcompat.bisect.cli", "which release, package or commit broke or cured a verdict"),
}
"""Each command's module, which has ``main(arguments) -> exit status``, and its line of help."""

# 128 and the number of SIGINT, as shells have it.
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="trlcompat",
        description="Does this combination of TRL, Transformers, Accelerate, DeepSpeed, PEFT and PyTorch train right?",
        epilog="commands:\n" + "".join(f"  {name:<{width}}  {about}\n" for name, (_, about) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"trlcompat {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="see: trlcompat COMMAND --help")
    parsed = parser.parse_args(arguments)
    try:
        status: int = importlib.import_module(COMMANDS[parsed.command][0]).main(parsed.arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe; Python must not print an error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return status
