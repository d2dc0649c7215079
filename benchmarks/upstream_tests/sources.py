"""Where TRL's tests come from: the source distribution of the release, or a git repository of TRL."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.uv import find_uv

MODULES = {
    "GRPOTrainer": ("tests/test_grpo_trainer.py",),
    "PPOTrainer": ("tests/test_ppo_trainer.py", "tests/experimental/test_ppo_trainer.py"),
    "SFTTrainer": ("tests/test_sft_trainer.py",),
    "DPOTrainer": ("tests/test_dpo_trainer.py",),
    "RewardTrainer": ("tests/test_reward_trainer.py",),
    "RLOOTrainer": ("tests/test_rloo_trainer.py",),
    "KTOTrainer": ("tests/test_kto_trainer.py", "tests/experimental/test_kto_trainer.py"),
}
"""Each trainer that is corrected, and the modules of its tests, where older and newer releases have them."""
_IN_ALL = MODULES["GRPOTrainer"][0]


def fetch_tests(release: str, folder: Path, *, git: str | None, ref: str | None) -> str:
    """Put ``tests`` of a release of TRL and its ``pyproject.toml`` into a new ``folder``; returns where they are from.

    Nothing else, since pytest adds the folder to the path, and TRL is to be the one that is installed.

    Args:
        git: path or address of a repository of TRL.
        ref: tag, branch or commit to take the tests of; ``None``: those of the source distribution, or else of the
            release's tag.

    Raises:
        MatrixError: there are none.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        if ref is None:
            _unpack(_download(release, scratch), folder)
        if not (folder / _IN_ALL).exists():
            if git is None:
                raise MatrixError(
                    f"trl {release}: its source distribution has no tests; name a repository of TRL: --git PATH-OR-URL"
                )
            ref = ref or f"v{release}"
            _unpack(_archive(git, ref, scratch), folder)
            if not (folder / _IN_ALL).exists():
                raise MatrixError(f"trl {release}: {ref} of {git} has no {_IN_ALL}")
    # Source distributions leave the first out, though modules import from each other by "."; pytest reads the second.
    (folder / "tests" / "__init__.py").touch()
    (folder / "pyproject.toml").touch()
    return f"git {ref}" if ref else "source distribution"


def _download(release: str, scratch: str) -> Path:
    pip = ("run", "--quiet", "--no-project", "--isolated", "--with", "pip", "python", "-m", "pip")
    _run([find_uv(), *pip, "download", "--quiet", "--no-deps", "--no-binary", ":all:", f"trl=={release}"], scratch)
    (archive,) = Path(scratch).glob("trl-*.tar.gz")
    return archive


def _archive(git: str, ref: str, scratch: str) -> Path:
    repository = os.path.abspath(git) if os.path.exists(git) else git
    _run(["git", "init", "--quiet"], scratch)
    _run(["git", "fetch", "--quiet", "--depth", "1", repository, ref], scratch)
    _run(["git", "archive", "--prefix=trl/", "--output=trl.tar", "FETCH_HEAD", "tests", "pyproject.toml"], scratch)
    return Path(scratch, "trl.tar")


def _run(command: Sequence[str], folder: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MatrixError(f"{' '.join(command)} ended with exit status {done.returncode}:\n{done.stderr.strip()}")


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack what is wanted of an archive, all of whose files are in one folder."""
    with tarfile.open(archive) as file:
        for member in file.getmembers():
            name = member.name.partition("/")[2]
            if name == "pyproject.toml" or name.startswith("tests/"):
                member.name = name
                file.extract(member, folder, filter="data")
