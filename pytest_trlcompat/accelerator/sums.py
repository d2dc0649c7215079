"""The SHA-256 sums of a build's files, in the format of ``sha256sum``."""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["FILE", "damage", "names", "write"]

FILE = "SHA256SUMS"
"""The file in the folder of a build; it is written last, so a build that has it is whole."""


def write(folder: Path) -> None:
    """Record the sums of all files in ``folder``. From then on, nobody else can write to them."""
    lines = []
    # A list, since folders are made while the tree is walked.
    for module in list(folder.rglob("*.py")):
        # Otherwise Python makes this folder later, and with a umask of 0 everybody can write to it.
        (module.parent / "__pycache__").mkdir(exist_ok=True)
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        path.chmod(path.stat().st_mode & ~0o022)
        lines.append(f"{_sum(path)}  {path.relative_to(folder).as_posix()}\n")
    for below in folder.rglob("*"):
        if below.is_dir():
            below.chmod(0o755)
    (folder / FILE).write_text("".join(lines), encoding="utf-8")
    (folder / FILE).chmod(0o644)


def names(folder: Path) -> list[str]:
    """The files of a build, relative to its folder: the file of the sums, and the files that have a sum."""
    return [FILE, *(name for name, _ in _read(folder))]


def damage(folder: Path) -> str | None:
    """The first file that is missing or differs from its sum; ``None`` if the build is whole."""
    try:
        recorded = _read(folder)
    except (OSError, ValueError):
        return FILE
    for name, recorded_sum in recorded:
        path = folder / name
        try:
            if _sum(path) != recorded_sum:
                return name
        except OSError:
            return name
    return None if recorded else FILE


def _read(folder: Path) -> list[tuple[str, str]]:
    recorded = []
    for line in (folder / FILE).read_text(encoding="utf-8").splitlines():
        digest, sign, name = line.partition("  ")
        # Otherwise a name could lead out of the folder.
        if not sign or ".." in name.split("/") or name.startswith("/"):
            raise ValueError(f"{line!r} is not a sum and a name")
        recorded.append((name, digest))
    return recorded


def _sum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
