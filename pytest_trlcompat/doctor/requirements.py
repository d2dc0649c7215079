"""Requirements as people write them: pins on a command line, and what one line of a list says of a package."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from pytest_trlcompat.catalog.ranges import parse
from pytest_trlcompat.doctor.stack_spec import Mention, StackSpecError
from pytest_trlcompat.stack import PACKAGES, package_of

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["LIKE", "Listing", "mention", "of_pins"]

LIKE = "write one requirement a line, like trl==0.15.2 (as pip freeze and pip list --format=freeze do)"
"""What a message ends with."""
_MOST_SPECIFIERS = 200
"""Of one package; a person writes a dozen."""
_NAMED = 5
"""How many lines a note names."""
_EXACT = re.compile(r"([A-Za-z][\w.-]*)==([0-9][\w.+]*)", re.ASCII)
"""A pin as most people write it."""


@dataclass
class Listing:
    """What a list of requirements says.

    Attributes:
        requirements: how many lines named a package, of the stack or not.
        unnamed: lines that install something whose name is not known: it may be a package of the stack.
        specifiers: how many there are of each package.
    """

    mentions: list[Mention] = field(default_factory=list)
    requirements: int = 0
    unnamed: list[str] = field(default_factory=list)
    specifiers: dict[str, int] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """What could not be taken as a part of the stack."""
        if not self.unnamed:
            return []
        rest = len(self.unnamed) - _NAMED
        where = "; ".join(self.unnamed[:_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
        return [
            f"{where}: installs something whose name is not given; it may be a package of the stack in any version, so "
            "none that is not named here is taken as not installed; add a pin for each that it is or brings, for "
            "example trl==VERSION"
        ]

    def add(self, mention: Mention, specifiers: int = 1) -> None:
        """
        Raises:
            StackSpecError: there are more specifiers of the package than can be meant.
        """
        number = self.specifiers[mention.package] = self.specifiers.get(mention.package, 0) + specifiers
        if number > _MOST_SPECIFIERS:
            raise StackSpecError(
                f"{mention.where}: more than {_MOST_SPECIFIERS} version specifiers of {mention.package}"
            )
        self.mentions.append(mention)


def of_pins(words: Sequence[str]) -> list[Mention]:
    """Read ``trl==0.15.2`` words of a command line; ranges are understood as well.

    Raises:
        StackSpecError: for a word of another form, or a package that is not part of the stack.
    """
    listing = Listing()
    for word in words:
        if (exact := _exact(word)) is not None:
            listing.add(exact)
            continue
        import difflib  # few words are no plain pins, and these take longer to import than to read

        from packaging.requirements import InvalidRequirement, Requirement

        try:
            requirement = Requirement(re.sub(r"^([\w.-]+(?:\[[^]]*\])?)\s*=(?!=)", r"\1==", word))
        except (InvalidRequirement, RecursionError) as error:
            reason = str(error).split("\n")[0]
            raise StackSpecError(f"{word!r}: cannot read {word!r} ({reason}); {LIKE}") from error
        name = package_of(requirement.name)
        if name not in PACKAGES:
            near = difflib.get_close_matches(name, PACKAGES, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise StackSpecError(f"unknown package {requirement.name!r}; known are {', '.join(PACKAGES)}{hint}")
        if requirement.url:
            raise StackSpecError(
                f"{word!r}: a pin has a version, like {name}==VERSION; give a list with URLs as a file"
            )
        listing.add(*mention(requirement, "the command line"))
    return listing.mentions


def _exact(word: str) -> Mention | None:
    """The mention of a plain pin; ``None`` for whatever needs a closer look."""
    match = _EXACT.fullmatch(word)
    if match is None or (name := package_of(match[1])) not in PACKAGES:
        return None
    try:
        Version(match[2])
    except InvalidVersion:
        return None
    return Mention.of_version(name, match[2], "the command line")


def mention(requirement: Requirement, location: str) -> tuple[Mention, int]:
    """What a requirement by name specifies, and by how many specifiers."""
    name, marker = package_of(requirement.name), str(requirement.marker or "")
    specifiers = list(requirement.specifier)
    if len(specifiers) > _MOST_SPECIFIERS:
        raise StackSpecError(f"{location}: more than {_MOST_SPECIFIERS} version specifiers of {name}")
    if len(specifiers) == 1 and specifiers[0].operator in ("==", "===") and not specifiers[0].version.endswith("*"):
        return dataclasses.replace(Mention.of_version(name, specifiers[0].version, location), marker=marker), 1
    text = str(requirement.specifier)
    try:
        versions = parse(text)
    except ValueError as error:
        raise StackSpecError(f"{location}: the version of {name}: {error}") from error
    if not versions:
        raise StackSpecError(f"{location}: no version of {name} satisfies {text!r}")
    return Mention(name, versions.describe(), versions, location, marker=marker), max(1, len(specifiers))
