"""A cure whose boundary two cells have measured: one with the release, one with the release before, none between.

A search would measure the same two stacks again. What broke is searched nevertheless: an alarm must be seen twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from packaging.version import Version

from pytest_trlcompat import __version__
from pytest_trlcompat._escaping import fenced, in_row
from pytest_trlcompat._secrets import redacted
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.report import texts
from pytest_trlcompat.watch.changes import Change, Kind, Verdicts
from pytest_trlcompat.watch.narrowing import Narrowed

__all__ = ["measured_boundary"]


def measured_boundary(
    change: Change, base: Lock, base_verdicts: Verdicts, lock: Mapping[str, str], releases: Iterable[Version]
) -> Narrowed | None:
    """The boundary that two cells have measured; ``None`` if something is left to search for.

    Args:
        base: the newest known stack.
        base_verdicts: what that stack gave.
        lock: of the cell that shows the change.
        releases: of the package, as far as the index has them.
    """
    release, before = change.cell.release, change.cell.previous
    if change.kind is not Kind.CURED or release is None or change.subject != "upstream" or not before:
        return None
    seen = base_verdicts.get(change.record.key)
    if base.packages.get(release.package) != before or seen is None or not seen[0].is_problem:
        return None
    # A release between them was not measured, and may be the one.
    if any(Version(before) < version < Version(release.version) for version in releases):
        return None
    moved = sorted(
        f"{name} {base.packages.get(name, 'none')} to {lock.get(name, 'none')}"
        for name in {*base.packages, *lock} - {release.package}
        if base.packages.get(name) != lock.get(name)
    )
    together = f"; beside it moved {', '.join(moved)}" if moved else ""
    verdict = f"{release} fixed {change.issue} ({seen[0]} with {before}){together}"
    return Narrowed(
        command=f"trlcompat bisect releases --package {release.package} --bad {before} --good {release.version} "
        f"--find-fix --issue {change.issue} --strategy {change.record.strategy}",
        verdict=verdict,
        package=release.package,
        before=before,
        after=release.version,
        report=_report(change, verdict, base, lock),
    )


def _report(change: Change, verdict: str, base: Lock, lock: Mapping[str, str]) -> str:
    differ = sorted(name for name in {*base.packages, *lock} if base.packages.get(name) != lock.get(name))
    lines = [f"-{name}=={base.packages[name]}" for name in differ if name in base.packages]
    lines += [f"+{name}=={lock[name]}" for name in differ if name in lock]
    return "\n".join(
        [
            f"# {in_row(verdict)}",
            "",
            f"Both were measured, by pytest-trlcompat {__version__}, and no release lies between them. What differs:",
            "",
            fenced("\n".join(lines), "diff"),
            "",
            f"With the newer one, under {in_row(change.record.strategy)}:",
            "",
            fenced(redacted(texts.evidence(change.record))),
            "",
        ]
    )
