"""The stack that a person specified: what is installed here, or what pins, a list of requirements or a lock name.

Each package of the stack has one version, a range of versions (it is not pinned, or a lock holds several), any version
(it is not named), or is known not to be installed.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from pytest_trlcompat import stack
from pytest_trlcompat.catalog.ranges import ABSENT, ALL, Range, at, both

__all__ = ["ORDER", "Mention", "StackSpec", "StackSpecError", "installed_here", "joined", "of_mentions"]

ORDER = ("trl", "transformers", *(package for package in stack.PACKAGES if package not in ("trl", "transformers")))
"""The packages in the order in which a person names them, and would be least willing to change their versions."""


class StackSpecError(ValueError):
    """A specification that is not a valid stack; the message is for the person who wrote it."""


@dataclass(frozen=True)
class Mention:
    """What one source says about one package.

    Attributes:
        text: as a person reads it: ``0.15.2``, ``>=0.15,<0.18``, ``git+https://...``.
        where: file and line.
        pinned: whether the text is one version.
        note: how it was interpreted, where that is not obvious.
        marker: of the environments in which it holds; empty for all.
    """

    package: str
    text: str
    versions: Range
    where: str
    pinned: bool = False
    note: str = ""
    marker: str = ""

    @classmethod
    def of_version(cls, package: str, version: str, where: str) -> Mention:
        """A package at one version.

        Raises:
            StackSpecError: when ``version`` is not a valid version.
        """
        try:
            return cls(package, version, at(version), where, pinned=True)
        except ValueError as error:
            raise StackSpecError(f"{where}: the version of {package}: {error}") from error


@dataclass(frozen=True)
class StackSpec:
    """A stack, perhaps only partly known.

    Attributes:
        source: where it was read from, for the first line of an answer.
        texts: each package that is named, in :data:`ORDER`, to what was said about it.
        versions: each package to its possible versions; :data:`~pytest_trlcompat.catalog.ranges.ALL` if nothing is
            known about its version, ``None`` if it is known not to be installed. Of a package that may be installed or
            not the range holds :data:`~pytest_trlcompat.catalog.ranges.ABSENT`.
        noted: by package, how the text was interpreted, where that is not obvious.
        ignored: what was not taken as part of the stack, and why.
        together: the stacks that are possible, one for each fork of a lock; ``versions`` is all of them. Empty where
            every version of one package goes with every version of the others.
        python: the minor release of Python, ``3.12``; empty if it is not known.
    """

    source: str
    texts: Mapping[str, str]
    versions: Mapping[str, Range | None]
    noted: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    together: tuple[Mapping[str, Range], ...] = ()
    python: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the person who specified the stack: what was ignored, and how the rest was interpreted."""
        noted = (self.noted[package] for package in ORDER if self.noted.get(package))
        return (*self.ignored, *noted, *_prereleases(self.texts))

    @property
    def pinned(self) -> dict[str, Version]:
        """The packages of which the exact version is known."""
        return {
            package: versions.version
            for package, versions in self.versions.items()
            if versions is not None and versions.version is not None
        }

    @property
    def absent(self) -> list[str]:
        """Packages that are not installed, without the optional ones, which most stacks do not have."""
        return [p for p, versions in self.versions.items() if versions is None and p not in stack.OPTIONAL]

    @property
    def unknown(self) -> list[str]:
        """Packages about whose version nothing is known."""
        return [p for p, versions in self.versions.items() if versions is not None and versions.covers(ALL)]

    def with_versions(self, other: StackSpec) -> StackSpec:
        """The same stack with the versions of some packages that another one names."""
        named = {package: other.versions[package] for package in other.texts}
        texts = {**self.texts, **other.texts}
        stacks = [
            {**mine, **{package: theirs[package] for package in named}}
            for mine in self.together or [_box(self.versions)]
            for theirs in other.together or [_box(named)]
        ]
        return dataclasses.replace(
            self,
            texts={package: texts[package] for package in ORDER if package in texts},
            versions={**self.versions, **named},
            noted={**self.noted, **{package: other.noted.get(package, "") for package in named}},
            ignored=(*self.ignored, *other.ignored),
            together=tuple(stacks) if len(stacks) > 1 else (),
        )


def _box(versions: Mapping[str, Range | None]) -> dict[str, Range]:
    return {package: ABSENT if allowed is None else allowed for package, allowed in versions.items()}


def installed_here() -> StackSpec:
    """The stack that is installed in this environment.

    Raises:
        StackSpecError: when trl is not installed, or an installed version is not a valid version.
    """
    versions = stack.installed()
    mentions = [Mention.of_version(package, version, "installed here") for package, version in versions.items()]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    spec = dataclasses.replace(of_mentions(mentions, f"installed in {sys.prefix}", complete=True), python=python)
    if "trl" not in versions:
        raise StackSpecError(
            f"trl is not installed in {sys.prefix}; run doctor with the Python of your training environment, or "
            "specify a stack, for example: trlcompat doctor trl==0.15.2 transformers==4.48.3"
        )
    return spec


def of_mentions(mentions: Iterable[Mention], source: str, *, complete: bool, ignored: Iterable[str] = ()) -> StackSpec:
    """A stack from what was said about each package, whatever the markers.

    Args:
        complete: whether packages that are not mentioned are not installed; otherwise nothing is known about them,
            but of :data:`~pytest_trlcompat.stack.OPTIONAL` ones that they are not installed.

    Raises:
        StackSpecError: when two sources contradict each other.
    """
    by_package = joined(mentions)
    rest = {package: None if complete or package in stack.OPTIONAL else ALL for package in ORDER}
    versions = {package: by_package[package].versions if package in by_package else rest[package] for package in ORDER}
    texts = {package: by_package[package].text for package in ORDER if package in by_package}
    noted = {package: mention.note for package, mention in by_package.items()}
    return StackSpec(source, texts, versions, noted, tuple(ignored))


def joined(mentions: Iterable[Mention]) -> dict[str, Mention]:
    """By package, one mention for which all mentions of it hold.

    Raises:
        StackSpecError: two of them contradict each other.
    """
    of_package: dict[str, list[Mention]] = {}
    for mention in mentions:
        of_package.setdefault(mention.package, []).append(mention)
    return {package: _all_of(several) for package, several in of_package.items()}


def _all_of(mentions: list[Mention]) -> Mention:
    if len(mentions) == 1:
        return mentions[0]
    versions = both(mention.versions for mention in mentions)
    if not versions:
        raise _contradiction(mentions)
    pinned = next((mention for mention in mentions if mention.pinned), None)
    limited = [mention for mention in mentions if mention.versions != ALL]
    telling = pinned or (limited or mentions)[0]
    text = versions.describe() if pinned is None and len(limited) > 1 else telling.text
    return dataclasses.replace(telling, text=text, versions=versions)


def _contradiction(mentions: list[Mention]) -> StackSpecError:
    """The first mention that leaves no version, and the first one before it that it contradicts."""
    left = list(itertools.accumulate((mention.versions for mention in mentions), operator.and_))
    number = next(number for number, versions in enumerate(left) if not versions)
    mention, earlier = mentions[number], mentions[:number]
    before = next((candidate for candidate in earlier if not candidate.versions.meets(mention.versions)), earlier[-1])
    return StackSpecError(
        f"{mention.package} is required as {before.text} ({before.where}) and as {mention.text} "
        f"({mention.where}); no version satisfies both: remove one of them"
    )


def _prereleases(texts: Mapping[str, str]) -> list[str]:
    notes = []
    for package, text in texts.items():
        try:
            version = Version(text)
        except InvalidVersion:
            continue
        if version.is_prerelease:
            notes.append(
                f"{package} {text} comes before {version.base_version}: it may contain all of that release's "
                "changes or none, so both are considered"
            )
    return notes
