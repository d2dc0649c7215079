"""The stack that somebody asks about: what is installed here, or what a list of requirements or a lock says.

Each package of the stack stands at one version, in a range (nobody pinned it, or a lock holds several), anywhere (it is
not named), or is known not to be there. Imports only the standard library, ``packaging`` and rooms below.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from pytest_trlcompat import stack
from pytest_trlcompat.catalog.ranges import ALL, Range, at

__all__ = ["ORDER", "Given", "GivenError", "Mention", "installed_here", "of_mentions", "pin"]

ORDER = ("trl", "transformers", *(package for package in stack.PACKAGES if package not in ("trl", "transformers")))
"""The packages as a person names them, and in the order in which one gives up a version last."""


class GivenError(ValueError):
    """What was given is no stack; one message for the person who gave it."""


@dataclass(frozen=True)
class Mention:
    """What one place says of one package.

    Attributes:
        text: as a person reads it: ``0.15.2``, ``>=0.15,<0.18``, ``git+https://...``.
        where: file and line.
        pinned: whether the text is one version.
        note: how it was understood, where that is not obvious.
    """

    package: str
    text: str
    versions: Range
    where: str
    pinned: bool = False
    note: str = ""


@dataclass(frozen=True)
class Given:
    """A stack, perhaps known in part only.

    Attributes:
        source: where it was read from, for the first line of an answer.
        texts: package to what was said of it, in :data:`ORDER`; what is not named is left out.
        versions: package to where it may stand; :data:`~pytest_trlcompat.catalog.ranges.ALL` for a package whose
            version is not known, ``None`` for one that is known not to be installed.
        noted: how the texts were understood, where that is not obvious, by package.
        passed_over: what was not taken for a part of the stack, and why.
    """

    source: str
    texts: Mapping[str, str]
    versions: Mapping[str, Range | None]
    noted: Mapping[str, str] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """A line each for all that a person should know of how this was read."""
        noted = (self.noted[package] for package in ORDER if self.noted.get(package))
        return (*self.passed_over, *noted, *_prereleases(self.texts))

    @property
    def pinned(self) -> dict[str, Version]:
        """The packages whose one version is known."""
        return {
            package: versions.version
            for package, versions in self.versions.items()
            if versions is not None and versions.version is not None
        }

    @property
    def absent(self) -> list[str]:
        return [package for package, versions in self.versions.items() if versions is None]

    @property
    def unknown(self) -> list[str]:
        """Packages of which no version at all is known."""
        return [package for package, versions in self.versions.items() if versions == ALL]

    def but(self, mentions: Iterable[Mention]) -> Given:
        """The same stack with other versions of some packages."""
        others = _joined(mentions)
        texts = {**self.texts, **{package: mention.text for package, mention in others.items()}}
        return dataclasses.replace(
            self,
            texts={package: texts[package] for package in ORDER if package in texts},
            versions={**self.versions, **{package: mention.versions for package, mention in others.items()}},
            noted={**self.noted, **{package: mention.note for package, mention in others.items()}},
        )


def installed_here() -> Given:
    """What is installed beside this package.

    Raises:
        GivenError: trl is not, or something has a version that is none.
    """
    found = stack.installed()
    mentions = [pin(package, version, "installed here") for package, version in found.items()]
    given = of_mentions(mentions, f"installed in {sys.prefix}", complete=True)
    if "trl" not in found:
        raise GivenError(
            f"trl is not installed in {sys.prefix}; run doctor with the Python of the environment that trains, or name "
            "a stack, for example: trlcompat doctor trl==0.15.2 transformers==4.48.3"
        )
    return given


def pin(package: str, version: str, where: str) -> Mention:
    """A package at one version.

    Raises:
        GivenError: it is no version.
    """
    try:
        return Mention(package, version, at(version), where, pinned=True)
    except ValueError as error:
        raise GivenError(f"{where}: the version of {package}: {error}") from error


def of_mentions(mentions: Iterable[Mention], source: str, *, complete: bool, passed_over: Iterable[str] = ()) -> Given:
    """Put together what was said of each package.

    Args:
        complete: what is not mentioned is not installed; else nothing is known of it.

    Raises:
        GivenError: two places contradict each other.
    """
    joined = _joined(mentions)
    rest = None if complete else ALL
    versions = {package: joined[package].versions if package in joined else rest for package in ORDER}
    texts = {package: joined[package].text for package in ORDER if package in joined}
    noted = {package: mention.note for package, mention in joined.items()}
    return Given(source, texts, versions, noted, tuple(passed_over))


def _joined(mentions: Iterable[Mention]) -> dict[str, Mention]:
    joined: dict[str, Mention] = {}
    for mention in mentions:
        before = joined.get(mention.package)
        if before is None:
            joined[mention.package] = mention
            continue
        both = before.versions & mention.versions
        if not both:
            raise GivenError(
                f"{mention.package} is asked for as {before.text} ({before.where}) and as {mention.text} "
                f"({mention.where}); no version is both: take one of the two out"
            )
        kept = next((each for each in (before, mention) if each.pinned), None)
        if kept is None and before.versions != ALL and mention.versions != ALL:
            text = both.describe()
        else:
            text = (kept or (mention if before.versions == ALL else before)).text
        joined[mention.package] = dataclasses.replace(kept or mention, text=text, versions=both)
    return joined


def _prereleases(texts: Mapping[str, str]) -> list[str]:
    found = []
    for package, text in texts.items():
        try:
            version = Version(text)
        except InvalidVersion:
            continue
        if version.is_prerelease:
            found.append(
                f"{package} {text} comes before {version.base_version}: it may hold all of that release's changes, or "
                "none, so it is judged as both"
            )
    return found
