"""Which known issues each mixin cures, from the catalogue.

A wheel has them as ``known.json``, which its build writes. In a checkout nothing is written: there the catalogue itself
is read, when somebody asks. So that users can train with the mixins without the package of the catalogue, its files are
read as data.
"""

from __future__ import annotations

import errno
import functools
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_trlcompat._issue_ids import kind_of
from pytest_trlcompat.trainers.curing.kinds import KINDS, kind_named
from pytest_trlcompat.trainers.curing.names import FOLDER, names_of

__all__ = ["FILE", "CuredIssue", "collected", "issues_of", "mixins_of", "stored"]

FILE = FOLDER / "known.json"
_CATALOG = FOLDER.parent / "catalog" / "issues"


@dataclass(frozen=True)
class CuredIssue:
    """A known issue that a mixin cures.

    Attributes:
        id: in the catalogue.
        title: one line.
        upstream: links to reports and fixes.
    """

    id: str
    title: str
    upstream: tuple[str, ...]


def issues_of(mixin: str) -> tuple[CuredIssue, ...]:
    """Those of a mixin, by its class name, in the order of the catalogue; none where no entry names it."""
    return _issues().get(mixin, ())


@functools.cache
def _issues() -> Mapping[str, tuple[CuredIssue, ...]]:
    if not FILE.is_file():
        return collected(_entries())
    document = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        mixin: tuple(CuredIssue(entry["id"], entry["title"], tuple(entry["upstream"])) for entry in entries)
        for mixin, entries in document.items()
    }


def collected(entries: Iterable[Mapping[str, Any]]) -> dict[str, tuple[CuredIssue, ...]]:
    """Each mixin to the issues that it cures, from the entries of the catalogue as they are written."""
    issues: dict[str, list[CuredIssue]] = {}
    for entry in entries:
        modules = (entry.get("cure", ""), *entry.get("cure_with", ()))
        for mixin in mixins_of(modules, kind_of(entry["id"])):
            issues.setdefault(mixin, []).append(CuredIssue(entry["id"], entry["title"], tuple(entry["upstream"])))
    return {mixin: tuple(issues[mixin]) for mixin in sorted(issues)}


def mixins_of(modules: Iterable[str], trainer: str = "") -> tuple[str, ...]:
    """The mixins that modules of this package define; of a trainer that is known, those that its kind gets."""
    names = [name for module in modules for name in names_of(module) if name.endswith("Mixin")]
    return tuple(name for name in names if not trainer or name in KINDS[kind_named(trainer)])


def stored() -> str:
    """The contents of a wheel's ``known.json``."""
    document = {
        mixin: [{"id": issue.id, "title": issue.title, "upstream": list(issue.upstream)} for issue in issues]
        for mixin, issues in collected(_entries()).items()
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _entries() -> list[Mapping[str, Any]]:
    # Where trainings run this is not needed, and would take longer than what is.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    files = sorted(_CATALOG.glob("*/*.toml"))
    if not files:
        raise FileNotFoundError(errno.ENOENT, "there is no file of a known issue", str(_CATALOG))
    return [{"id": file.stem, **tomllib.loads(file.read_text(encoding="utf-8"))} for file in files]
