"""A stack whose packages have other versions in other environments: the forks of a lock, the markers of a list.

The doctor answers for all environments in which the stack may be installed, and the worst of them counts. Versions that
never stand together, since their markers exclude each other, are not combined; where that is not certain they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_trlcompat.catalog.ranges import ABSENT, ALL, Range, either
from pytest_trlcompat.doctor.stack_spec import ORDER, Mention, StackSpec, StackSpecError, joined, of_mentions
from pytest_trlcompat.stack import OPTIONAL

__all__ = ["PLATFORMS", "Asked", "combine"]

PLATFORMS = ("linux", "darwin", "win32")
_MOST_TOGETHER = 32
"""Stacks that are looked at one by one; of more, every version is taken to go with every other."""
_OR = " or "
_MISSING = "not installed"
_SHORT = 100
"""Characters of a marker in a text."""


@dataclass(frozen=True)
class Asked:
    """What a question is limited to.

    Attributes:
        python: a minor release of Python, ``3.12``; empty for all.
        platform: one of :data:`PLATFORMS`; empty for all.
    """

    python: str = ""
    platform: str = ""

    def describe(self) -> str:
        named = [f"Python {self.python}" if self.python else "", self.platform]
        return " on ".join(filter(None, named)) or "every environment that is considered"


def combine(
    mentions: Sequence[Mention],
    source: str,
    asked: Asked,
    *,
    lock: bool,
    complete: bool,
    requires_python: str = "",
    ignored: Iterable[str] = (),
) -> StackSpec:
    """The stack that some mentions with markers make together.

    Args:
        lock: whether only one of several mentions of a package applies; otherwise each applies where its marker holds.
        complete: whether a package that is not mentioned, or not there, is not installed.
        requires_python: the Pythons that the source is for.

    Raises:
        StackSpecError: when no environment has what is mentioned, or something that should be a marker is none.
    """
    notes = list(ignored)
    if not any(mention.marker for mention in mentions):
        spec = of_mentions(_one_each(mentions, source) if lock else mentions, source, complete=complete, ignored=notes)
        return dataclasses.replace(spec, python=asked.python)
    groups = _groups(mentions, asked, requires_python)
    if groups is None:
        notes.append(
            f"{source}: its markers tell more environments apart than can be looked at one by one, so every version is "
            "taken to go with every other"
        )
        return dataclasses.replace(_loose(mentions, source, lock, complete, notes), python=asked.python)
    here = set().union(*groups)
    notes += [
        f"{mention.where}: {mention.package} {mention.text} ; {_shorten(mention.marker)} is ignored, because its "
        f"marker excludes {asked.describe()}"
        for number, mention in enumerate(mentions)
        if number not in here
    ]
    stacks: list[dict[str, Mention]] = []
    failed: StackSpecError | None = None
    has_trl = any(mention.package == "trl" for mention in mentions)
    excluded = False
    for group in groups:
        those = [mentions[number] for number in sorted(group)]
        if has_trl and not any(mention.package == "trl" for mention in those):
            excluded = True
            continue
        try:
            stacks.append(joined(_one_each(those, source) if lock else those))
        except StackSpecError as error:
            failed = error
    if not stacks:
        if failed is not None:
            raise failed
        raise StackSpecError(
            f"{source}: its markers leave out trl, which all known issues are about, for {asked.describe()}"
        )
    if excluded:
        markers = dict.fromkeys(
            _shorten(mention.marker) for mention in mentions if mention.package == "trl" and mention.marker
        )
        notes.append(f"{source}: trl is there only where {_OR.join(markers)}; nothing is said about other environments")
    if failed is not None:
        notes.append(f"not considered are environments in which this holds: {failed}")
    return _spec(stacks, mentions, source, complete, notes, asked.python)


def _groups(mentions: Sequence[Mention], asked: Asked, requires_python: str) -> list[frozenset[int]] | None:
    """For each kind of environment, the indices of the mentions that apply there; ``None`` if there are too many."""
    from pytest_trlcompat.doctor.markers import Environments, MarkerError, TooManyError  # few stacks have a marker

    try:
        environments = Environments(
            [mention.marker for mention in mentions],
            python=asked.python,
            requires_python=requires_python,
            platform=asked.platform,
        )
        sets = {marker: environments.where(marker) for marker in dict.fromkeys(mention.marker for mention in mentions)}
    except MarkerError as error:
        where = next((mention.where for mention in mentions if str(error) in mention.marker), mentions[0].where)
        raise StackSpecError(f"{where}: a marker cannot be read; write it like python_version < '3.12'") from error
    except TooManyError:
        return None
    groups = [environments.every]
    for where_one in sets.values():
        groups = [part for group in groups for part in (group & where_one, group & ~where_one) if part]
        if len(groups) > _MOST_TOGETHER:
            return None
    numbers = [
        frozenset(number for number, mention in enumerate(mentions) if group & sets[mention.marker]) for group in groups
    ]
    return sorted(set(numbers), key=sorted)


def _one_each(mentions: Iterable[Mention], source: str) -> list[Mention]:
    """One mention for each package: the only one, or one that says which versions are possible."""
    several: dict[str, list[Mention]] = {}
    for mention in mentions:
        several.setdefault(mention.package, []).append(mention)
    return [_one_of(those, source) for those in several.values()]


def _one_of(mentions: list[Mention], source: str) -> Mention:
    texts = list(dict.fromkeys(mention.text for mention in mentions))
    if len(texts) == 1:
        return mentions[0]
    first = mentions[0]
    note = (
        f"{source}: holds {first.package} {_either_text(texts)} for different environments, and its markers do not say "
        "which applies here"
    )
    note = "; ".join(dict.fromkeys([note, *(mention.note for mention in mentions if mention.note)]))
    versions = either(mention.versions for mention in mentions)
    return dataclasses.replace(first, text=_either_text(texts), versions=versions, pinned=False, note=note)


def _either_text(texts: Iterable[str]) -> str:
    """The versions that some texts name, each once; that the package may be missing comes last."""
    parts = dict.fromkeys(part for text in texts for part in text.split(_OR))
    last = [part for part in (_MISSING, "any version") if part in parts]
    return _OR.join([*(part for part in parts if part not in last), *last])


def _spec(
    stacks: Sequence[Mapping[str, Mention]],
    mentions: Sequence[Mention],
    source: str,
    complete: bool,
    notes: Sequence[str],
    python: str,
) -> StackSpec:
    rest = {package: ABSENT if complete or package in OPTIONAL else ALL for package in ORDER}
    versions: dict[str, Range | None] = {}
    texts: dict[str, str] = {}
    noted: dict[str, str] = {}
    for package in ORDER:
        present = [stack[package] for stack in stacks if package in stack]
        union = either(stack[package].versions if package in stack else rest[package] for stack in stacks)
        versions[package] = None if union == ABSENT else union
        if present:
            missing = [] if len(present) == len(stacks) else [_MISSING if complete else "any version"]
            texts[package] = _either_text([*(mention.text for mention in present), *missing])
            told = dict.fromkeys(mention.note for mention in present if mention.note)
            if len({mention.text for mention in present}) > 1 or len(present) < len(stacks):
                told = {**dict.fromkeys([_told(package, mentions, source)]), **told}
            noted[package] = "; ".join(told)
    boxes = {
        tuple(stack[package].versions if package in stack else rest[package] for package in ORDER): None
        for stack in stacks
    }
    together = tuple(dict(zip(ORDER, box, strict=True)) for box in boxes) if len(boxes) > 1 else ()
    return StackSpec(source, texts, versions, noted, tuple(notes), together, python)


def _told(package: str, mentions: Sequence[Mention], source: str) -> str:
    """``uv.lock: torch is 2.6.0 where sys_platform == 'darwin', 2.9.1 elsewhere; each of these is considered``."""
    where: dict[str, dict[str, None]] = {}
    for mention in mentions:
        if mention.package == package:
            where.setdefault(mention.text, {})[_shorten(mention.marker)] = None
    parts = [text + (f" where {_OR.join(markers)}" if "" not in markers else "") for text, markers in where.items()]
    return f"{source}: {package} is {', '.join(parts)}; each of these is considered"


def _loose(mentions: Sequence[Mention], source: str, lock: bool, complete: bool, notes: Sequence[str]) -> StackSpec:
    """The stack, if it is not known which markers can hold together."""
    if lock:
        sometimes = {mention.package for mention in mentions} - {
            mention.package for mention in mentions if not mention.marker
        }
        sometimes -= {"trl"}
        those = [
            dataclasses.replace(
                mention, versions=mention.versions | ABSENT, text=_either_text([mention.text, _MISSING]), pinned=False
            )
            if mention.package in sometimes
            else mention
            for mention in _one_each(mentions, source)
        ]
        return of_mentions(those, source, complete=complete, ignored=notes)
    always = {mention.package for mention in mentions if not mention.marker}
    those = [
        dataclasses.replace(mention, versions=ABSENT | ALL if complete else ALL, text="any version", pinned=False)
        for mention in mentions
        if mention.marker and mention.package not in always
    ]
    return of_mentions(
        [*(mention for mention in mentions if not mention.marker), *those], source, complete=complete, ignored=notes
    )


def _shorten(marker: str) -> str:
    return marker if len(marker) <= _SHORT else f"{marker[:_SHORT]}..."
