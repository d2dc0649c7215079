"""What is done about each way that a library goes on NPUs alone, or on CUDA GPUs alone: ``npu_branches.toml``.

The software accelerator bears the name of an NPU, so a release that brings a branch nobody has decided about may show
what no user of a GPU meets, or hide what one does meet. As a program this lists such branches, of the environment that
runs it or of others, and exits with 1 if there are any::

    python -m pytest_trlcompat.accelerator.decisions [--unused] [--page FILE] [SITE_PACKAGES ...]

Reads sources (:mod:`pytest_trlcompat.accelerator.branches`) and imports none of them. Needs ``packaging``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from pytest_trlcompat.accelerator.branches import Branch, npu_branches

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["PACKAGES", "Decision", "DecisionError", "Entry", "Found", "decide", "installed", "load", "main", "scan"]

PACKAGES = ("transformers", "accelerate", "trl", "deepspeed", "peft", "datasets")
TABLE = Path(__file__).with_name("npu_branches.toml")


class Decision(str, Enum):
    """What is done about a branch; the values stand in the table."""

    SUPPLIED = "supplied"
    """The stand-in for torch_npu has what is called there."""
    AS_CUDA = "as cuda"
    """The library is made to go as it goes on CUDA, by an adaptation of the stand-in."""
    HARMLESS = "harmless"
    """It makes no difference to a training, or no training comes there."""
    LIMIT = "limit"
    """The software accelerator cannot show what a GPU does there."""

    def __str__(self) -> str:
        return self.value


class DecisionError(ValueError):
    """The table makes no sense; the text says where."""


@dataclass(frozen=True)
class Found:
    """A branch, and where it is."""

    package: str
    version: str
    file: str
    """Below the package's folder, with ``/``."""
    branch: Branch

    @property
    def place(self) -> str:
        """As the table names places: ``trainer/utils.py::get_kbit_device_map``, ``state.py::`` for a module's body."""
        return f"{self.file}::{self.branch.function}"

    def describe(self) -> str:
        branch = self.branch
        inside = branch.function or "<module>"
        return (
            f"{self.package} {self.version} {self.file}:{branch.line} in {inside}: "
            f"{branch.form} for {branch.kind} alone where {branch.condition}"
        )


@dataclass(frozen=True)
class Entry:
    """One decision, about the same branch in all the releases that have it.

    Attributes:
        versions: of the releases that have it, with those between two that were looked at; open upwards where the
            newest has it.
        at: places, ``*`` standing for any text.
        condition: what leads there, in the same manner; the opposite, ``not (...)``, counts as well.
        by: the adaptations that make the library go as on CUDA.
    """

    package: str
    versions: str
    at: tuple[str, ...]
    condition: tuple[str, ...]
    decision: Decision
    reason: str
    by: tuple[str, ...] = ()

    @cached_property
    def _specifiers(self) -> SpecifierSet:
        return SpecifierSet(self.versions)

    def holds_for(self, found: Found) -> bool:
        return (
            found.package == self.package
            and self._specifiers.contains(found.version, prereleases=True)
            and any(_pattern(at).fullmatch(found.place) for at in self.at)
            and any(_about(condition, found.branch.condition) for condition in self.condition)
        )


def load(path: Path = TABLE) -> tuple[Entry, ...]:
    """The table.

    Raises:
        DecisionError: an entry lacks something, has something unknown, or never decides.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise DecisionError(f"the table {path} cannot be read: {error}") from error
    return tuple(_entry(number, values) for number, values in enumerate(raw.get("branch", []), start=1))


def decide(found: Found, entries: Iterable[Entry]) -> Entry | None:
    """The first entry that holds for a branch."""
    return next((entry for entry in entries if entry.holds_for(found)), None)


def installed(site_packages: Sequence[str] | None = None) -> Iterator[tuple[str, str, Path]]:
    """Name, version and folder of each of :data:`PACKAGES` that is there, in this environment or in those folders."""
    paths = [None] if site_packages is None else [[path] for path in site_packages]
    for path in paths:
        given: dict[str, Any] = {} if path is None else {"path": path}
        found = {item.metadata["Name"]: item for item in importlib.metadata.distributions(**given)}
        for name in PACKAGES:
            if name in found:
                yield name, found[name].version, Path(str(found[name].locate_file(name)))


def scan(package: str, version: str, folder: Path) -> Iterator[Found]:
    """Every branch of a release whose files are in ``folder``."""
    for path in sorted(folder.rglob("*.py")):
        file = path.relative_to(folder).as_posix()
        try:
            branches = npu_branches(path.read_text(encoding="utf-8", errors="replace"), str(path))
        except (SyntaxError, ValueError):  # templates, and files for other releases of Python
            continue
        for branch in branches:
            yield Found(package, version, file, branch)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program. Returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_trlcompat.accelerator.decisions",
        description="List the branches for NPUs or CUDA GPUs alone about which npu_branches.toml says nothing.",
    )
    parser.add_argument("site_packages", nargs="*", help="folders to look in instead of this environment")
    parser.add_argument("--unused", action="store_true", help="list the entries that decide nothing there, too")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table as a page instead, in Markdown")
    options = parser.parse_args(arguments)
    entries = load()
    if options.page is not None:
        from pytest_trlcompat.accelerator.decisions_page import page

        options.page.write_text(page(entries), encoding="utf-8")
        return 0
    undecided, used, count = 0, set(), 0
    for package, version, folder in installed(options.site_packages or None):
        for found in scan(package, version, folder):
            count += 1
            entry = decide(found, entries)
            used.add(entry)
            if entry is None:
                undecided += 1
                print(f"undecided: {found.describe()}")
    unused = [entry for entry in entries if entry not in used] if options.unused else []
    for entry in unused:
        print(f"decides nothing: {entry.package} {entry.versions} {', '.join(entry.at)}: {', '.join(entry.condition)}")
    print(f"{count} branches, {undecided} of them undecided")
    return 1 if undecided or unused or not count else 0


_KEYS = {"package", "versions", "at", "condition", "decision", "reason", "by"}


def _entry(number: int, values: Mapping[str, Any]) -> Entry:
    where = f"entry {number} ({values.get('package', '?')}, {', '.join(values.get('at', ['?']))})"
    if set(values) - {"by"} != _KEYS - {"by"}:
        odd = sorted(set(values) ^ (_KEYS - {"by"}) - {"by"})
        raise DecisionError(f"{where} needs {', '.join(sorted(_KEYS - {'by'}))}; lacking or unknown: {', '.join(odd)}")
    if values["package"] not in PACKAGES:
        raise DecisionError(f"{where}: the package is none of {', '.join(PACKAGES)}")
    try:
        decision = Decision(values["decision"])
        SpecifierSet(values["versions"])
    except (ValueError, InvalidSpecifier) as error:
        raise DecisionError(f"{where}: {error}") from error
    if (decision is Decision.AS_CUDA) != bool(values.get("by")):
        raise DecisionError(f"{where}: 'by' names the adaptations of what goes as on CUDA, and of nothing else")
    lists = {key: tuple(values.get(key, ())) for key in ("at", "condition", "by")}
    return Entry(values["package"], values["versions"], decision=decision, reason=values["reason"], **lists)


def _about(pattern: str, condition: str) -> bool:
    if _pattern(pattern).fullmatch(condition):
        return True
    opposite = re.fullmatch(r"not \((.*)\)", condition, re.DOTALL)
    return opposite is not None and _about(pattern, opposite[1])


@cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL)


if __name__ == "__main__":
    from pytest_trlcompat.accelerator import decisions  # once under its own name, whose classes the page compares

    sys.exit(decisions.main())
