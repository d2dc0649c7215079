"""The stack that a person specified: what is installed here, or what pins, a list of requirements or a lock name.

Each package of the stack has one version, a range of versions (it is not pinned, or a lock holds several), any version
(it is not named), or is known not to be installed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from pytest_trlcompat import stack
from pytest_trlcompat.catalog.ranges import ALL, Range, at

__all__ = ["ORDER", "Mention", "StackSpec", "StackSpecError", "installed_here", "of_mentions", "pin"]

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
    """

    package: str
    text: str
    versions: Range
    where: str
    pinned: bool = False
    note: str = ""


@dataclass(frozen=True)
class StackSpec:
    """A stack, perhaps only partly known.

    Attributes:
        source: where it was read from, for the first line of an answer.
        texts: each package that is named, in :data:`ORDER`, to what was said about it.
        versions: each package to its possible versions; :data:`~pytest_trlcompat.catalog.ranges.ALL` if nothing is
            known about its version, ``None`` if it is known not to be installed.
        noted: by package, how the text was interpreted, where that is not obvious.
        ignored: what was not taken as part of the stack, and why.
    """

    source: str
    texts: Mapping[str, str]
    versions: Mapping[str, Range | None]
    noted: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

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
        return [package for package, versions in self.versions.items() if versions is None]

    @property
    def unknown(self) -> list[str]:
        """Packages about whose version nothing is known."""
        return [package for package, versions in self.versions.items() if versions == ALL]

    def with_versions(self, mentions: Iterable[Mention]) -> StackSpec:
        """The same stack with other versions of some packages."""
        others = _joined(mentions)
        texts = {**self.texts, **{package: mention.text for package, mention in others.items()}}
        return dataclasses.replace(
            self,
            texts={package: texts[package] for package in ORDER if package in texts},
            versions={**self.versions, **{package: mention.versions for package, mention in others.items()}},
            noted={**self.noted, **{package: mention.note for package, mention in others.items()}},
        )


def installed_here() -> StackSpec:
    """The stack that is installed in this environment.

    Raises:
        StackSpecError: when trl is not installed, or an installed version is not a valid version.
    """
    found = stack.installed()
    mentions = [pin(package, version, "installed here") for package, version in found.items()]
    spec = of_mentions(mentions, f"installed in {sys.prefix}", complete=True)
    if "trl" not in found:
        raise StackSpecError(
            f"trl is not installed in {sys.prefix}; run doctor with the Python of your training environment, or "
            "specify a stack, for example: trlcompat doctor trl==0.15.2 transformers==4.48.3"
        )
    return spec


def pin(package: str, version: str, where: str) -> Mention:
    """A package at one version.

    Raises:
        StackSpecError: when ``version`` is not a valid version.
    """
    try:
        return Mention(package, version, at(version), where, pinned=True)
    except ValueError as error:
        raise StackSpecError(f"{where}: the version of {package}: {error}") from error


def of_mentions(mentions: Iterable[Mention], source: str, *, complete: bool, ignored: Iterable[str] = ()) -> StackSpec:
    """A stack from what was said about each package.

    Args:
        complete: whether packages that are not mentioned are not installed; otherwise nothing is known about them.

    Raises:
        StackSpecError: when two sources contradict each other.
    """
    joined = _joined(mentions)
    rest = None if complete else ALL
    versions = {package: joined[package].versions if package in joined else rest for package in ORDER}
    texts = {package: joined[package].text for package in ORDER if package in joined}
    noted = {package: mention.note for package, mention in joined.items()}
    return StackSpec(source, texts, versions, noted, tuple(ignored))


def _joined(mentions: Iterable[Mention]) -> dict[str, Mention]:
    joined: dict[str, Mention] = {}
    for mention in mentions:
        before = joined.get(mention.package)
        if before is None:
            joined[mention.package] = mention
            continue
        both = before.versions & mention.versions
        if not both:
            raise StackSpecError(
                f"{mention.package} is required as {before.text} ({before.where}) and as {mention.text} "
                f"({mention.where}); no version satisfies both: remove one of them"
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
                f"{package} {text} comes before {version.base_version}: it may contain all of that release's "
                "changes or none, so both are considered"
            )
    return found
