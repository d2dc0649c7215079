"""Whether an environment holds what its lock names: its distributions' metadata against the lock, nothing is imported.

Some 10 ms for an environment.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_trlcompat._due import Account
from pytest_trlcompat._provenance import distributions_in
from pytest_trlcompat.inference.recording_engine import DISTRIBUTION as RECORDING

__all__ = ["ALLOWED", "account_of", "additions"]

ALLOWED: Mapping[str, str] = {
    "pytest-trlcompat": "this project",
    "coverage": "added by nox -s coverage, which removes it at its end",
    "nvidia-*": "CUDA libraries of a CUDA build of torch",
    "cuda-*": "CUDA libraries of a CUDA build of torch",
    "triton": "part of a CUDA build of torch",
    "bitsandbytes": "added by hand for the suites of QLoRA, see docs/explanation/limits.md",
}
"""What an environment may hold in addition to its lock, by patterns of canonical names, with the reason."""

_COMMIT = re.compile(r"\+g[0-9a-f]+$")
"""How a lock names a commit; its wheel says the version of the tree alone."""
_RECORDING_LOCAL = "+recording"
"""How the version of the recording engine ends, which is installed under vLLM's name."""


def account_of(root: Path, packages: Mapping[str, str]) -> Account[str]:
    """The packages of a lock, met where the environment has exactly that version; local parts of builds do not count.

    Args:
        packages: canonical name to version, as :attr:`Lock.packages <pytest_trlcompat.matrix.locks.Lock.packages>`.
    """
    account = Account("packages of the lock", packages)
    for name, version in _installed(root).items():
        expected = packages.get(name)
        if expected is None:
            if not _reason(name):
                account.refuse(name, f"{version} is installed, and not in the lock")
        elif expected in (version, version.partition("+")[0]) or _COMMIT.sub("", expected) == version:
            account.meet(name)
        else:
            account.refuse(name, f"is {version} where the lock says {expected}")
    return account


def additions(root: Path, packages: Mapping[str, str]) -> Iterator[str]:
    """A line for each distribution that is allowed though the lock lacks it, and may change what is measured."""
    for name, version in _installed(root).items():
        if name not in packages and name not in ("pytest-trlcompat", "coverage") and (reason := _reason(name)):
            yield f"{name} {version} is beside the lock: {reason}"


def _installed(root: Path) -> dict[str, str]:
    installed = distributions_in(sorted((root / "lib").glob("python*/site-packages")))
    vllm = installed.get("vllm", "")
    if vllm.endswith(_RECORDING_LOCAL):
        del installed["vllm"]
        installed[RECORDING] = vllm.removesuffix(_RECORDING_LOCAL)
    return installed


def _reason(name: str) -> str:
    return next((reason for pattern, reason in ALLOWED.items() if fnmatch.fnmatchcase(name, pattern)), "")
