"""The error of a cure that cannot know what to do."""

from __future__ import annotations

import functools
from importlib import metadata

__all__ = ["CureError", "installed_version", "leaving_out", "versions_of"]


class CureError(RuntimeError):
    """A cure cannot see what it needs to see, and doing nothing would be a silent mistake.

    Args:
        cure: the mixin's name; empty where it is not known.
        expected: what it looked for, and where.
        seen: what is there instead.
        packages: whose installed versions the message gives.
        remedy: what to do; by default how to leave the cure out.
    """

    def __init__(
        self, cure: str, *, expected: str, seen: str, packages: tuple[str, ...] = (), remedy: str = ""
    ) -> None:
        self.cure = cure
        versions = f" with {versions_of(packages)}" if packages else ""
        if not remedy:
            remedy = f"Take a newer pytest-trlcompat, or releases that it knows{leaving_out(cure)}"
        super().__init__(f"{cure or 'a cure'}{versions}: looked for {expected}, but {seen}. {remedy}")


def leaving_out(cure: str) -> str:
    """The end of a remedy: how to train without a cure; empty where it is not known which."""
    return f", or leave this cure out where you do not need it: cured(YourTrainer, without=[{cure!r}])" if cure else ""


def versions_of(packages: tuple[str, ...]) -> str:
    """Installed versions for a message: ``trl 1.16.0, torch 2.13.0``."""
    return ", ".join(f"{package} {installed_version(package) or '(not installed)'}" for package in packages)


@functools.cache
def installed_version(package: str) -> str | None:
    """The version of a package, of which nothing is imported; ``None`` where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
