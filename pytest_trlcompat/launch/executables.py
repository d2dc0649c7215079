"""What a command is on this machine: Python of this environment, another program, or a script for a shell.

Runs in ranks for what a command starts itself.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from pytest_trlcompat.launch.words import python_words

__all__ = ["executable", "is_foreign", "is_python_script", "look_anew", "shebang", "started_program"]

_HELPERS = ("debugpy", "pip", "ray", "tensorboard", "torch", "triton", "wandb")
"""Packages that start programs of their own, which do not train: compilers' workers, servers of logs."""
_HELPER_COMMANDS = frozenset(
    ("accelerate-config", "accelerate-estimate-memory", "accelerate-merge-weights", "ds_elastic", "ds_io")
) | {"ds_nvme_tune", "ds_report", "ds_ssh", "dsr", "vllm"}
"""Installed commands of the stack that start no ranks of a training."""
_ACCELERATE_HELPERS = ("config", "env", "estimate-memory", "merge-weights", "to-fsdp2", "tpu-config")
_RUNNERS = frozenset(("coverage", "fab", "invoke", "ipython", "kernprof", "memray", "papermill", "py.test", "pytest"))
"""Installed commands that run Python of the user's, though their packages have nothing to do with training."""
_STACK = frozenset(("accelerate", "deepspeed", "lightning", "pytorch-lightning", "torch", "transformers", "trl"))
_SHEBANG = re.compile(rb"#![^\n]*python|#!/bin/sh\n'''exec' [^\n]*python")
"""How a script begins that an installer has written for Python; the second form where the path is long."""
_INTERPRETER = re.compile(rb"#!/bin/sh\n'''exec' \"?(/[^\"\n ]*)|#! *(/[^\n ]*)")
_OF_THE_SYSTEM = tuple(Path(name) for name in ("/bin", "/sbin", "/usr/bin", "/usr/sbin"))
_INSTALLED = re.compile(rb"^from ([\w.]+) import \w+.*^ *sys\.exit\(", re.DOTALL | re.MULTILINE)
"""The function that a script calls which an installer has written for it."""


def is_foreign(program: Path) -> bool:
    """Whether an interpreter, or a command beside it, is of another virtual environment than this process."""
    # Symbolic links are not followed: an environment's interpreter is a link to the one that it was made of.
    prefix = program.parent.parent
    is_environment = (prefix / "pyvenv.cfg").is_file() or (prefix / "conda-meta").is_dir()
    return is_environment and prefix.resolve() != Path(sys.prefix).resolve()


def look_anew() -> None:
    """Forget which files commands are, and what their first lines say: a program may have changed them."""
    executable.cache_clear()
    _head.cache_clear()


@functools.lru_cache
def executable(name: str, folder: Path, search_path: str | None = None) -> Path | None:
    """The file that a command is, if there is one; looked for once until :func:`look_anew`.

    Args:
        folder: the working directory of the command.
        search_path: its ``PATH``.
    """
    if os.sep in name:
        path = folder / name
        return path if path.is_file() else None
    command = shutil.which(name, path=search_path)
    return None if command is None else folder / command


def is_python_script(path: Path) -> bool:
    """Whether a script's first line has Python run it."""
    return _SHEBANG.match(_head(path)) is not None


def shebang(path: Path) -> list[str]:
    """The words of a script's first line, which says what runs it; none for another file."""
    head = _head(path)
    return os.fsdecode(head.partition(b"\n")[0][2:]).split(maxsplit=1) if head.startswith(b"#!") else []


@functools.lru_cache
def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            # Enough for the first line and, in a script that an installer has written, the function that it calls.
            return file.read(2048)
    except OSError:
        return b""


def started_program(words: Sequence[str], folder: Path | None = None, search_path: str | None = None) -> str:
    """The script or the module that a command gives to Python; empty for another command, and for code in a word.

    Empty too for the standard library's and those of :data:`_HELPERS`, which do something beside what starts them, and
    for installed commands of packages that require nothing of the stack, or that another environment's Python runs.

    Args:
        folder: the working directory of the command.
        search_path: its ``PATH``.
    """
    python = python_words(words)
    if python is None:
        path = executable(words[0], folder or Path.cwd(), search_path) if words else None
        return words[0] if path is not None and _is_program(path, words[1:]) else ""
    if python.kind == "m":
        top = python.target.partition(".")[0]
        return "" if _is_helper(top) or _is_accelerate_helper(top, python.arguments) else python.target
    if python.kind != "script":
        return ""
    parents = Path(python.target).resolve().parents
    beside = any(parent.parent.name == "site-packages" and parent.name in _HELPERS for parent in parents)
    # Not further up: site-packages may lie below the standard library's folder.
    return "" if beside or Path(sysconfig.get_path("stdlib")) in parents[:2] else python.target


def _is_helper(package: str) -> bool:
    return package in sys.stdlib_module_names or package in _HELPERS


def _is_accelerate_helper(name: str, arguments: Sequence[str]) -> bool:
    return name == "accelerate" and bool(arguments) and arguments[0] in _ACCELERATE_HELPERS


def _is_program(path: Path, arguments: Sequence[str]) -> bool:
    """Whether a command is Python that runs in this environment, and may start ranks."""
    if path.name in _HELPER_COMMANDS or _is_accelerate_helper(path.name, arguments):
        return False
    head = _head(path)
    if _SHEBANG.match(head) is None or not _is_run_here(head):
        return False
    installed = _INSTALLED.search(head)
    if path.name in _RUNNERS:
        return True
    if installed is None:  # somebody's own; lsb_release and others are the system's
        return path.parent not in _OF_THE_SYSTEM
    package = os.fsdecode(installed[1]).partition(".")[0]
    return not (_is_helper(package) or _requires_nothing_of_the_stack(package))


def _is_run_here(head: bytes) -> bool:
    """Whether a script's interpreter is looked for on ``PATH``, or is of this environment."""
    match = _INTERPRETER.match(head)
    name = os.fsdecode(match[1] or match[2]) if match is not None else ""
    if not name or Path(name).name == "env" or name == sys.executable:
        return True
    folders = {Path(sys.executable).parent.resolve(), Path(sysconfig.get_path("scripts")).resolve()}
    return Path(name).parent.resolve() in folders


@functools.cache
def _requires_nothing_of_the_stack(package: str) -> bool:
    """Whether an installed package requires nothing of the stack; of a package that is not found this is not known."""
    try:
        lines = metadata.distribution(package.replace("_", "-")).requires or []
    except metadata.PackageNotFoundError:
        return False
    required = {
        re.split(r"[^\w.-]", line, maxsplit=1)[0].lower().replace("_", "-") for line in lines if "extra" not in line
    }
    return package not in _STACK and not required & _STACK
